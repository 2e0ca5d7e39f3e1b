"""Tests that need an accelerator: without one, each is skipped and says what is missing."""

from __future__ import annotations

import os
import shutil

import pytest

from support.server import Server

_TOOLS = ("nvidia-smi", "rocm-smi")
_FILES = ("/dev/nvidiactl", "/dev/kfd")


def what_is_missing() -> str | None:
    """Why no device can be used here, None where one can. Torch is only imported where there may be one."""
    if not any(map(shutil.which, _TOOLS)) and not any(map(os.path.exists, _FILES)):
        return f"there is no GPU here: neither {' nor '.join((*_TOOLS, *_FILES))} is to be found"
    try:
        import torch
    except ImportError:
        return "torch is not installed: install it in the build for this machine's GPU"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU: install it in the build for this machine's GPU and driver"
    return None


_MISSING = what_is_missing()


@pytest.fixture(autouse=True)
def _device() -> None:
    if _MISSING is not None:
        pytest.skip(_MISSING)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's first import of torch may take minutes, from a disk that has not been read yet."""
    monkeypatch.setattr(Server, "client_timeout_s", 240.0)
