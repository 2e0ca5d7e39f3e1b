"""Which tensors a call of the Open Inference Protocol to a version may have, by its declaration and envelope. Pure.

An envelope unpacks requests before the handler, so what counts is what the envelope reads:

    none                    what the model declares; without that the handler gets the body, and nothing is known
    kservev2                what a program of `base_handler` declares, which reads the protocol itself; of another
                            handler any tensors, each of them a row. A row of any kind is one element of BYTES
    json, kserve, body, …   no call of the protocol is read as such
    any                     what a handler of `@model` declares: envelopes are not used for it
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from marserve.registry.catalogue.expected_input import expected_input

OPEN_INFERENCE_ENVELOPE: Final = "kservev2"
ELEMENTS: Final = "elements"
"""In place of a tensor's dtype: texts or bytes."""

# The envelope's own name of an input that has none. It gives the handler the first element of BYTES alone. The answer
# has the input's name, and the type and shape of what the handler gave.
_A_ROW: Final[Mapping[str, Any]] = {
    "kind": "tensors",
    "batch": False,
    "inputs": [{"name": "input-0", "dtype": ELEMENTS, "shape": [1]}],
    "outputs": [],
}


def protocol_tensors(
    handler: str, envelope: str | None, declaration: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """What a version declares to clients of the protocol, in the form of a declaration; None for nothing.

    `handler` is the word of the manifest or the registration, `declaration` what the model declares.
    """
    if declaration is not None and reads_tensors(handler, envelope):
        return declaration
    # Of a program without a declaration (and prompts of language models) no call is known that it answers.
    if envelope == OPEN_INFERENCE_ENVELOPE and expected_input(handler, None) != "json":
        return _A_ROW
    return None


def reads_tensors(handler: str, envelope: str | None) -> bool:
    """Whether a handler that declares tensors gets the protocol's requests as they came, by no envelope."""
    if not envelope or envelope == OPEN_INFERENCE_ENVELOPE:
        return True
    return PurePosixPath(handler.partition(":")[0].strip()).name.removesuffix(".py") != "base_handler"
