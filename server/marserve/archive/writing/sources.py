"""From what a person has, a Python file with a model, a program or a folder, to the plan of an archive.

    a Python file        the file, the modules beside it that it imports, the files beside it that it names
    .onnx, .pt2, .pt     the program, which `base_handler` runs
    of transformers      a folder that `save_pretrained` wrote, with its task
    a folder             all that is in it, except what is for its author alone (`FOR_THE_AUTHOR`) and hidden files; its
                         model is in the file of `MODEL_FILES`, else in its only one

A `model-config.yaml` and a `requirements.txt` beside a file go along. `marserve archive` writes the plan as an archive
and `marserve run` as a folder, so that both have the same members. Reads files, runs none of them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from marserve.archive.contents.manifest import MANIFEST_PATH
from marserve.archive.contents.model_config import parse_model_config
from marserve.archive.pickles.foreign_class import find_foreign_class
from marserve.archive.writing.python_source import Found, Imported, PythonSource, choose, read_python, snake_case
from marserve.archive.writing.writer import ArchiveSpec, Plan, plan_archive, walk
from marserve.errors import CannotArchive
from marserve.files.nearest import did_you_mean

CONFIG_NAME = "model-config.yaml"
REQUIREMENTS_NAME = "requirements.txt"
LABELS_NAME = "index_to_name.json"
PROGRAM_KEY = re.compile(r"^workerProgram\s*:", re.MULTILINE)
# The file of a folder that has the model, and the one that is looked for next.
MODEL_FILES = ("model.py", "handler.py")
PROGRAMS = (".onnx", ".pt2", ".pt")
_WEIGHTS = (".pth", ".bin", ".ckpt", ".safetensors", ".pkl", ".joblib")
_TORCH_SAVED = (".pt", ".pth", ".bin", ".ckpt")
_ARCHIVE_ENDINGS = (".mar", ".model", ".tar.gz", ".tgz")
_TRANSFORMERS, _TRANSFORMERS_CONFIG = "transformers", "config.json"
#: What the handler `transformers` does, by its names.
TASKS = (
    *("text-classification", "token-classification", "fill-mask", "summarization", "text-generation"),
    *("image-classification", "embeddings"),
)
TENSOR_HANDLER = "base_handler"
_HUB = "hf://"
_OBJECT = re.compile(r"[^\W\d]\w*")
# Where an export keeps weights that are too large for the ONNX file.
_ONNX_DATA = ("{name}.data", "{name}_data", "{stem}.data", "{stem}_data")
# Folders that are no part of a model.
_LEFT_OUT = ("node_modules", "__pycache__")
# Files at the top of a folder that are for its author, as `marserve new` writes them: tests, a README, a request. They
# go along all the same where the model's own files import or name them, or its configuration does.
FOR_THE_AUTHOR = ("test_*.py", "*_test.py", "conftest.py", "README", "README.*", "request.*")
_LARGEST_PYTHON = 10 << 20
_MOST_MODULES = 1_000


@dataclass(frozen=True, slots=True)
class Wishes:
    """What is asked beyond the source.

    `options` are keys of a model's configuration, which take precedence over its file. `name` may be the source's own.
    `task` is what a model of transformers does, None where its folder says that.
    """

    name: str | None = None
    version: str = "1.0"
    extra_files: tuple[str, ...] = ()
    serialized_file: Path | None = None
    requirements_file: Path | None = None
    config_file: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    task: str | None = None


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """The archive's plan; the source's `path`, the model `found` in its Python file, and every Python file's facts.

    `left_out` are the files of a folder that are for its author alone.
    """

    plan: Plan
    path: Path
    found: Found | None = None
    python: tuple[PythonSource, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder of the source."""
        return self.path if self.path.is_dir() else self.path.parent


def split_source(word: str) -> tuple[Path, str | None]:
    """A source's path and the object behind its last colon, None without one."""
    path, colon, name = word.rpartition(":")
    if colon and path and _OBJECT.fullmatch(name) and not os.path.lexists(word):
        return Path(path), name
    return Path(word), None


def is_source(word: str) -> bool:
    """Whether a word names a source rather than a model: it looks like a path, or is that of a folder."""
    path, name = split_source(word)
    return name is not None or path.suffix in (".py", *PROGRAMS) or "/" in word or word == "." or path.is_dir()


