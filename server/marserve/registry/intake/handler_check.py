"""Looks whether a handler can be found at all, before a worker is started for it. Runs no code of the archive.

A handler that is found here may still fail to load: only the worker checks functions, classes and syntax.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from marserve.archive.contents.built_in_handlers import BUILT_IN_HANDLERS

# All handlers of `marserve_handlers`. The server may not import that package, so a test compares the two lists.
ALL_BUILT_IN = (
    *BUILT_IN_HANDLERS,
    "vision_handler",
    "text_handler",
    "dali_handler",
    "distributed.base_pippy_handler",
    "distributed.base_deepspeed_handler",
)
LONGEST_NAME = 200  # characters; file systems hold 255 bytes


def find_defect(
    handler: str | None, model_dir: Path, *, installs_requirements: bool, packages: Path | None = None
) -> str | None:
    """Why no worker can ever import `handler` (`image_classifier`, `h.py`, `h:entry`); None if a worker might.

    It is looked for where a worker looks: in the archive's folder, among installed modules, among built-in handlers.
    With `installs_requirements` an unknown module may still come with the model's own packages; once those are
    installed they lie in `packages`.
    """
    if not handler:
        return "no handler is named: the manifest has none, and neither has the registration"
    module = module_of(handler)
    top = module.partition(".")[0]
    if not top or len(module) > LONGEST_NAME:
        return f"handler {handler[:LONGEST_NAME]!r} names no module"
    if _is_in_folder(model_dir, top) or installs_requirements or _is_installed(top) or module in ALL_BUILT_IN:
        return None
    beside = folder_of(handler, model_dir)
    if beside is not None and _is_in_folder(beside, top):
        return None
    if packages is not None and _is_in_folder(packages, top):
        return None
    return f"handler {handler!r} was found neither in the archive nor among the installed or built-in handlers"


def hides_pythons_own(handler: str | None) -> str | None:
    """A warning about a handler's file with the name of a module of Python's standard library; None for others."""
    top = module_of(handler or "").partition(".")[0]
    if top not in sys.stdlib_module_names:
        return None
    return (
        f"the handler {top}.py has the name of a module that Python itself brings: each import of {top} gets the one "
        f"that was imported first; rename the file, to {top}_handler.py say"
    )


def folder_of(handler: str, model_dir: Path) -> Path | None:
    """The folder of the archive that a handler named as `path/h.py:f` lies in; its modules are found there first."""
    word = PurePosixPath(handler.partition(":")[0].strip())
    if word.is_absolute() or word.parent == PurePosixPath() or ".." in word.parts or "\0" in handler:
        return None
    folder = model_dir / word.parent
    try:
        is_inside = folder.is_dir() and folder.resolve().is_relative_to(model_dir.resolve())
    except OSError:  # a name too long
        return None
    return folder if is_inside else None


def module_of(handler: str) -> str:
    """The module part of a handler: the text before the first `:`, without folders and a last `.py`."""
    return PurePosixPath(handler.partition(":")[0].strip()).name.removesuffix(".py")


def _is_in_folder(folder: Path, module: str) -> bool:
    return (
        (folder / f"{module}.py").is_file()
        or (folder / module).is_dir()
        or any(folder.glob(f"{_literal(module)}.*.so"))
        or (folder / f"{module}.so").is_file()
        or (folder / f"{module}.pyc").is_file()
    )


def _literal(name: str) -> str:
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError, OSError):
        return False
