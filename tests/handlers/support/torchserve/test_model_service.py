"""The older base classes."""

from __future__ import annotations

from typing import Any

from marserve_handlers.support.torchserve.model_service import ModelService, SingleNodeService
from support.model_context import make_context


def test_a_model_service_answers_by_inference() -> None:
    """Made without arguments, as a worker makes it; knows its model after `initialize`."""

    class Echo(ModelService):
        """Gives back what came."""

        def inference(self, data: list[Any]) -> list[Any]:
            """The rows."""
            return data

    service, context = Echo(), make_context("folder")
    service.initialize(context)

    assert (service.model_name, service.model_dir, service.gpu) == ("m", "folder", None)
    assert service.handle([1], context) == [1]
    assert (service.ping(), service.signature()) == (None, None)


def test_a_single_node_service_has_three_steps() -> None:
    """Each may be overridden."""

    class Sum(SingleNodeService):
        """Adds."""

        def _preprocess(self, data: Any) -> Any:
            return [row["body"] for row in data]

        def _inference(self, data: Any) -> Any:
            return [sum(values) for values in data]

    assert Sum("m", "folder", {}, 1).handle([{"body": [1, 2]}], make_context()) == [3]
