"""What was TorchServe's own can be named, and refuses when it is called."""

from __future__ import annotations

import pytest

from marserve_handlers.support.torchserve import internals as torchserve_internals
from marserve_handlers.support.torchserve.internals import ServerInternal, Service, TsModelLoader, retrieve_msg


def test_a_class_refuses_to_be_made() -> None:
    """One sentence: what it was part of, and what to do instead."""
    with pytest.raises(ServerInternal) as caught:
        Service("m", "folder", {}, print, None, 1)

    assert str(caught.value) == (
        "ts.service.Service is part of TorchServe's own server, which marserve replaces. To run a handler in a test, "
        "make a ts.context.Context, call initialize(context), then handle(data, context)."
    )


def test_its_methods_and_subclasses_refuse_too() -> None:
    """Under their own names."""
    with pytest.raises(ServerInternal, match=r"ts\.model_loader\.TsModelLoader\.load is part"):
        TsModelLoader.load("m", "folder")
    with pytest.raises(AttributeError):
        _ = Service.__missing__

    class Own(Service):
        """An author's."""

    with pytest.raises(ServerInternal, match=r"ts\.service\.Service"):
        Own()


def test_functions_refuse() -> None:
    """They are called what they were called."""
    assert retrieve_msg.__name__ == "retrieve_msg"
    with pytest.raises(ServerInternal, match=r"ts\.protocol\.otf_message_handler\.retrieve_msg"):
        retrieve_msg(None)


def test_every_public_name_is_one_of_torchserves() -> None:
    """No figure of the machine is kept."""
    assert torchserve_internals.system_metrics == []
