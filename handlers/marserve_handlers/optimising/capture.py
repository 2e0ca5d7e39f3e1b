"""Keeps what goes into a handler's model while requests pass through the handler.

The model is a module of torch, of any kind that takes hooks, or a session of ONNX Runtime. The handler notices nothing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from marserve_handlers.optimising.call_arrays import Call, own_copy
from marserve_handlers.support.comparing.held_models import is_session, models_of


@dataclass(frozen=True, slots=True)
class FoundModel:
    """The model of a handler; `model` is None where there is none to look into, and `why_not` then says why."""

    model: Any = None
    why_not: str = ""

    @property
    def kind(self) -> str:
        """`onnx` or `torch`; empty for none."""
        return "" if self.model is None else "onnx" if is_session(self.model) else "torch"


def find_model(handle: Any) -> FoundModel:
    """The one model that a handler's function reaches: its object's `model`, or the only one it holds."""
    service = getattr(handle, "__self__", None)
    found: list[Any] = []
    try:
        found = list(models_of(handle))
        own = getattr(service, "model", None)
    except Exception as error:  # the author's objects may do anything when they are looked at
        return FoundModel(None, f"the handler's objects cannot be looked at ({type(error).__name__}: {error})")
    if any(each is own for each in found):
        return FoundModel(own)
    if len(found) == 1:
        return FoundModel(found[0])
    if not found:
        return FoundModel(None, "the handler holds no module of torch and no session of ONNX Runtime")
    return FoundModel(None, f"the handler holds {len(found)} models, and none of them is its attribute model")


class Capture:
    """What a model was called with while this context is open, call by call."""

    def __init__(self, model: Any) -> None:
        self.calls: list[Call] = []
        self._model = model
        self._close: Callable[[], None] = lambda: None

    def __enter__(self) -> Capture:
        if is_session(self._model):
            self._close = self._watch_session()
        elif isinstance(self._model, sys.modules["torch"].jit.ScriptModule):
            self._close = self._watch_script()
        else:
            self._close = self._watch_module()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def take(self) -> list[Call]:
        """The calls since the last time this was asked."""
        taken, self.calls = self.calls, []
        return taken

    def _watch_module(self) -> Callable[[], None]:
        model = self._model

        def see(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._keep(args, kwargs)

        hook = model.register_forward_pre_hook(see, with_kwargs=True)
        close: Callable[[], None] = hook.remove
        return close

    def _watch_script(self) -> Callable[[], None]:
        """TorchScript takes no hooks; its calls go through its class."""
        model, kind = self._model, type(self._model)
        call = kind.__call__

        def watched(module: Any, *args: Any, **kwargs: Any) -> Any:
            if module is model:
                self._keep(args, kwargs)
            return call(module, *args, **kwargs)

        kind.__call__ = watched

        def close() -> None:
            del kind.__call__

        return close

    def _watch_session(self) -> Callable[[], None]:
        session = self._model
        run = session.run

        def watched(names: Sequence[str] | None, feed: dict[str, Any], *rest: Any, **named: Any) -> Any:
            self._keep((), feed)
            return run(names, feed, *rest, **named)

        session.run = watched

        def close() -> None:
            with contextlib.suppress(AttributeError):
                del session.run

        return close

    def _keep(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep copies: handler and model may change what they were given."""
        call = Call(args, kwargs)
        self.calls.append(call.replaced({name: own_copy(leaf) for name, leaf in call.leaves.items()}))


def run_model(model: Any, call: Call) -> Any:
    """Call a model as it was called: a module in inference mode, a session by the names of its inputs."""
    if is_session(model):
        names = [node.name for node in model.get_outputs()]
        return dict(zip(names, model.run(None, dict(call.kwargs)), strict=True))
    with sys.modules["torch"].inference_mode():
        return model(*call.args, **call.kwargs)
