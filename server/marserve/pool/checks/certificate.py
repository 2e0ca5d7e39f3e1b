"""Whether a model version may be given batches: its certificate, and how much checking in service may cost. Pure.

A *certificate* says that a batch of N was answered as N single requests are. A check of the model's samples wins it
(`handlers/marserve_handlers/batch_check.py`, in a worker), and it holds for the batch sizes that were tried.

    policy   off      nothing is checked by itself; batches are allowed
             warn     checked; batches are allowed in any case, and a difference is logged and described
             refuse   checked before the first batch: until then, and after a difference, every request runs alone

Checks in service run real batches again, item by item. An `Allowance` bounds their time to a share of the seconds that
workers are busy. A run that took longer than expected may exceed it once; later busy time pays for that first.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from marserve.messages import Checked

Policy = Literal["off", "warn", "refuse"]
State = Literal["not checked", "passed", "failed"]

# The largest batch that the worker makes in a check (`batch_check.MOST_TOGETHER`); a pass there counts for all above.
LARGEST_CHECKED = 64
# After so many workers have ended during one check, the check has failed.
MOST_LOST_WORKERS = 2
KEPT_DIFFERENCES = 5


class Certificate:
    """The certificate of one version. `size` is always the batch size that was asked for, 1 or more."""

    def __init__(self, policy: Policy, *, has_samples: bool) -> None:
        self.policy = policy
        self.state: State = "not checked"
        self.reason = ""
        self.checked: Checked | None = None
        self.checked_at = 0.0
        self._has_samples = has_samples
        self._holds_to = 1
        self._lost = 0

    def batch_limit(self, size: int) -> int:
        """The largest batch that may be formed now."""
        if self.policy != "refuse" or size <= 1:
            return size
        if self.state == "failed" or (self.state == "not checked" and self._has_samples):
            return 1
        return min(size, self._holds_to) if self.needs_check(size) else size

    def needs_check(self, size: int) -> bool:
        """Whether the samples should be checked, now that batches of `size` are asked for."""
        if self.policy == "off" or not self._has_samples or size <= 1 or self.state == "failed":
            return False
        return self.state == "not checked" or min(size, LARGEST_CHECKED) > self._holds_to

    def take(self, checked: Checked, size: int, at: float) -> bool:
        """A check with batches up to `size` has ended, at `at` (UTC, seconds). Returns whether it was passed."""
        self.checked, self.checked_at = checked, at
        self._lost = 0
        has_passed = checked.compared > 0 and not checked.found
        self.state = "passed" if has_passed else "failed"
        if has_passed:
            if max(checked.sizes, default=0) > 1:
                self._holds_to = max(self._holds_to, min(size, LARGEST_CHECKED))
            self.reason = ""
        elif checked.found:
            self.reason = f"batches are not answered as single requests: {sentence_of(checked)}"
        else:
            self.reason = f"nothing could be compared: {'; '.join(checked.notes) or 'there were no samples'}"
        return has_passed

    def lose(self, cause: str) -> bool:
        """The worker ended during a check. Returns whether to try once more; if not, the check has failed."""
        self._lost += 1
        if self._lost < MOST_LOST_WORKERS:
            return True
        self.fail(f"{self._lost} workers ended during the check, the last one: {cause}")
        self._lost = 0
        return False

    def fail(self, reason: str) -> None:
        """The check could not be made, or not ended, for this reason."""
        self.state, self.reason, self.checked = "failed", reason, None

    def describe(self, size: int) -> dict[str, Any]:
        """Members for describe: what is allowed, why, and the outcome of the last check."""
        described: dict[str, Any] = {
            "certificate": self.state,
            "policy": self.policy,
            "largestBatch": self.batch_limit(size),
        }
        if self.reason:
            described["reason"] = self.reason
        if self.checked is not None:
            at = datetime.fromtimestamp(self.checked_at, UTC).isoformat(timespec="milliseconds")
            described |= {"checkedAt": at.replace("+00:00", "Z"), **report_of(self.checked)}
        return described


def report_of(checked: Checked) -> dict[str, Any]:
    """A check's outcome for describe and the management API."""
    tolerance = {"relative": checked.relative, "absolute": checked.absolute, "basis": checked.basis}
    return {
        "passed": checked.compared > 0 and not checked.found,
        "samples": checked.samples,
        "batchSizes": checked.sizes,
        "answersCompared": checked.compared,
        "differencesFound": checked.found,
        "differences": [
            {"run": run, "item": item, "path": path, "seen": seen, "wanted": wanted}
            for run, item, path, seen, wanted in checked.differences
        ],
        "notes": checked.notes,
        "seconds": round(checked.seconds, 6),
        **({"tolerance": tolerance} if checked.basis and math.isfinite(checked.relative + checked.absolute) else {}),
    }


def sentence_of(checked: Checked) -> str:
    """The first difference in words."""
    run, item, path, seen, wanted = checked.differences[0]
    subject = "the batch" if item < 0 else f"item {item}"
    where = f" at {path}" if path else ""
    return f"{run}: {subject}{where} was {seen}, alone it was {wanted}"


@dataclass
class InService:
    """What checks in service have found. `last` has the latest differences in words."""

    batches: int = 0
    items: int = 0
    differing_batches: int = 0
    seconds: float = 0.0
    last: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_DIFFERENCES))

    def take(self, checked: Checked) -> bool:
        """One batch was run again. Returns whether its items had other answers alone."""
        self.batches += 1
        self.items += checked.calls
        self.seconds += checked.seconds
        if checked.found:
            self.differing_batches += 1
            self.last.append(sentence_of(checked))
        return bool(checked.found)

    def describe(self) -> dict[str, Any]:
        """Members for describe."""
        return {
            "batches": self.batches,
            "items": self.items,
            "differingBatches": self.differing_batches,
            "seconds": round(self.seconds, 6),
            "lastDifferences": list(self.last),
        }
