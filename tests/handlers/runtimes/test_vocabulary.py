"""Vocabularies are read as plain data."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from marserve_handlers.errors import ModelNotLoadable  # noqa: E402
from marserve_handlers.runtimes.vocabulary import load_vocabulary  # noqa: E402

pytestmark = pytest.mark.torch


def test_a_dict_of_any_kind_is_a_vocabulary(tmp_path: Path) -> None:
    """Token to number, in its order."""
    torch.save(OrderedDict(b=1, a=0), tmp_path / "v.pt")

    assert list(load_vocabulary(str(tmp_path / "v.pt")).items()) == [("b", 1), ("a", 0)]


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    """With its name."""
    (tmp_path / "v.pt").write_bytes(b"nonsense")

    with pytest.raises(ModelNotLoadable, match=r"v\.pt"):
        load_vocabulary(str(tmp_path / "v.pt"))
