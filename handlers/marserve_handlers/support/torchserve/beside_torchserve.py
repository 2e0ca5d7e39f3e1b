"""Keeps `ts` from being two things at once: TorchServe's own package, and ours, installed over each other."""

from __future__ import annotations

import os
from collections.abc import Iterable


def refuse_beside_torchserve(package_path: Iterable[str]) -> None:
    """Raise ImportError where TorchServe is installed in the very folder that the package of this `__path__` is in.

    In workers ours lies in a folder of its own, and an installed TorchServe does not matter.
    """
    for path in package_path:
        folder = os.path.dirname(path)
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        if any(name.startswith("torchserve-") and name.endswith((".dist-info", ".egg-info")) for name in names):
            raise ImportError(
                "torchserve and marserve-ts are both installed here, and both own the package ts. Keep one: "
                "pip uninstall torchserve torch-model-archiver, then pip install --force-reinstall marserve-ts."
            )