def is_hub_address(word: str) -> bool:
    """Whether a word is the address of a hub's model, which a command fetches before it is planned as a folder."""
    return word.lower().startswith(_HUB)


def is_archive(word: str) -> bool:
    """Whether a word is the path of an archive: a file with such a name, or a folder with a manifest."""
    path = Path(word)
    if path.is_dir():
        return (path / MANIFEST_PATH).is_file()
    return path.name.lower().endswith(_ARCHIVE_ENDINGS) and path.is_file()


def plan_source(word: str, wishes: Wishes | None = None) -> SourcePlan:
    """Find the model of a source and every file of its archive. Raises CannotArchive."""
    wishes = wishes or Wishes()
    check_task(wishes.task)
    path, name = split_source(word)
    if wishes.task is not None and not (path.is_dir() and is_of_transformers(path)):
        raise CannotArchive(f"--task is for the folder of a model of transformers, which {path} is not.")
    if not os.path.lexists(path):
        raise CannotArchive(f"There is no file or folder {path}{_like(path)}")
    if path.is_dir():
        return _plan_folder(path, name, wishes)
    if not path.is_file():
        raise CannotArchive(f"{path} is no file or folder.")
    if path.suffix == ".py":
        return _plan_python(path, name, wishes)
    if name is not None:
        raise CannotArchive(f"{path} is no Python file, so {name} cannot be looked for in it; leave out :{name}.")
    return _plan_program(path, wishes)


def check_task(task: str | None) -> None:
    """Raise CannotArchive for a task that the handler does not have."""
    if task is not None and task not in TASKS:
        hint = did_you_mean(task, TASKS, ".")
        raise CannotArchive(f"--task takes {', '.join(TASKS)}; it got {task!r}{hint}")


def missing_modules(planned: SourcePlan) -> Iterator[tuple[PythonSource, Imported]]:
    """The imports at the top of the source's files that neither it nor this installation has."""
    for source in planned.python:
        for imported in source.imports:
            top = imported.module.partition(".")[0]
            if imported.may_fail or imported.level or not top or _is_beside(planned.folder, top):
                continue
            if not is_installed(top):
                yield source, imported


def is_installed(module: str) -> bool:
    """Whether a top-level module can be imported here; nothing is imported."""
    if module in sys.modules or module in ("ts", "model_archiver"):  # workers have TorchServe's names
        return True
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _like(path: Path) -> str:
    parent = path.parent
    names = [each.name for each in parent.iterdir()] if parent.is_dir() else []
    return did_you_mean(path.name, names, ".")


# ------------------------------------------------------------------------------------------------- a Python file


def _plan_python(path: Path, name: str | None, wishes: Wishes) -> SourcePlan:
    folder = path.parent
    read = _read_file(path, path.name)
    found = choose(read, name)
    members, python = _with_modules(path, read)
    for source in python:
        for named in source.file_names:
            for member, file in _named_files(folder, named):
                members.setdefault(member, file)
    members.pop(path.name, None)
    return _plan(path, found, python, members, wishes, name_of(found, path))


def name_of(found: Found, path: Path) -> str:
    """The model's name: declared, else its class's or function's, else for `handle` the file's."""
    if found.model_name:
        return found.model_name
    return _as_name(path.stem) if found.name == "handle" else snake_case(found.name)


def _with_modules(path: Path, read: PythonSource) -> tuple[dict[str, Path], tuple[PythonSource, ...]]:
    """The members of a file and the modules beside it that it imports, and theirs; and the facts of each."""
    folder, members, python = path.parent, {path.name: path}, [read]
    left = [(read, "")]
    while left:
        source, package = left.pop()
        for imported in source.imports:
            for member, file in _modules(folder, imported, package):
                if member in members:
                    continue
                members[member] = file
                if len(members) > _MOST_MODULES:
                    raise CannotArchive(
                        f"{path.name} imports more than {_MOST_MODULES} files beside it; pack its folder."
                    )
                if file.suffix == ".py":
                    inner = _read_file(file, member)
                    python.append(inner)
                    left.append((inner, os.path.dirname(member)))
    return members, tuple(python)


