"""`allowedBatchSizes`: what is the batch size, and where it cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from marserve.archive.contents.model_config import parse_model_config
from marserve.errors import BadArchive
from marserve.model_options import Layers, say
from marserve.registry.intake.effective_options import effective_options
from marserve.registry.intake.registration import RegistryOptions


def options_of(archive: Any, **others: Any) -> Any:
    """What comes of it, and the warnings."""
    layers: Layers = {"archive": archive, "registration": say(), **others}
    return effective_options("m", "1.0", layers, RegistryOptions(), at_startup=False)


def test_the_largest_is_the_batch_size() -> None:
    """A layer above may want smaller batches; larger ones are not formed, and that is said."""
    archive = say(allowed_batch_sizes=(1, 2, 4, 8))

    sizes = [
        options_of(archive)[0].batch_size,
        options_of(archive, registration=say(batch_size=3))[0].batch_size,
        options_of(archive, desired=say(batch_size=2))[0].batch_size,
    ]
    larger, warnings = options_of(archive, registration=say(batch_size=16))

    assert sizes == [8, 3, 2]
    assert larger.batch_size == 8
    assert warnings == ["batches of 16 are not formed: the largest of allowedBatchSizes is 8"]


def test_another_batch_size_in_the_same_file_is_refused() -> None:
    """With both, and what to do."""
    with pytest.raises(BadArchive) as refused:
        options_of(say(allowed_batch_sizes=(1, 4), batch_size=8))
    assert refused.value.message == (
        "batchSize is 8 and allowedBatchSizes is [1, 4]: the largest of them is the batch size, so leave batchSize out."
    )
    assert options_of(say(allowed_batch_sizes=(1, 4), batch_size=4))[0].batch_size == 4


@pytest.mark.parametrize("key", ["is_concurrent", "sequence_batching", "continuous_batching"])
def test_it_is_refused_where_requests_do_not_come_in_batches(key: str) -> None:
    """As for `asyncCommunication`, sequences and steps."""
    with pytest.raises(BadArchive, match=r"allowedBatchSizes is \[1, 4\] .* whose requests do not come in batches"):
        options_of(say(allowed_batch_sizes=(1, 4), sequence_max_idle_s=1.0, **{key: True}))


@pytest.mark.parametrize("value", ["8", "[]", "[4, 2]", "[2, 2]", "[0, 1]", "[true]", "[1.5]", "[1, 70000]"])
def test_what_is_no_list_of_growing_sizes_is_refused(value: str) -> None:
    """With the value."""
    with pytest.raises(BadArchive, match=r"allowedBatchSizes of the model's .* is .*; it must be a list of 1"):
        parse_model_config(f"allowedBatchSizes: {value}\n".encode())
