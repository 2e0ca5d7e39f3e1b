"""A roll-out's steps and holds, its state, and the consequence of each verdict.

Pure: the monotonic clock is passed in. `judge.py` decides, and `rollouts.py` sets the traffic, also back to the version
before. The state is one of

    preparing     the version is loaded, warmed and certified; it gets no requests
    running       it has the step's share of the requests that name no version
    paused        as running, but it goes no further until it is resumed; a worse candidate is still rolled back
    promoted      it is the default version and answers everything
    rolled back   it was worse, or could not be judged or even loaded: the version before answers everything again
    aborted       an operator ended it, or changed by hand what it had set
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, Literal

from marserve.errors import BadInput
from marserve.registry.observing.arms import Seen
from marserve.registry.observing.shadow_spec import Compare, ShadowSpec, read_compare
from marserve.rollout.judge import Answers, Judge, Limits, Verdict, budget_of, smallest_found

State = Literal["preparing", "running", "paused", "promoted", "rolled back", "aborted"]
ENDED: tuple[State, ...] = ("promoted", "rolled back", "aborted")

DEFAULT_STEPS = (5.0, 25.0, 50.0, 100.0)
DEFAULT_HOLD_S = 60.0
LONGEST_HOLD_S = 7 * 24 * 3600.0
# A step that cannot be judged is held this many times as long as it should, and not less than the other.
HOLDS_AT_MOST = 10
LEAST_MOST_HOLD_S = 600.0
MOST_STEPS = 50
DEFAULT_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """A requested roll-out. `steps` are percent, rising to 100; a first one of 0 gets only mirrored requests.

    `url` is an archive that is registered first; `workers` as that registration's. Without `compare` answers are not
    compared; with it `share` of the baseline's requests are mirrored. A step with too few requests to be judged is held
    for at most `max_hold_s`, and then rolled back. Times in seconds.
    """

    version: str
    url: str | None = None
    workers: int | None = None
    steps: tuple[float, ...] = DEFAULT_STEPS
    hold_s: float = DEFAULT_HOLD_S
    max_hold_s: float = LEAST_MOST_HOLD_S
    limits: Limits = field(default_factory=Limits)
    compare: Compare | None = None
    share: float = DEFAULT_SHARE

    def document(self) -> dict[str, Any]:
        """In the shape that `read_rollout` takes."""
        members: dict[str, Any] = {"version": self.version}
        if self.url is not None:
            members["url"] = self.url
        if self.workers is not None:
            members["workers"] = self.workers
        members |= {"steps": list(self.steps), "hold": self.hold_s, "max_hold": self.max_hold_s}
        members |= {each.name: getattr(self.limits, each.name) for each in fields(Limits)}
        if self.compare is not None:
            members |= {"compare": ShadowSpec("", compare=self.compare).document()["compare"], "share": self.share}
        return members

    def shadow(self) -> ShadowSpec | None:
        """The mirror that answers are compared by, None without comparison."""
        return None if self.compare is None else ShadowSpec(self.version, self.share, self.compare)


_KEYS = (
    *("version", "url", "workers", "steps", "hold", "max_hold", "compare", "share"),
    *(each.name for each in fields(Limits)),
)


def read_rollout(document: object) -> RolloutSpec:
    """The roll-out in a document. Raises BadInput that names the member, the value and its valid values."""
    if not isinstance(document, Mapping):
        raise BadInput('A roll-out is an object such as {"version": "2.0", "steps": [5, 50, 100], "hold": 60}.')
    for key in document:
        if key not in _KEYS:
            raise BadInput(f"A roll-out has no member {str(key)[:100]!r}; it has {', '.join(_KEYS)}.")
    given = {key: value for key, value in document.items() if value is not None}
    version = given.get("version")
    if not isinstance(version, str) or not version:
        raise BadInput("version of a roll-out must be the name of a version, a text that is not empty.")
    url = given.get("url")
    if url is not None and (not isinstance(url, str) or not url):
        raise BadInput("url of a roll-out must be an archive's address, or its name in the model store.")
    compare = None if given.get("compare") is None else read_compare(given["compare"])
    hold_s = _number(given, "hold", DEFAULT_HOLD_S, 0.0, LONGEST_HOLD_S)
    plain = Limits()
    limits = Limits(
        max_error_increase=_number(given, "max_error_increase", plain.max_error_increase, 0.0, 1.0),
        max_p99_increase=None
        if "max_p99_increase" in document and document["max_p99_increase"] is None
        else _number(given, "max_p99_increase", plain.max_p99_increase or 0.0, 0.0, 1000.0),
        max_difference=_number(given, "max_difference", plain.max_difference, 0.0, 1.0),
        min_requests=int(_number(given, "min_requests", plain.min_requests, 1, 10_000_000, whole=True)),
        significance=_number(given, "significance", plain.significance, 1e-6, 0.5),
    )
    workers = None if "workers" not in given else int(_number(given, "workers", 1, 1, 4096, whole=True))
    max_hold_s = _number(
        given, "max_hold", max(LEAST_MOST_HOLD_S, HOLDS_AT_MOST * hold_s), hold_s, HOLDS_AT_MOST * LONGEST_HOLD_S
    )
    share = _number(given, "share", DEFAULT_SHARE, 0.0, 1.0)
    if not share:
        raise BadInput("share of a roll-out is 0; it must be above that, up to 1.")
    steps = _read_steps(given.get("steps", list(DEFAULT_STEPS)), compares=compare is not None)
    return RolloutSpec(version, url, workers, steps, hold_s, max_hold_s, limits, compare, share)


def _read_steps(steps: object, *, compares: bool) -> tuple[float, ...]:
    if not isinstance(steps, Sequence) or isinstance(steps, str) or not 1 <= len(steps) <= MOST_STEPS:
        raise BadInput(f"steps of a roll-out must be a list of 1 to {MOST_STEPS} percentages, such as [5, 50, 100].")
    for step in steps:
        if isinstance(step, bool) or not isinstance(step, int | float) or not 0 <= step <= 100:
            raise BadInput(f"The step {str(step)[:100]} of a roll-out must be a percentage from 0 to 100.")
    shares = tuple(map(float, steps))
    if shares[-1] != 100 or any(after <= before for before, after in pairwise(shares)):
        raise BadInput(f"The steps {list(steps)[:50]} of a roll-out must rise, and the last one must be 100.")
    if len(shares) < 2:
        raise BadInput(
            "A roll-out needs a step below 100, at which both versions can be compared; to switch at once, set the "
            "default version."
        )
    if not shares[0] and not compares:
        raise BadInput("A first step of 0 gets mirrored requests alone, so it needs compare.")
    return shares


def _number(
    given: Mapping[str, Any], name: str, default: float, least: float, most: float, *, whole: bool = False
) -> float:
    value = given.get(name, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most or (whole and value != int(value)):
        kind = "a whole number" if whole else "a number"
        raise BadInput(f"{name} of a roll-out is {str(value)[:100]!r}; it must be {kind} from {least:g} to {most:g}.")
    return float(value)


class Course:
    """The state of a roll-out. `now` is the monotonic clock in seconds, and never goes back."""

    def __init__(self, spec: RolloutSpec) -> None:
        self.spec = spec
        self.state: State = "preparing"
        self.step = 0
        self.reason = ""
        self.verdict: Verdict | None = None
        self._judge = Judge(spec.limits, len(spec.steps), compares=spec.compare is not None)
        self._began = 0.0
        self._paused_at: float | None = None
        self._paused_s = 0.0
        # The baseline's counts of the last window in which it had requests; the last step is judged against them.
        self._known_baseline: Seen | None = None

    @property
    def share(self) -> float:
        """The candidate's share of requests now, in percent."""
        if self.state in ("running", "paused"):
            return self.spec.steps[self.step]
        return 100.0 if self.state == "promoted" else 0.0

    @property
    def has_ended(self) -> bool:
        """Whether the roll-out has ended."""
        return self.state in ENDED

    def begin(self, now: float, *, step: int = 0) -> None:
        """Begin the first step, or after a restart `step` anew: the candidate is ready."""
        self.state = "running"
        self._enter(step, now)

    def elapsed_s(self, now: float) -> float:
        """How long the step has lasted, pauses left out."""
        pause_s = 0.0 if self._paused_at is None else now - self._paused_at
        return max(0.0, now - self._began - self._paused_s - pause_s)

    def pause(self, now: float) -> None:
        """Hold the present step."""
        if self.state == "running":
            self.state, self._paused_at = "paused", now

    def resume(self, now: float) -> None:
        """Go on with the step."""
        if self.state == "paused" and self._paused_at is not None:
            self._paused_s += now - self._paused_at
            self.state, self._paused_at = "running", None

    def end(self, state: State, reason: str) -> None:
        """End in this state, for this reason."""
        if not self.has_ended:
            self.state, self.reason = state, reason

    def look(self, now: float, baseline: Seen, candidate: Seen, answers: Answers) -> Verdict:
        """Judge the counts of the window that began with the step, and change state and step by the verdict.

        Afterwards `state` and `step` are what has to be in force; a new step begins a new window.
        """
        share, is_last = self.share, self.step == len(self.spec.steps) - 1
        against = baseline
        if is_last and self._known_baseline is not None:
            against = self._known_baseline  # the baseline gets no requests any more
        elapsed_s = self.elapsed_s(now)
        verdict = self._judge.look(
            elapsed_s, self.spec.hold_s, against, candidate, answers, only_mirrored=not share, compares=not is_last
        )
        if verdict.findings or self.verdict is None:
            self.verdict = verdict
        else:
            self.verdict = replace(verdict, findings=self.verdict.findings)
        if verdict.decision == "roll back":
            self.end("rolled back", verdict.reason)
        elif self.state == "running":
            if verdict.decision == "promote":
                if is_last:
                    self.end("promoted", "every step was held, and nothing showed that the version is worse")
                else:
                    if share:
                        self._known_baseline = baseline
                    self._enter(self.step + 1, now)
            elif verdict.decision == "hold" and elapsed_s >= self.spec.max_hold_s:
                self.end("rolled back", f"{verdict.reason}, after {self.spec.max_hold_s:g} s (max_hold)")
        return verdict

    def _enter(self, step: int, now: float) -> None:
        self.step = min(step, len(self.spec.steps) - 1)
        self._began, self._paused_s, self._paused_at = now, 0.0, None
        self._judge.begin_step()