def _modules(folder: Path, imported: Imported, package: str) -> Iterator[tuple[str, Path]]:
    """The files beside a source that an import may bring: a module, or a package whole."""
    start = ""
    if imported.level:
        parts = package.split("/") if package else []
        start = "/".join(parts[: len(parts) - imported.level + 1])
    dotted = [part for part in imported.module.split(".") if part]
    candidates = [dotted, *([*dotted, name] for name in imported.names)] if imported.level else [dotted[:1]]
    for parts in candidates:
        if not parts:
            continue
        base = "/".join([start, parts[0]] if start else [parts[0]])
        if (file := folder / f"{base}.py").is_file():
            yield f"{base}.py", file
        elif any((folder / base).glob("*.py")):
            for name, inner in walk_model(folder / base):
                yield f"{base}/{name}", inner


def _is_beside(folder: Path, top: str) -> bool:
    return (folder / f"{top}.py").is_file() or (folder / top).is_dir()


def _named_files(folder: Path, named: str) -> Iterator[tuple[str, Path]]:
    """The file of that name, or the files of a folder whose name has a slash: a single word names one by chance."""
    path = folder / named
    member = os.path.normpath(named)
    if member.startswith("MAR-INF"):
        return
    try:
        if path.is_file():
            yield member, path
        elif "/" in named and path.is_dir():
            for name, inner in walk_model(path):
                yield f"{member}/{name}", inner
    except OSError:
        return


def _read_file(path: Path, label: str) -> PythonSource:
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST_PYTHON + 1)
    except OSError as error:
        raise CannotArchive(f"{path} cannot be read ({error.strerror or error}).") from None
    if len(text) > _LARGEST_PYTHON:
        raise CannotArchive(f"{path} has more than {_LARGEST_PYTHON >> 20} MiB, which no Python file with a model has.")
    return read_python(text, label)


# --------------------------------------------------------------------------------------------------- a program


def _plan_program(path: Path, wishes: Wishes) -> SourcePlan:
    if not is_program(path):
        named = find_foreign_class(path) if path.suffix in _TORCH_SAVED else ""
        if named:
            raise CannotArchive(
                f"{path} is a pickle with the class {named}, as of a whole module, and is not loaded: export the "
                "module with torch.export.export and torch.export.save to a .pt2, or with torch.jit.script(net).save, "
                "or save its state_dict() beside a Python file with the model."
            )
        what = "weights alone" if path.suffix in (*_WEIGHTS, ".pt") else "no model"
        raise CannotArchive(
            f"{path} is {what}: name a Python file with the model, as in model.py:Net, "
            f"or a program ({', '.join(PROGRAMS[:2])}, TorchScript)."
        )
    members = {}
    for pattern in _ONNX_DATA if path.suffix == ".onnx" else ():
        data = path.parent / pattern.format(name=path.name, stem=path.stem)
        if data.is_file():
            members[data.name] = data
    labels = path.parent / LABELS_NAME
    if labels.is_file():
        members[LABELS_NAME] = labels
    return _plan(path, None, (), members, wishes, _as_name(path.stem))


def is_program(path: Path) -> bool:
    """Whether a file is a model that needs no code of its own: ONNX, an exported program, TorchScript."""
    if path.suffix in (".onnx", ".pt2"):
        return True
    if path.suffix != ".pt":
        return False
    with path.open("rb") as file:  # TorchScript: the zip file's directory, near its end, names the constants
        if file.read(4) != b"PK\x03\x04":
            return False
        file.seek(-min(path.stat().st_size, 1 << 20), os.SEEK_END)
        return b"/constants.pkl" in file.read()


# ---------------------------------------------------------------------------------------------------- a folder


