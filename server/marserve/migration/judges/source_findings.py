"""Judges one source file of an archive: whether its syntax and its imports work here. It only parses the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from marserve.migration.findings import Finding, Spot
from marserve.migration.judges.imports import TS, internal_in_ts, is_there, missing_in_ts, read_imports, refusing_in_ts

MAX_SOURCE_BYTES = 4_000_000
# Distributions whose modules have another name; for the rest the names differ only in dashes.
_MODULES = {"opencv-python": "cv2", "opencv-python-headless": "cv2", "pillow": "PIL", "pyyaml": "yaml"} | {
    "scikit-learn": "sklearn",
    "scikit-image": "skimage",
    "protobuf": "google",
    "beautifulsoup4": "bs4",
}


def judge_source(path: Path, folder: Path, shown: str, asked: dict[str, int]) -> Iterator[Finding]:
    """Findings about one file of an archive in `folder`; `asked` are the distributions that it requires, by line."""
    place = f"{shown}!{path.relative_to(folder).as_posix()}"
    if path.stat().st_size > MAX_SOURCE_BYTES:
        return
    try:
        source = path.read_bytes()
        imports = read_imports(source)
    except SyntaxError as error:
        spot = Spot(place, error.lineno or 0)
        yield spot.action(f"it is no Python that runs here: {error.msg}", "mend the source")
        return
    except ValueError as error:
        yield Spot(place).action(f"it is no Python that runs here: {error}", "mend the source")
        return
    brought = {module_of(name) for name in asked}
    for wanted in imports:
        spot, top = Spot(place, wanted.line), wanted.module.partition(".")[0]
        if top == TS and not (folder / "ts.py").exists() and not (folder / "ts").is_dir():
            for name in missing_in_ts(wanted):
                yield spot.action(
                    f"imports {name}, which is not there under TorchServe's names",
                    "see docs/migrating.md for what takes its place",
                )
            for name in refusing_in_ts(source, wanted):
                yield spot.action(
                    f"imports {name}, which refuses whenever it is called",
                    "see docs/migrating.md for what takes its place",
                )
            for name in internal_in_ts(wanted):
                yield spot.differs(
                    f"imports {name}: a part of TorchServe's server, which raises one sentence when it is called"
                )
        elif top not in brought and top != TS and not is_there(wanted.module, folder):
            yield spot.action(
                f"imports {wanted.module}, which is not installed here",
                f"install what brings {top}, or name it in the archive's requirements file",
            )


def module_of(distribution: str) -> str:
    """The likely module of a distribution."""
    return _MODULES.get(distribution.lower(), distribution.replace("-", "_"))
