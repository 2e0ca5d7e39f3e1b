"""Where pip is: among the installed modules, or in the wheel that Python itself brings to install pip from.

An environment without pip (marserve's images, uv's environments) runs it from that wheel: nothing is installed for it.
Reads folders, runs nothing.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

INSTALLED = ""
NOT_THERE = (
    "the server's Python, {python}, has neither pip nor the wheel of it that Python brings (ensurepip; on Debian in "
    "the package python3-venv); install one of them"
)


def find_pip() -> str | None:
    """What `import pip` needs first on `sys.path`: INSTALLED for nothing, else a wheel; None without pip."""
    if find_spec("pip") is not None:
        return INSTALLED
    return newest_wheel(file for folder in wheel_folders() for file in folder.glob("pip-*.whl"))


def wheel_folders() -> list[Path]:
    """Where Python keeps the wheels of `ensurepip`: the folder that its builder named, and its own."""
    named = sysconfig.get_config_var("WHEEL_PKG_DIR")
    module = find_spec("ensurepip")
    own = [Path(module.origin).parent / "_bundled"] if module is not None and module.origin else []
    return [*([Path(named)] if named else []), *own]


def newest_wheel(files: Iterable[Path]) -> str | None:
    """The wheel of the highest version; None without one."""
    return max(map(str, files), key=_version, default=None)


def _version(file: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", Path(file).name.split("-")[1])]
