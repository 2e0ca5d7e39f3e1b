"""Folders as an unpacked archive is one: a handler's source, and the order to load it."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path
from typing import Any

import msgspec

from marserve.messages import Load

OBEDIENT = Path(__file__).with_name("obedient_handler.py")


def write_model(folder: Path, source: str | Path = OBEDIENT, **fields: Any) -> Load:
    """Write `source` (text, or a file to copy) as the handler of a model in `folder`; the order to load it.

    `fields` are those of `Load`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(source, Path):
        shutil.copy(source, folder / "handler.py")
    else:
        (folder / "handler.py").write_text(textwrap.dedent(source))
    load = Load("m", "1.0", str(folder), "handler.py", None, None, batch_size=1)
    return msgspec.structs.replace(load, **fields)
