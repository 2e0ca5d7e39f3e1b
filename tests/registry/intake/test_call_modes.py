"""Tests for how a version's handler is called: which of the three keys count, and what is said of the rest."""

from __future__ import annotations

from typing import Any

import pytest

from marserve.archive.contents.model_config import parse_model_config
from marserve.model_options import ModelOptions
from marserve.registry.intake.call_modes import CallMode, SequenceHeaderNames, read_call_mode

NAMES = SequenceHeaderNames("X-Id", "X-Start", "X-End")


def mode_of(config: str | ModelOptions, **more: Any) -> tuple[CallMode, list[str]]:
    """The mode that a configuration gives, and what was said about it."""
    warnings: list[str] = []
    asked = parse_model_config(config.encode()).options if isinstance(config, str) else config
    given = {"batch_size": 4, "max_workers": 3, "has_ranks": False, **more}
    return read_call_mode(asked, NAMES, **given, warnings=warnings), warnings


def test_most_models_are_called_batch_by_batch() -> None:
    """And nothing is said of it."""
    mode, warnings = mode_of("batchPolicy: goal\nlatencyGoalMs: 10")

    assert mode == CallMode()
    assert mode.allows("goal")
    assert not warnings


def test_every_key_of_sequences_counts() -> None:
    """Milliseconds become seconds; the names are the server's."""
    mode, warnings = mode_of(
        "sequenceBatching: true\nsequenceMaxIdleMSec: 3000\nsequenceTimeoutMSec: 500\nmaxNumSequence: 2\n"
        "maxSequenceJobQueueSize: 4\nfreeEndedSequences: true\ncontinuousBatching: true\n"
    )

    assert mode.is_continuous
    assert mode.sequences is not None
    assert (mode.sequences.max_idle_s, mode.sequences.timeout_s) == (3.0, 0.5)
    assert (mode.sequences.most, mode.sequences.queue_size, mode.sequences.frees_ended) == (2, 4, True)
    assert (mode.sequences.id_header, mode.sequences.start_header, mode.sequences.end_header) == NAMES
    assert not warnings


def test_as_many_sequences_as_batches_have_rows_where_nobody_says() -> None:
    """What TorchServe meant, and computed before it knew."""
    mode, _ = mode_of("sequenceBatching: true\nsequenceMaxIdleMSec: 1")

    assert mode.sequences is not None
    assert mode.sequences.most == 12


def test_sequences_without_an_idle_limit_are_warned_of() -> None:
    """Every request is refused then, as by TorchServe; describe says why."""
    _, warnings = mode_of("sequenceBatching: true")

    assert any("sequenceMaxIdleMSec" in warning for warning in warnings)


def test_a_handler_that_is_a_coroutine_has_neither_sequences_nor_steps() -> None:
    """Both are said to be unused."""
    mode, warnings = mode_of("asyncCommunication: true\nsequenceBatching: true\ncontinuousBatching: true")

    assert mode == CallMode(is_concurrent=True)
    assert [warning.split()[0] for warning in warnings] == ["sequenceBatching", "continuousBatching"]


def test_ranks_make_one_call_at_a_time() -> None:
    """A group of processes in which all make every call cannot overlap them."""
    mode, warnings = mode_of("asyncCommunication: true", has_ranks=True)

    assert mode == CallMode()
    assert warnings


@pytest.mark.parametrize(
    ("config", "policy", "is_allowed"),
    [
        ("continuousBatching: true", "idle", True),
        ("continuousBatching: true", "fixed", False),
        ("asyncCommunication: true", "fixed", True),
        ("asyncCommunication: true", "goal", False),
    ],
)
def test_a_policy_that_makes_no_sense_is_not_used(config: str, policy: str, is_allowed: bool) -> None:
    """Steps leave as the one before ends; a goal needs batches that have a time of their own."""
    mode, warnings = mode_of(f"{config}\nbatchPolicy: {policy}")

    assert mode.allows(policy) is is_allowed
    assert bool(warnings) is not is_allowed


def test_samples_of_a_handler_with_a_state_are_not_used() -> None:
    """They would be sequences, or streams, that nobody ends."""
    _, warnings = mode_of("continuousBatching: true\nsamples: [{text: hello}]")

    assert any("samples" in warning for warning in warnings)
