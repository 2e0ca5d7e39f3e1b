"""Packages for pip, made in the test: wheels with a module each, and an index that keeps whoever asks it waiting."""

from __future__ import annotations

import contextlib
import socket
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path


def write_wheel(
    folder: Path,
    name: str,
    version: str = "1.0",
    *,
    requires: tuple[str, ...] = (),
    modules: Mapping[str, str] | None = None,
) -> Path:
    """A wheel of one distribution with a module of its name that says its version, and a program of that name."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    metadata = [
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        *(f"Requires-Dist: {r}\n" for r in requires),
    ]
    sources = {f"{name}.py": f"version = {version!r}\ndef main(): print(version)\n", **(modules or {})}
    with zipfile.ZipFile(path, "w") as wheel:
        for member, source in sources.items():
            wheel.writestr(member, source)
        wheel.writestr(f"{info}/METADATA", "".join(metadata))
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/entry_points.txt", f"[console_scripts]\n{name}-says={name}:main\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def write_index(folder: Path, *wheels: Path) -> str:
    """A `file:` index below `folder` with these wheels; its address."""
    for wheel in wheels:
        name = wheel.name.split("-", 1)[0]
        page = folder / name.lower().replace("_", "-") / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(f'<!DOCTYPE html><a href="{wheel.as_uri()}">{wheel.name}</a>')
    return folder.as_uri()


@contextlib.contextmanager
def waiting_index() -> Iterator[str]:
    """The address of an index that takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/simple"
