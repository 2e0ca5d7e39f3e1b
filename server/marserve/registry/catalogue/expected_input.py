"""What a version's handler takes, guessed from its name and envelope: for a page that asks for it. Pure."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Final

from marserve.answers.pages import Expected

_OF_HANDLERS: Final[dict[str, Expected]] = {
    "base_handler": "json",
    "densenet_handler": "image",
    "dali_handler": "image",
    "dali_image_classifier": "image",
    "image_classifier": "image",
    "image_segmenter": "image",
    "object_detector": "image",
    "text_classifier": "text",
    "text_handler": "text",
    "trt_llm_handler": "json",
    "vision_handler": "image",
    "vllm_handler": "json",
}
# Envelopes of these names take JSON, whatever the handler behind them takes.
_JSON_ENVELOPES: Final = frozenset({"json", "kserve", "kservev2"})


def expected_input(handler: str, envelope: str | None) -> Expected:
    """What requests have to hold; "anything" for an author's own handler.

    `handler` is the manifest's or the registration's word (`image_classifier`, `h.py`, `h:entry`).
    """
    if envelope in _JSON_ENVELOPES:
        return "json"
    word = handler.partition(":")[0].strip()
    return "anything" if word != PurePosixPath(word).name else _OF_HANDLERS.get(word, "anything")
