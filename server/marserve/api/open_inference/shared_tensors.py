"""Which tensors of an inference request lie in shared memory, and where: read from its JSON, for its worker. Pure.

Region, offset and size are held against what is registered before the request is accepted. Shape and data type are the
worker's to check.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from marserve.api.open_inference.regions import Regions, Span, shown
from marserve.errors import BadInput, without_stop
from marserve.messages import SHARED_TENSORS
from marserve.registry.models import Registry

# JSON up to this length is looked at: a request that names shared memory has little else to say.
LOOKED_AT_BYTES: Final = 32 * 1024

_REGION, _OFFSET, _SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"
_MENTIONED: Final = b'"shared_memory_'


class _Tensor(msgspec.Struct):
    """What is read of an input, or of an output that is asked for; the rest is skipped."""

    name: Any = None
    parameters: Any = None


class _Body(msgspec.Struct):
    inputs: list[_Tensor] = []
    outputs: list[_Tensor] | None = None


_decode = msgspec.json.Decoder(_Body).decode
_encode = msgspec.json.Encoder().encode


class SharedTensors:
    """Finds the shared memory that requests name."""

    def __init__(self, regions: Regions, registry: Registry) -> None:
        self._regions = regions
        self._registry = registry

    def header(self, model: str, version: str | None, body: bytes | bytearray, end: int) -> tuple[str, str] | None:
        """The server's header for the worker; None if the JSON, the body's first `end` bytes, names no shared memory.

        Raises BadInput for memory that cannot be used, ModelNotFound and VersionNotFound.
        """
        if end > LOOKED_AT_BYTES or body.find(_MENTIONED, 0, end) < 0:
            return None
        try:
            document = _decode(memoryview(body)[:end])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadInput(
                f"The JSON of a request that names shared memory cannot be read: {without_stop(error)}. NaN and "
                "Infinity may come in a binary tensor."
            ) from None
        inputs = self._spans(document.inputs, "Input", "inputs")
        outputs = self._spans(document.outputs or (), "Output", "outputs")
        if not inputs and not outputs:
            return None
        total = sum(span.size for span in inputs.values())
        if total > self._regions.most_bytes:
            raise BadInput(
                f"The inputs' shared_memory_byte_size come to {total}, more than all regions together may have, "
                f"{self._regions.most_bytes} (system_shared_memory_size)."
            )
        if not self._registry.takes_tensors(model, version):
            raise BadInput(
                f"The model {shown(model)} takes no tensors in shared memory, as it does not declare its tensors; send "
                "them in the body."
            )
        if self._registry.runs_elsewhere(model, version):
            raise BadInput(
                f"The model {shown(model)} takes no tensors in shared memory, as its workers are on other machines; "
                "send them in the body."
            )
        return SHARED_TENSORS, _encode({"inputs": inputs, "outputs": outputs}).decode()

    def _spans(self, tensors: Sequence[_Tensor], kind: str, place: str) -> dict[str, Span]:
        found: dict[str, Span] = {}
        for number, tensor in enumerate(tensors):
            given = tensor.parameters
            if not isinstance(given, dict) or not any(name in given for name in (_REGION, _OFFSET, _SIZE)):
                continue
            if not isinstance(tensor.name, str) or not tensor.name:
                raise BadInput(f"{place}[{number}].name is {shown(tensor.name)}; it must be a tensor's name.")
            words = f"{kind} {shown(tensor.name)}"
            for name in (_REGION, _SIZE):
                if name not in given:
                    raise BadInput(f"{words} has no {name}; {_REGION} and {_SIZE} come together.")
            if given.get("classification"):
                raise BadInput(f"{words} asks for a classification in {_REGION}; ask for one of them.")
            found[tensor.name] = self._regions.span(words, given[_REGION], given.get(_OFFSET, 0), given[_SIZE])
        return found