def is_of_transformers(folder: Path) -> bool:
    """Whether a folder is one that `save_pretrained` wrote, without code of its own."""
    try:
        document = json.loads((folder / _TRANSFORMERS_CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(document, dict) or document.keys().isdisjoint(("architectures", "model_type")):
        return False
    return not any((folder / name).is_file() for name in MODEL_FILES)


def _plan_transformers(folder: Path, wishes: Wishes) -> SourcePlan:
    """The files of the folder at the archive's top, and the task in the configuration."""
    further = {} if wishes.task is None else {"handler": {"task": wishes.task}}
    spec = ArchiveSpec(
        wishes.name or _as_name(folder.resolve().name),
        wishes.version,
        _TRANSFORMERS,
        extra_files=wishes.extra_files,
        requirements_file=wishes.requirements_file,
        keeps_folders=True,
    )
    return SourcePlan(_configured(spec, folder, dict(walk_model(folder)), further, wishes), folder)


def _plan_folder(folder: Path, name: str | None, wishes: Wishes) -> SourcePlan:
    if name is None and is_of_transformers(folder):
        return _plan_transformers(folder, wishes)
    path = _model_of(folder, name)
    members = {member: file for member, file in walk_model(folder) if member != MANIFEST_PATH}
    members.pop(path.name, None)
    for_author = {member: members.pop(member) for member in list(members) if _is_for_author(member)}
    needed = _needed(for_author, [path, *members.values()], wishes.config_file or _beside(folder, CONFIG_NAME))
    members |= {member: for_author.pop(member) for member in needed}
    title = _as_name(folder.resolve().name)
    if path.suffix != ".py":
        planned = _plan(path, None, (), members, wishes, title)
    else:
        read = _read_file(path, path.name)
        python = tuple(_read_file(file, member) for member, file in members.items() if member.endswith(".py"))
        found = choose(read, name)
        planned = _plan(path, found, (read, *python), members, wishes, found.model_name or title)
    left_out = tuple(member for member in for_author if member not in planned.plan.members)
    return SourcePlan(planned.plan, folder, planned.found, planned.python[:1], left_out)


def _is_for_author(member: str) -> bool:
    return any(fnmatchcase(member, pattern) for pattern in FOR_THE_AUTHOR) and "/" not in member


def _needed(for_author: Mapping[str, Path], files: list[Path], config: Path | None) -> list[str]:
    """Which files that look as though they were for the author the model needs: its files or its keys name them."""
    said = config.read_text("utf-8", "replace") if config is not None and config.is_file() else ""
    needed = [member for member in for_author if member in said]
    left = [file for file in files if file.suffix == ".py"]
    while left and len(needed) < len(for_author):
        source = _read_file(left.pop(), "")
        named = {os.path.normpath(name) for name in source.file_names}
        for imported in source.imports:
            modules = [imported.module, *imported.names] if imported.level else [imported.module]
            named.update(f"{module.partition('.')[0]}.py" for module in modules)
        further = [member for member in for_author if member in named and member not in needed]
        needed += further
        left += [for_author[member] for member in further if member.endswith(".py")]
    return needed


def _model_of(folder: Path, name: str | None) -> Path:
    """The file of a folder that has its model. Raises CannotArchive unless there is one."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    python = [file for file in files if file.suffix == ".py" and not file.name.startswith(("test_", "conftest"))]
    for wanted in MODEL_FILES:
        if folder / wanted in python:
            return folder / wanted
    if name is not None:
        python = [file for file in python if name in _read_file(file, file.name).bound]
    elif len(python) > 1:
        python = [file for file in python if _read_file(file, file.name).found]
    programs = [file for file in files if is_program(file)] if name is None else []
    candidates = python or programs
    if len(candidates) == 1:
        return candidates[0]
    if not candidates and _has_program(folder):
        raise CannotArchive(
            f"{folder / CONFIG_NAME} names a workerProgram, and nothing says which file is its handler: pack it "
            f"(marserve archive NAME --handler FILE --config-file {CONFIG_NAME} --extra-file FILE); name the archive."
        )
    there = f"{len(candidates)} files of {folder} have one: {', '.join(file.name for file in candidates[:8])}"
    none = f"{folder} has no model: no {' or '.join(MODEL_FILES)}, no other Python file with one, no program"
    raise CannotArchive(f"{there}. Name the file." if candidates else f"{none} ({', '.join(PROGRAMS)}).")


def _has_program(folder: Path) -> bool:
    config = _beside(folder, CONFIG_NAME)
    return config is not None and PROGRAM_KEY.search(config.read_text("utf-8", "replace")) is not None


def walk_model(folder: Path) -> Iterator[tuple[str, Path]]:
    """The files of a folder that belong to a model: no hidden ones, no archives, no installed packages."""
    apart = {each.parent for each in folder.rglob("pyvenv.cfg")} if folder.is_dir() else set()
    for name, path in walk(folder):
        parts = name.split("/")
        if (
            parts[-1].startswith(".")
            or any(part in _LEFT_OUT for part in parts[:-1])
            or path.suffix in (".mar", ".pyc")
        ):
            continue
        if not any(path.is_relative_to(each) for each in apart):
            yield name, path


# ---------------------------------------------------------------------------------------------------- the plan


def _plan(
    path: Path,
    found: Found | None,
    python: tuple[PythonSource, ...],
    members: dict[str, Path],
    wishes: Wishes,
    name: str,
) -> SourcePlan:
    folder = path.parent
    requirements = wishes.requirements_file or _beside(folder, REQUIREMENTS_NAME)
    further = {}
    if found is not None and found.shape == "litserve" and python:
        _refuse_spec(python[0])
        further = lit_keys(python[0])
    handler = str(path) if found is None or found.is_entry else f"{path}:{found.name}"
    serialized = wishes.serialized_file if found is not None else path
    spec = ArchiveSpec(
        wishes.name or name,
        wishes.version,
        handler if found is not None else TENSOR_HANDLER,
        serialized,
        None,
        wishes.extra_files,
        requirements,
        keeps_folders=True,
    )
    return SourcePlan(_configured(spec, folder, members, further, wishes), path, found, python)


def _configured(
    spec: ArchiveSpec, folder: Path, members: dict[str, Path], further: Mapping[str, Any], wishes: Wishes
) -> Plan:
    """The plan of an archive with the configuration in `folder`, or another one, and the keys said elsewhere."""
    config = wishes.config_file or _beside(folder, CONFIG_NAME)
    made = _merged_config(config, further, wishes.options)
    if made is None:
        return plan_archive(replace(spec, config_file=config), members)
    config = config or Path(CONFIG_NAME)
    members.pop(config.name, None)
    return plan_archive(replace(spec, config_file=config), members, {config.name: made})


def _refuse_spec(source: PythonSource) -> None:
    if "spec" in source.lit_options.others:
        raise CannotArchive(
            f"{source.label} gives LitServe a spec, whose routes marserve does not serve; without it the model answers "
            "at /predict."
        )


def lit_keys(source: PythonSource) -> dict[str, Any]:
    """What a file says to LitServe about batches, workers and time, as keys of a model's configuration."""
    server, api = source.lit_options.server, source.lit_options.api
    said = {**server, **api}
    keys: dict[str, Any] = {}
    size, wait_s = said.get("max_batch_size"), said.get("batch_timeout")
    if isinstance(size, int) and size > 1:
        keys["batchSize"] = size
        if isinstance(wait_s, int | float) and wait_s > 0:
            keys["maxBatchDelay"] = max(1, round(wait_s * 1000))
            keys["batchPolicy"] = "fixed"
    workers = server.get("workers_per_device")
    if isinstance(workers, int) and not isinstance(workers, bool) and workers > 1:
        keys |= {"minWorkers": workers, "maxWorkers": workers}
    if server.get("accelerator") == "cpu":
        keys["deviceType"] = "cpu"
    elif server.get("accelerator") in ("cuda", "gpu"):
        keys["deviceType"] = "gpu"
    if said.get("enable_async") is True:
        keys["asyncCommunication"] = True
    return keys


def _merged_config(config: Path | None, further: Mapping[str, Any], options: Mapping[str, Any]) -> bytes | None:
    """The configuration with the keys that are said elsewhere; None if the file, or its absence, says all."""
    if not options and not further:
        return None
    document: dict[str, Any] = {}
    if config is not None:
        try:
            parsed = parse_model_config(config.read_bytes(), config.name)
        except OSError as error:
            raise CannotArchive(f"{config} cannot be read ({error.strerror or error}).") from None
        if parsed.document is None:
            raise CannotArchive(f"{config} cannot be used: {parsed.defect}.")
        document = dict(parsed.document)
    merged = {**further, **document, **options}
    if isinstance(further.get("handler"), dict) and isinstance(document.get("handler"), dict):
        merged["handler"] = {**document["handler"], **further["handler"]}
    if merged == document and config is not None:
        return None
    return yaml.safe_dump(merged, sort_keys=True, allow_unicode=True).encode()


def _beside(folder: Path, name: str) -> Path | None:
    return folder / name if (folder / name).is_file() else None


def _as_name(text: str) -> str:
    """A file's or folder's name as a model's: other characters than letters, digits, `_`, `-` and `.` become `_`."""
    return re.sub(r"[^A-Za-z0-9_\-.]", "_", text).lstrip("_-.") or "model"
