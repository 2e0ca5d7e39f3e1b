"""How long inputs are by the handler's own `length_of`, which runs in a worker. Pure: it decides what to ask.

No request waits for the answer. Only jobs that were left behind when a batch was chosen are asked for: the question
goes to a worker right before a batch, and the answer is there before the next batch is formed. Until then, and for a
request that never waits, the length is estimated: the bytes of the input times the length per byte of earlier answers.

    known      answers are kept by a digest of the input; the least recently used are dropped first
    paid       the seconds come out of an `Allowance`, a share of the workers' busy time; a question has a time limit
    survived   inputs of a question over which a worker died are not asked for again; after `MAX_DEATHS` such deaths in
               a row nothing is asked any more
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from statistics import median
from typing import Any

from marserve.messages import Request
from marserve.pool.dispatch.jobs import Job, JobState, Question
from marserve.pool.dispatch.lengths.allowance import Allowance
from marserve.pool.dispatch.lengths.lengths import body_bytes
from marserve.telemetry.metrics.counts import VersionMetrics

# The share of the workers' busy time that questions may take, and how much of it can be saved up.
BUSY_SHARE = 0.05
MOST_SAVED_S = 0.5
# A question takes at most this part of a typical batch, if its items cost what earlier ones did.
SHARE_OF_RUN = 0.25
MAX_ITEMS = 64
# How many items are asked for while their cost is unknown.
FIRST_ITEMS = 4
# Larger inputs are not sent twice.
MAX_BYTES = 64 * 1024
MAX_KNOWN = 8192
KEPT_RATIOS = 65
SURE_RATIOS = 15
MAX_DEATHS = 3
# Kept for an input whose length the handler could not say.
NONE = 0


class AskedLengths:
    """The lengths of one version's inputs, as far as its handler has said them."""

    def __init__(self, metrics: VersionMetrics) -> None:
        self.is_offered = False
        self._metrics = metrics
        self._known: OrderedDict[bytes, int] = OrderedDict()
        self._ratios: deque[float] = deque(maxlen=KEPT_RATIOS)
        self._ratio = 1.0
        self._purse = Allowance(BUSY_SHARE, MOST_SAVED_S)
        self._item_s = 0.0
        self._deaths = 0

    @property
    def is_used(self) -> bool:
        """Whether the handler has a `length_of`, and may still be asked."""
        return self.is_offered and self._deaths < MAX_DEATHS

    @property
    def is_sure(self) -> bool:
        """Whether there were enough answers for good estimates."""
        return len(self._ratios) >= SURE_RATIOS

    def look_up(self, job: Job) -> int:
        """The job's length, 1 or more: the handler's answer, or an estimate, for which the handler may be asked."""
        if job.length and not job.length_digest:
            return job.length
        is_new = not job.length
        if is_new and not job.request.is_describe and body_bytes(job.request) <= MAX_BYTES:
            job.length_digest = digest_of(job.request)
        known = self._known.get(job.length_digest) if job.length_digest else None
        if known is not None:
            self._known.move_to_end(job.length_digest)
            job.length_digest = b""
            self._metrics.lengths["cache"] += 1
        elif is_new:
            self._metrics.lengths["guess"] += 1
        job.length = known or self._guess(job.request)
        return job.length

    def ask(self, jobs: Sequence[Job], number: int, run_s: float) -> Question | None:
        """The question to send before batch `number`, about some of `jobs`; None without need or time for one.

        `run_s` is how long batches of the worker take.
        """
        if not self.is_used or self._purse.left_s <= 0:
            return None
        limit_s = min(self._purse.left_s, SHARE_OF_RUN * run_s)
        most = min(MAX_ITEMS, max(1, int(limit_s / self._item_s))) if self._item_s else FIRST_ITEMS
        unknown = {job.length_digest: job for job in jobs if job.length_digest and job.length_digest not in self._known}
        asked = list(unknown.values())[:most]
        if not asked:
            return None
        question = Question(number, asked, [job.length_digest for job in asked], limit_s)
        for job in asked:
            job.length_digest = b""
        return question

    def take(self, question: Question, lengths: Sequence[int], seconds: float) -> None:
        """A question was answered, as far as time allowed; the other items may be asked for again."""
        self._deaths = 0
        self._purse.spend(seconds)
        metrics = self._metrics
        metrics.length_seconds += seconds
        for job, digest, length in zip(question.jobs, question.digests, lengths, strict=False):
            if length < 0:
                metrics.lengths["failed"] += 1
                self._keep(digest, NONE)
                continue
            metrics.lengths["handler"] += 1
            length = max(1, length)
            job.length = length
            self._keep(digest, length)
            self._ratios.append(length / max(1, body_bytes(job.request)))
        for job, digest in list(zip(question.jobs, question.digests, strict=True))[len(lengths) :]:
            job.length_digest = digest
        if lengths:
            item_s = seconds / len(lengths)
            self._item_s = item_s if not self._item_s else 0.8 * self._item_s + 0.2 * item_s
        if self._ratios:
            self._ratio = median(self._ratios)

    def lost(self, question: Question, *, is_guilty: bool) -> bool:
        """The worker ended before it answered; `is_guilty`: over the question. Returns whether asking stops now."""
        if not is_guilty:
            for job, digest in zip(question.jobs, question.digests, strict=True):
                if job.state is not JobState.DONE:
                    job.length_digest = digest
            return False
        for digest in question.digests:
            self._keep(digest, NONE)
        self._deaths += 1
        return self._deaths == MAX_DEATHS

    def earn(self, busy_s: float) -> None:
        """Add a worker's busy time to the budget."""
        self._purse.earn(busy_s)

    def describe(self) -> dict[str, Any]:
        """Members for describe; milliseconds as in the goal's other members."""
        counts, busy_s = self._metrics.lengths, self._metrics.busy_seconds
        asked = counts["handler"] + counts["failed"]
        described: dict[str, Any] = {
            "from": "handler",
            "asked": asked,
            "failed": counts["failed"],
            "cached": counts["cache"],
            "guessed": counts["guess"],
            "lengthPerByte": round(self._ratio, 6),
            "askedSeconds": round(self._metrics.length_seconds, 6),
            "shareOfBusy": round(self._metrics.length_seconds / busy_s, 6) if busy_s else 0.0,
        }
        if asked:
            described["itemMs"] = round(1000 * self._metrics.length_seconds / asked, 6)
        if self.is_offered and not self.is_used:
            described["stopped"] = f"{MAX_DEATHS} workers in a row ended while they were asked"
        return described

    def _guess(self, request: Request) -> int:
        return max(1, round(self._ratio * body_bytes(request)))

    def _keep(self, digest: bytes, length: int) -> None:
        self._known[digest] = length
        self._known.move_to_end(digest)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)


def digest_of(request: Request) -> bytes:
    """A digest of an input's parts, with the content types, which decide how the handler sees them."""
    digest = hashlib.blake2b(digest_size=16)
    for part in request.parts:
        name, kind = part.name.encode(), (part.content_type or "").encode()
        digest.update(b"%d:%d:%d:" % (len(name), len(kind), len(part.body)))
        digest.update(name)
        digest.update(kind)
        digest.update(part.body)
    return digest.digest()
