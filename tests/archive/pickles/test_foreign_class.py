"""Tests for the class of a whole module in a file of `torch.save`."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest

from marserve.archive.pickles.foreign_class import find_foreign_class


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_whole_module_names_its_class_and_a_state_dict_none(tmp_path: Path, is_zip: bool) -> None:
    """In both forms that torch writes."""
    torch = pytest.importorskip("torch")
    net, path = torch.nn.Linear(2, 2), tmp_path / "net.pt"

    torch.save(net, path, _use_new_zipfile_serialization=is_zip)
    whole = find_foreign_class(path)
    torch.save({"net": net.state_dict(), "epoch": 3}, path, _use_new_zipfile_serialization=is_zip)

    assert whole == "torch.nn.modules.linear.Linear"
    assert find_foreign_class(path) == ""


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (pickle.dumps(SimpleNamespace(a=1)), "types.SimpleNamespace"),
        (pickle.dumps(OrderedDict(a={1})), ""),
        (b"", ""),
        (b"PK\x03\x04 and no directory", ""),
        (b"some text", ""),
    ],
)
def test_any_file_has_an_answer(tmp_path: Path, content: bytes, named: str) -> None:
    """Empty for what is damaged, or no pickle at all."""
    path = tmp_path / "net.pt"
    path.write_bytes(content)

    assert find_foreign_class(path) == named


def test_a_file_that_is_not_there_has_no_class(tmp_path: Path) -> None:
    """Another sentence says that it is missing."""
    assert find_foreign_class(tmp_path / "net.pt") == ""
