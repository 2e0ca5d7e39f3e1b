"""What docs/worker-wire.md says of messages is what they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from marserve import messages, wire
from marserve.messages import Item, Result
from marserve.shared_page import FIRST_SLOT, PAGE_BYTES, SLOT_WORDS, SLOTS

PAGE = (Path(__file__).parents[2] / "docs" / "worker-wire.md").read_text()
ROWS = {
    name: re.findall(r"`(\w+)`", fields) for name, fields in re.findall(r"^\| `(\w+)` \|([^|]*)\|", PAGE, re.MULTILINE)
}
STRUCTS: dict[str, Any] = {
    str(each.__struct_config__.tag): each
    for each in vars(messages).values()
    if isinstance(each, type) and getattr(each, "__struct_config__", None) is not None and each.__struct_config__.tag
}


@pytest.mark.parametrize("name", ROWS)
def test_fields_are_in_their_order(name: str) -> None:
    """All of them; of `load` the first eight, which other languages need."""
    fields = list(STRUCTS[name].__struct_fields__)

    assert ROWS[name] == (fields[:8] if name == "load" else fields)


def test_further_fields_of_load_stand_where_the_page_says() -> None:
    """Those that a worker in another language may need."""
    fields = STRUCTS["load"].__struct_fields__
    told = PAGE[PAGE.index("`load` goes on") : PAGE.index("A model is loaded once")]
    found = {int(place): name for place, name in re.findall(r"(\d+)\s+`(\w+)`", told)}

    assert found == {place: fields[place - 1] for place in (9, 13, 14, 16, 17, 24, 28, 30)}


def test_every_message_that_such_a_worker_meets_has_a_row() -> None:
    """Sixteen at the time of writing, so that a table that is not read any more shows."""
    assert len(ROWS) == 16
    assert {"load", "batch", "batches", "stop", "hello", "loaded", "not_loaded", "results", "raised"} <= set(ROWS)


def test_items_and_results_have_the_fields_that_the_page_names() -> None:
    """Arrays without a name."""
    assert ", ".join(f"`{name}`" for name in Item.__struct_fields__) in PAGE
    assert "`status`, `reason`, `headers` (pairs of text), `error`, `thrown`" in PAGE
    assert Result.__struct_fields__ == ("status", "reason", "headers", "error", "thrown")


def test_numbers_of_frames_and_of_the_page_are_those_of_the_code() -> None:
    """Bounds, the version, and where slots are."""
    assert (wire.HEADER.size, wire.VERSION, wire.MAGIC) == (20, 1, b"mW")
    assert (wire.MAX_METADATA_BYTES, wire.MAX_BODIES_OF_WORKER) == (64 << 20, 65_536)
    assert (PAGE_BYTES, SLOTS, SLOT_WORDS, FIRST_SLOT) == (4096, 16, 17, 8)
    for words in ("64 MiB at most", "65,536 at most", "4,096 bytes", "16 slots of 17 words", "format, 1"):
        assert words in PAGE
