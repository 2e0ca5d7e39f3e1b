"""Tests for JSON's whole numbers and programs that do not declare their dtypes."""

from __future__ import annotations

from pathlib import Path

import pytest

from marserve_handlers.base import BaseHandler
from support.model_context import make_context

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def loaded(folder: Path, module: torch.nn.Module) -> BaseHandler:  # type: ignore[name-defined]
    """A base handler that has loaded this module as TorchScript."""
    torch.jit.script(module.eval()).save(folder / "model.pt")
    handler = BaseHandler()
    handler.initialize(make_context(folder, "model.pt"))
    return handler


def asked(handler: BaseHandler, *bodies: object) -> list[object]:
    """The answers to a batch of these values."""
    return handler.postprocess(handler.inference(handler.preprocess([{"body": body} for body in bodies])))


def test_whole_numbers_are_read_in_the_dtype_of_the_parameters(tmp_path: Path) -> None:
    """Where the program refuses them as they are: at the first request and at later ones."""
    handler = loaded(tmp_path, torch.nn.Linear(4, 2).double())

    given = asked(handler, [1, 2, 3, 4])

    assert given == handler.model(torch.tensor([[1.0, 2, 3, 4]], dtype=torch.float64)).tolist()
    assert asked(handler, [1, 2, 3, 4]) == given


def test_token_ids_stay_whole(tmp_path: Path) -> None:
    """An embedding has float parameters and takes whole numbers."""
    handler = loaded(tmp_path, torch.nn.Embedding(5, 2))

    assert asked(handler, [1, 2]) == [handler.model.weight[1:3].tolist()]
    with pytest.raises(Exception, match="index out of range"):
        asked(handler, [9])


def test_without_float_parameters_numbers_are_as_they_came(tmp_path: Path) -> None:
    """Whole ones give whole answers."""
    handler = loaded(tmp_path, torch.nn.ReLU())

    given = asked(handler, [1, -2])

    assert given == [[1, 0]]
    assert isinstance(given[0][0], int)  # type: ignore[index]


def test_what_the_network_alone_finds_is_its_error(tmp_path: Path) -> None:
    """It speaks of the shapes, and no longer of the dtype."""
    handler = loaded(tmp_path, torch.nn.Linear(4, 2))

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        asked(handler, [1, 2, 3])
