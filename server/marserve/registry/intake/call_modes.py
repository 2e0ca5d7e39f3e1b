"""How a version's handler is called: batch by batch, in sequences, in steps, or many batches at once. Pure.

TorchServe's keys are `sequenceBatching`, `continuousBatching` and `asyncCommunication`. The first two may come
together; a handler that is a coroutine runs many batches at once and can do neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from marserve.model_options import ModelOptions, Said
from marserve.pool.options import SequenceOptions


class SequenceHeaderNames(NamedTuple):
    """The headers in which requests name their sequence, begin one, and end one."""

    id: str = "ts_request_sequence_id"
    start: str = "ts_request_sequence_start"
    end: str = "ts_request_sequence_end"

    def environment(self) -> dict[str, str]:
        """The environment variables from which a handler's context learns them."""
        return {
            "TS_REQUEST_SEQUENCE_ID": self.id,
            "TS_REQUEST_SEQUENCE_START": self.start,
            "TS_REQUEST_SEQUENCE_END": self.end,
        }


PLAIN_NAMES = SequenceHeaderNames()


@dataclass(frozen=True, slots=True)
class CallMode:
    """The mode of a version; nothing is set for a version that is called batch by batch."""

    sequences: SequenceOptions | None = None
    is_continuous: bool = False
    is_concurrent: bool = False

    @property
    def has_state(self) -> bool:
        """Whether a worker keeps state of requests between two calls."""
        return self.sequences is not None or self.is_continuous

    @property
    def is_plain(self) -> bool:
        """Whether the handler is called batch by batch."""
        return not (self.has_state or self.is_concurrent)

    def allows(self, policy: str) -> bool:
        """Whether batches may be formed by this policy."""
        return policy == "idle" or self.is_plain or (policy == "fixed" and not self.has_state)


def may_run_coroutines(said: Said) -> bool:
    """Whether a handler that is a coroutine by its declaration runs as such: nothing said speaks against it.

    `asyncCommunication`, whatever it says, is the author's or operator's choice; the other keys need batches.
    """
    return not (
        "is_concurrent" in said
        or said.get("sequence_batching")
        or said.get("continuous_batching")
        or said.get("allowed_batch_sizes")
        or said.get("batch_policy") == "goal"
        or said.get("batch_check") in ("warn", "refuse")
        or said.get("batch_check_sample")
    )


def read_call_mode(
    asked: ModelOptions,
    names: SequenceHeaderNames,
    *,
    batch_size: int,
    max_workers: int,
    has_ranks: bool,
    warnings: list[str],
) -> CallMode:
    """The mode that is asked for. Options that are not used get a sentence in `warnings`."""
    if asked.is_concurrent and not has_ranks:
        for key, is_set in (
            ("sequenceBatching", asked.sequence_batching),
            ("continuousBatching", asked.continuous_batching),
        ):
            if is_set:
                warnings.append(f"{key} of the model's configuration is not used: it has asyncCommunication")
        return _judged(CallMode(is_concurrent=True), asked, warnings)
    if asked.is_concurrent:
        warnings.append("asyncCommunication of the model's configuration is not used: ranks make one call at a time")
    sequences = None
    if asked.sequence_batching:
        sequences = SequenceOptions(
            max_idle_s=asked.sequence_max_idle_s,
            timeout_s=asked.sequence_timeout_s,
            queue_size=asked.max_sequence_job_queue_size,
            most=asked.max_num_sequence or max(1, batch_size * max_workers),
            frees_ended=asked.free_ended_sequences,
            id_header=names.id,
            start_header=names.start,
            end_header=names.end,
        )
        if not asked.sequence_max_idle_s:
            warnings.append(
                "sequenceBatching without sequenceMaxIdleMSec refuses every request: set it to how long a sequence may "
                "be idle, in milliseconds"
            )
    return _judged(CallMode(sequences, asked.continuous_batching), asked, warnings)


def _judged(mode: CallMode, asked: ModelOptions, warnings: list[str]) -> CallMode:
    """The same mode, after warnings about options that do not go with it."""
    if mode.is_plain:
        return mode
    which = "asyncCommunication" if mode.is_concurrent else "sequences or continuous batching"
    if not mode.allows(asked.batch_policy):
        warnings.append(f"batchPolicy {asked.batch_policy} of the model's configuration is not used with {which}")
    if asked.samples and mode.has_state:
        warnings.append(f"the samples of the model's configuration are not used with {which}")
    elif asked.samples and (asked.batch_check in ("warn", "refuse") or asked.batch_check_sample):
        warnings.append(f"batches are not checked with {which}")
    return mode
