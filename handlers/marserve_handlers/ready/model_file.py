"""Finds the file of an archive that holds the model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from marserve_handlers.errors import ModelNotLoadable


def find_model_file(folder: str, manifest: Mapping[str, Any] | None, endings: Sequence[str], handler: str) -> str:
    """The path of the manifest's serialized file, else of the only file at the archive's top with such an ending.

    Raises ModelNotLoadable for a file that is missing or has another ending, and where several files would do.
    """
    entry = (manifest or {}).get("model") or {}
    name = entry.get("serializedFile")
    if name is None:
        files = [each for each in os.listdir(folder) if each.endswith(tuple(endings))]
        if len(files) != 1:
            found = f"has {' and '.join(sorted(files))}" if files else "has none"
            raise ModelNotLoadable(
                f"{handler} loads one file that ends in {', '.join(endings)}, and the archive {found}: name it with "
                "--serialized-file when the archive is made."
            )
        name = files[0]
    if not str(name).endswith(tuple(endings)):
        raise ModelNotLoadable(f"{handler} loads a file that ends in {', '.join(endings)}; {name} does not.")
    path = os.path.join(folder, str(name))
    if not os.path.isfile(path):
        raise ModelNotLoadable(f"The archive's serialized file {name} is missing.")
    return path
