"""TorchServe's management service over gRPC: from its messages to the calls of the registry, and back (contract §5.2).

It decides nothing: the reader of HTTP's values reads these too, and the registry does what is asked. Every field of
these messages has a value, so an empty text and a number below 1 mean "not given".
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from time import monotonic
from typing import Any, Final

from marserve.api.grpc.calls import Answers, Call
from marserve.api.grpc.errors import ModelApiDisabled
from marserve.api.grpc.schema import MANAGEMENT, Schema
from marserve.api.parameters import REGISTER_PARAMETERS, QueryParameters, read_registration
from marserve.desired_state.policies import Changes
from marserve.errors import BadInput
from marserve.names import json_escaped
from marserve.registry.intake.registration import Registered, Scaled, default_set_message, unregistered_message
from marserve.registry.models import Registry

SERVICE: Final = f"{MANAGEMENT}.ManagementAPIsService"


class GrpcManagement:
    """The six methods of the service. Without `enable_model_api` those that register and unregister refuse."""

    def __init__(
        self, schema: Schema, registry: Registry, *, enable_model_api: bool, changes: Changes | None = None
    ) -> None:
        """`changes` takes the calls that change models; the registry if not given."""
        self._registry = registry
        self._changes = changes or Changes(registry)
        self._enable_model_api = enable_model_api
        self._response = schema.message(f"{MANAGEMENT}.ManagementResponse")

    def answers(self) -> Answers:
        """The coroutine of each method."""
        return {
            "DescribeModel": self._describe,
            "ListModels": self._list,
            "RegisterModel": self._register,
            "ScaleWorker": self._scale,
            "SetDefault": self._set_default,
            "UnregisterModel": self._unregister,
        }

    async def _describe(self, message: Any, call: Call) -> Any:
        model, version = _named(message), message.model_version or None
        if version == "all":
            return self._document(self._registry.describe_all(model))
        if not message.customized:
            return self._document([self._registry.describe(model, version)])
        within_s = None if call.deadline is None else call.deadline - monotonic()
        # Status and headers set by the handler have no effect over gRPC.
        described, _ = await self._registry.describe_customized(model, version, within_s)
        return self._document([described])

    async def _list(self, message: Any, call: Call) -> Any:
        page = self._registry.list_models(_positive(message.limit), _positive(message.next_page_token))
        return self._document(page.document())

    async def _register(self, message: Any, call: Call) -> Any:
        if not self._enable_model_api:
            raise ModelApiDisabled
        given = {"synchronous": "false", **_given(message, REGISTER_PARAMETERS)}
        registered = await self._changes.register(read_registration(QueryParameters(given, REGISTER_PARAMETERS)))
        return self._response(msg=_said(registered, call))

    async def _scale(self, message: Any, call: Call) -> Any:
        """Ignores `number_gpu` and `timeout`, as TorchServe does."""
        minimum = _positive(message.min_worker) or 1
        scaled = await self._changes.scale(
            _named(message),
            message.model_version or None,
            min_workers=minimum,
            max_workers=_positive(message.max_worker) or minimum,
            synchronous=message.synchronous,
        )
        return self._response(msg=_said(scaled, call))

    async def _set_default(self, message: Any, call: Call) -> Any:
        model, version = _named(message), message.model_version
        await self._changes.set_default(model, version)
        return self._response(msg=default_set_message(model, version))

    async def _unregister(self, message: Any, call: Call) -> Any:
        if not self._enable_model_api:
            raise ModelApiDisabled
        model = _named(message)
        await self._changes.unregister(model, message.model_version or None)
        return self._response(msg=unregistered_message(model))

    def _document(self, document: Any) -> Any:
        text = json_escaped(json.dumps(document, indent=2, ensure_ascii=False))
        return self._response(msg=text)


def _named(message: Any) -> str:
    if not message.model_name:
        raise BadInput("Parameter model_name is required.")
    name: str = message.model_name
    return name


def _positive(number: int) -> int | None:
    return number if number > 0 else None


def _given(message: Any, names: Iterable[str]) -> dict[str, str]:
    """The fields that are given, as parameters of a query."""
    given = {}
    for name in names:
        value = getattr(message, name, None)
        if isinstance(value, bool):
            if value:
                given[name] = "true"
        elif isinstance(value, int):
            if value > 0:
                given[name] = str(value)
        elif value:
            given[name] = value
    return given


def _said(outcome: Registered | Scaled, call: Call) -> str:
    return outcome.message if call.error_rules.as_recorded else outcome.own_message