def forecast(spec: RolloutSpec, requests_per_s: float) -> list[dict[str, Any]]:
    """What each step would count at this rate of requests, and the smallest faults found 9 times of 10.

    `errors` is a share of the candidate's requests where the baseline has none, `differing` one of compared answers.
    """
    compares = spec.compare is not None
    budget = budget_of(spec.limits, len(spec.steps), compares=compares)
    forecasts: list[dict[str, Any]] = []
    for share in spec.steps:
        requests = int(requests_per_s * spec.hold_s * share / 100)
        compared = int(requests_per_s * spec.hold_s * (1 - share / 100) * spec.share) if compares else 0
        wanted_s = spec.hold_s
        if requests_per_s and share:
            wanted_s = max(wanted_s, spec.limits.min_requests / (requests_per_s * share / 100))
        step: dict[str, Any] = {
            "share": share,
            "holdSeconds": spec.hold_s,
            "requests": requests,
            "findsErrors": smallest_found(requests, spec.limits.max_error_increase, budget),
            "expectedSeconds": round(wanted_s, 3) if requests_per_s else None,
        }
        if compares:
            step |= {
                "compared": compared,
                "findsDiffering": smallest_found(compared, spec.limits.max_difference, budget),
            }
        forecasts.append(step)
    return forecasts
