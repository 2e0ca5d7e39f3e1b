"""Downloads from the hub, with a stand-in for its library."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from marserve_handlers.support.torchserve.hub import download_model


def test_a_snapshot_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of that revision, into that folder, without pickles."""
    asked: dict[str, Any] = {}

    def snapshot_download(**options: Any) -> str:
        asked.update(options)
        return "folder"

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))

    assert download_model("a/b", "v1", "cache", use_auth_token=False) == "folder"
    assert (asked["repo_id"], asked["revision"], asked["cache_dir"], asked["token"]) == ("a/b", "v1", "cache", None)
    assert not [pattern for pattern in asked["allow_patterns"] if pattern.endswith((".bin", ".pt", ".pth", "*"))]


def test_without_the_package_it_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    """And how to install it."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)

    with pytest.raises(ModuleNotFoundError, match="pip install huggingface_hub"):
        download_model()
