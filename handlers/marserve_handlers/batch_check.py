"""Compares batches with single requests: does a handler answer N rows together as it answers each of them alone?

`check_handler` runs sample rows through a handler one by one, together, in other orders, in other sizes, with doubles,
and once more, and says where what came back differs in order, count, type, values, status or headers. What it says is
a `Verdict`: plain and bounded in size. It knows no wire and no policy; tensors are looked at only where some are met.

Values are compared as a client would see them: text and bytes that hold JSON as what they hold, lists and tuples alike,
whole numbers exactly, other numbers within a tolerance, NaN as equal to NaN. Every run gets copies of the rows of its
own, and answers are copied as soon as they are there, so that nothing a handler changes later can hide.
"""

from __future__ import annotations

import copy
import io
import json
import math
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from marserve_handlers.context import Context, RequestView
from marserve_handlers.declared.answer import JsonAnswer
from marserve_handlers.errors import describe_failure

Handle = Callable[[list[dict[str, Any]], Context], Any]

MOST_SAMPLES = 64
MOST_TOGETHER = 64
MOST_DIFFERENCES = 10
MOST_TEXT = 160
MOST_DEPTH = 100
DEFAULT_RELATIVE = 1e-3
DEFAULT_ABSOLUTE = 1e-5

ALONE, TOGETHER = "alone", "together"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far two numbers may be apart, and which places of an answer are not looked at.

    Numbers are alike when `|a - b| <= absolute + relative * |b|`. Each entry of `ignore` is a path (`request_id`,
    `boxes[*].id`, `header:x-trace`, `status`); everything at it and below it is left out. `*` stands for any one key
    or index.

    With `of_largest` a number may also be off by that share of the largest number beside it, in its list, object of
    numbers or array; an object of numbers may lack one that is as small as its smallest (the last of the best five).

    With `any_number` numbers are alike whatever they are, as long as both are numbers or neither is one (NaN); so are
    objects with as many numbers, whose largest has the same key (the best five again). What else differs is found.
    """

    relative: float = DEFAULT_RELATIVE
    absolute: float = DEFAULT_ABSOLUTE
    ignore: tuple[str, ...] = ()
    of_largest: float = 0.0
    any_number: bool = False


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where an item's answer in a run was another than when the item was alone.

    `item` is the sample's index from 0, -1 where the whole batch is meant; `path` is empty for the whole answer.
    """

    run: str
    item: int
    path: str
    seen: str
    wanted: str

    def __str__(self) -> str:
        subject = "the batch" if self.item < 0 else f"item {self.item}"
        where = f" at {self.path}" if self.path else ""
        return f"{self.run}: {subject}{where} was {self.seen}, wanted {self.wanted}"


@dataclass(slots=True)
class Verdict:
    """What a check found. `differences` are the first ones of `found`; `sizes` the sizes of batches that were run.

    `compared` counts the answers that were compared: with none nothing was shown. `notes` are sentences about what the
    check could not see.
    """

    samples: int = 0
    sizes: tuple[int, ...] = ()
    calls: int = 0
    compared: int = 0
    found: int = 0
    seconds: float = 0.0
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def has_passed(self) -> bool:
        """Whether something was compared and nothing differed."""
        return self.compared > 0 and not self.found

    def add(self, difference: Difference) -> None:
        """Count a difference, and keep it while there is room."""
        self.found += 1
        if len(self.differences) < MOST_DIFFERENCES:
            self.differences.append(difference)


@dataclass(slots=True)
class Outcome:
    """How one item ended: its answer as it was then, or a failure in words, and what its response would carry."""

    value: Any = None
    failure: str | None = None
    status: int = 200
    reason: str = ""
    headers: dict[str, str] = field(default_factory=dict)


def check_handler(
    handle: Handle,
    context: Context,
    rows: Sequence[dict[str, Any]],
    items: Sequence[RequestView] | None = None,
    *,
    batch_size: int,
    tolerance: Tolerance | None = None,
    limit_s: float = math.inf,
    before_call: Callable[[], None] = lambda: None,
    bound: Callable[[Tolerance], Tolerance] = lambda tolerance: tolerance,
) -> Verdict:
    """Run the samples through the handler in every way of `plan_runs` and compare with each sample alone.

    `rows` are as handlers get them, `items` what the context says of each (nothing but an id, where none are given);
    `batch_size` is the largest batch that will be made. A sample that fails alone is left out of the batches (it would
    fail them all) and noted. After `limit_s` seconds no further call is begun, which is noted too. `before_call` is
    called before each call of the handler; `bound` is asked for the tolerance once each sample was run alone.
    """
    verdict = Verdict(samples=len(rows))
    if items is None:
        items = [_Bare(f"sample-{index}") for index in range(len(rows))]
    began = time.perf_counter()
    caller = _Caller(handle, context, rows, items, before_call)
    tolerance = tolerance or Tolerance()
    alone: dict[int, Outcome] = {}
    for index in range(len(rows)):
        alone[index] = caller.call([index])[0]
    tolerance = bound(tolerance)
    usable = [index for index, outcome in alone.items() if outcome.failure is None]
    for index, outcome in alone.items():
        if outcome.failure is not None:
            verdict.notes.append(shorten(f"sample {index} fails alone: {outcome.failure}"))
    _note_what_cannot_be_seen(verdict, [alone[index] for index in usable], tolerance)
    for run, order in plan_runs(len(usable), batch_size):
        if time.perf_counter() - began > limit_s:
            verdict.notes.append(f"stopped after {limit_s:g} s: not every run was made")
            break
        chosen = [usable[place] for place in order]
        outcomes = caller.call(chosen)
        wanted = [alone[index] for index in chosen]
        compare_batch(verdict, run, chosen, outcomes, wanted, tolerance)
    verdict.calls = caller.calls
    verdict.sizes = tuple(sorted(caller.sizes))
    verdict.seconds = time.perf_counter() - began
    del verdict.notes[MOST_DIFFERENCES:]
    return verdict


def plan_runs(count: int, batch_size: int) -> Iterator[tuple[str, list[int]]]:
    """The batches to run after each sample was alone: a name for the run, and the samples' indices in order.

    No batch is larger than `batch_size` or `MOST_TOGETHER`.
    """
    if not count:
        return
    size = min(batch_size, MOST_TOGETHER)
    everyone = list(range(count))
    if size > 1:
        shuffled = everyone.copy()
        random.Random(count).shuffle(shuffled)
        yield from _cut(TOGETHER, everyone, size)
        yield from _cut("in reverse", everyone[::-1], size)
        if count > 2:
            yield from _cut("shuffled", shuffled, size)
            if size > 2:
                yield from _cut("in twos", [*everyone, 0][: count + count % 2], 2)
        yield "with doubles", [place // 2 % count for place in range(size)]
        if size > count:
            yield "full", [place % count for place in range(size)]
        yield "together again", everyone[:size]
    for place in reversed(everyone):
        yield "alone again", [place]


def _cut(name: str, order: list[int], size: int) -> Iterator[tuple[str, list[int]]]:
    for at in range(0, len(order), size):
        yield name, order[at : at + size]


@dataclass(frozen=True, slots=True)
class _Bare:
    """A request of which nothing is known but its id."""

    id: str
    headers: Sequence[tuple[bytes, bytes]] = ()
    server_headers: Sequence[tuple[str, str]] = ()
    parts: Sequence[tuple[str, str | None]] = ()
    deadline: float | None = None


class _Caller:
    """Calls the handler as the worker's loop does, each time with fresh copies of the rows."""

    def __init__(
        self,
        handle: Handle,
        context: Context,
        rows: Sequence[dict[str, Any]],
        items: Sequence[RequestView],
        before_call: Callable[[], None],
    ) -> None:
        self.calls = 0
        self.sizes: set[int] = set()
        self._handle = handle
        self._context = context
        self._rows = rows
        self._items = items
        self._before_call = before_call

    def call(self, chosen: Sequence[int]) -> list[Outcome]:
        """One outcome for each chosen sample; fewer or more where the handler did not answer one for one."""
        self.calls += 1
        self.sizes.add(len(chosen))
        context = self._context
        rows = [copy.deepcopy(self._rows[index]) for index in chosen]
        pieces: list[list[Any]] = []
        context.begin_batch([self._items[index] for index in chosen])
        context.send_pieces = lambda sent: pieces.append([keep(piece) for piece in sent])
        context.ask_cancelled = lambda index: False
        self._before_call()
        try:
            answered = self._handle(rows, context)
        except SystemExit:
            raise
        except BaseException as error:  # whatever an author's code raises is what is compared
            return [Outcome(failure=_words_of(error)) for _ in chosen]
        if type(answered) is not list:
            return [Outcome(failure=f"handle returned {type(answered).__name__}, not a list") for _ in chosen]
        context.end_stream()
        return [
            self._outcome(answer, index if index < len(chosen) else None, pieces)
            for index, answer in enumerate(answered)
        ]

    def _outcome(self, answer: Any, index: int | None, pieces: list[list[Any]]) -> Outcome:
        if isinstance(answer, BaseException):
            return Outcome(failure=_words_of(answer))
        value = keep(answer)
        if pieces and index is not None:
            value = [*(sent[index] for sent in pieces if index < len(sent)), value]
        outcome = Outcome(value)
        if index is not None:
            try:
                response = self._context.response_of(index)
            except Exception as error:
                return Outcome(failure=_words_of(error))
            if response is not None:
                outcome.status, outcome.reason = response[:2]
                outcome.headers = {name.lower(): text for name, text in response[2]}
        return outcome


def _words_of(error: BaseException) -> str:
    failure = describe_failure(error)
    try:
        words = f"{type(error).__name__}: {error}"
    except Exception:  # the author's exception cannot say what it is
        words = type(error).__name__
    return f"{failure.code} {words}"


def _note_what_cannot_be_seen(verdict: Verdict, alone: list[Outcome], tolerance: Tolerance) -> None:
    if len(alone) < 2:
        verdict.notes.append("fewer than two samples can be used: swapped answers cannot be seen")
        return
    first = alone[0]
    if all(next(differences(outcome, first, tolerance), None) is None for outcome in alone[1:]):
        verdict.notes.append("all samples have the same answer: swapped answers cannot be seen")


# ------------------------------------------------------------------------------------------------ comparison


def compare_batch(
    verdict: Verdict,
    run: str,
    chosen: Sequence[int],
    seen: Sequence[Outcome],
    wanted: Sequence[Outcome],
    tolerance: Tolerance,
) -> None:
    """Compare one batch's outcomes with what its items should have had, into the verdict."""
    name = run if len(chosen) == 1 else f"{run} ({len(chosen)})"
    if len(seen) != len(wanted):
        verdict.compared += 1
        verdict.add(Difference(name, -1, "", f"{len(seen)} answers", f"{len(wanted)}, one for each row"))
        return
    for place, index in enumerate(chosen):
        verdict.compared += 1
        first = next(differences(seen[place], wanted[place], tolerance), None)
        if first is not None:
            path, is_now, should_be = first
            difference = Difference(name, index, path, shorten(is_now), shorten(should_be))
            verdict.add(_explain_swap(difference, seen[place], wanted, chosen, place, tolerance))


def _explain_swap(
    difference: Difference,
    seen: Outcome,
    wanted: Sequence[Outcome],
    chosen: Sequence[int],
    place: int,
    tolerance: Tolerance,
) -> Difference:
    """Say whose answer it is, where it is another item's."""
    for other, outcome in enumerate(wanted):
        if (
            other != place
            and chosen[other] != chosen[place]
            and next(differences(seen, outcome, tolerance), None) is None
        ):
            words = f"the answer of item {chosen[other]}, {difference.seen}"
            return Difference(difference.run, difference.item, difference.path, shorten(words), difference.wanted)
    return difference


def differences(seen: Outcome, wanted: Outcome, tolerance: Tolerance) -> Iterator[tuple[str, str, str]]:
    """Where two outcomes differ: path, what was seen, what was wanted. Nothing where they are alike."""
    rules = [_tokens(path) for path in tolerance.ignore]
    if seen.failure is not None or wanted.failure is not None:
        if seen.failure != wanted.failure:
            yield "", _as_words(seen), _as_words(wanted)
        return
    if seen.status != wanted.status and not _is_ignored(("status",), rules):
        yield "status", str(seen.status), str(wanted.status)
    if seen.reason != wanted.reason and not _is_ignored(("reason",), rules):
        yield "reason", repr(seen.reason), repr(wanted.reason)
    for name in sorted(seen.headers.keys() | wanted.headers.keys()):
        ours, theirs = seen.headers.get(name), wanted.headers.get(name)
        if ours != theirs and not _is_ignored((f"header:{name}",), rules):
            yield f"header:{name}", _header(ours), _header(theirs)
    yield from _compare(seen.value, wanted.value, (), tolerance, rules)


def _as_words(outcome: Outcome) -> str:
    return f"a failure, {outcome.failure}" if outcome.failure is not None else f"an answer, {show(outcome.value)}"


def _header(value: str | None) -> str:
    return "no such header" if value is None else repr(value)


Path = tuple[str | int, ...]


def _compare(
    seen: Any, wanted: Any, path: Path, tolerance: Tolerance, rules: list[Path]
) -> Iterator[tuple[str, str, str]]:
    if rules and _is_ignored(path, rules):
        return
    if type(seen) is type(wanted) and type(seen) not in (dict, list, float, _Array) and seen == wanted:
        return
    # A whole answer may be a number or the same number's text: on its way out they are one. Further in they are not.
    if not path or type(seen) is type(wanted):
        seen, wanted = _opened(seen), _opened(wanted)
    kind, other = _kind(seen), _kind(wanted)
    where = _shown_path(path)
    if kind != other or len(path) > MOST_DEPTH:
        if kind != other or seen != wanted:
            yield where, f"{kind} {show(seen)}", f"{other} {show(wanted)}"
    elif kind == "object":
        ours, theirs = ({str(key): value for key, value in each.items()} for each in (seen, wanted))
        tolerance = _beside(tolerance, theirs.values())
        if tolerance.of_largest:
            ours, theirs = _with_the_smallest(ours, theirs, tolerance), _with_the_smallest(theirs, ours, tolerance)
        if tolerance.any_number and _have_the_same_best(ours, theirs):
            return
        for key in [*theirs, *(key for key in ours if key not in theirs)]:
            below = (*path, key)
            if key in ours and key in theirs:
                yield from _compare(ours[key], theirs[key], below, tolerance, rules)
            elif not _is_ignored(below, rules):
                yield (
                    _shown_path(below),
                    show(ours[key]) if key in ours else "nothing",
                    show(theirs[key]) if key in theirs else "nothing",
                )
    elif kind == "list":
        if len(seen) != len(wanted):
            yield where, f"a list of {len(seen)}, {show(seen)}", f"one of {len(wanted)}, {show(wanted)}"
            return
        tolerance = _beside(tolerance, wanted)
        for index, (ours, theirs) in enumerate(zip(seen, wanted, strict=True)):
            yield from _compare(ours, theirs, (*path, index), tolerance, rules)
    elif kind == "array":
        yield from _compare_arrays(seen, wanted, path, tolerance)
    elif not (_is_close(seen, wanted, tolerance) if kind == "number" else seen == wanted):
        yield where, show(seen), show(wanted)


def _beside(tolerance: Tolerance, numbers: Iterable[Any]) -> Tolerance:
    """The tolerance for numbers that stand beside these."""
    if not tolerance.of_largest:
        return tolerance
    sizes = [abs(float(number)) for number in numbers if type(number) in (int, float) and math.isfinite(number)]
    if not sizes:
        return tolerance
    return replace(tolerance, absolute=max(tolerance.absolute, tolerance.of_largest * max(sizes)))


def _with_the_smallest(ours: dict[str, Any], theirs: dict[str, Any], tolerance: Tolerance) -> dict[str, Any]:
    """Ours, with those of theirs that it lacks because they are as small as its smallest number."""
    if not ours or len(ours) != len(theirs) or any(type(value) is not float for value in ours.values()):
        return ours
    smallest = min(ours.values())
    lacking = {key: value for key, value in theirs.items() if key not in ours}
    return {**ours, **{key: value for key, value in lacking.items() if _is_number_near(value, smallest, tolerance)}}


def _have_the_same_best(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether both hold nothing but finite floating numbers, as many of them, and the same key has the largest."""
    if not ours or len(ours) != len(theirs):
        return False
    if any(type(value) is not float or not math.isfinite(value) for value in (*ours.values(), *theirs.values())):
        return False
    return max(ours, key=ours.__getitem__) == max(theirs, key=theirs.__getitem__)


def _is_number_near(value: Any, smallest: float, tolerance: Tolerance) -> bool:
    return type(value) is float and _is_close(value, smallest, tolerance)


def _is_close(seen: float, wanted: float, tolerance: Tolerance) -> bool:
    if tolerance.any_number:
        return (seen != seen) == (wanted != wanted)  # no float of it: a whole number may be too large for one
    if type(seen) is int and type(wanted) is int:
        return seen == wanted
    seen, wanted = float(seen), float(wanted)
    if math.isnan(seen) or math.isnan(wanted):
        return math.isnan(seen) and math.isnan(wanted)
    if math.isinf(seen) or math.isinf(wanted):
        return seen == wanted
    return abs(seen - wanted) <= tolerance.absolute + tolerance.relative * abs(wanted)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, bytes):
        return "bytes"
    if isinstance(value, dict):
        return "object"
    if isinstance(value, list):
        return "list"
    return "array" if isinstance(value, _Array) else value.name if isinstance(value, _Strange) else type(value).__name__


def _opened(value: Any) -> Any:
    """What text or bytes hold, where that is JSON; arrays in numpy's own file format as arrays."""
    if isinstance(value, bytes):
        if value[:6] == b"\x93NUMPY":
            return _array_in(value)
        try:
            text = value.decode()
        except UnicodeDecodeError:
            return value
    elif isinstance(value, str):
        text = value
    else:
        return value
    if text[:1] not in "[{-0123456789NI" or not text:
        return value
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return value


# ------------------------------------------------------------------------------------------------ arrays


class _Array:
    """A tensor or an array, copied; `name` is what it was called where it came from."""

    __slots__ = ("array", "name")

    def __init__(self, array: Any, name: str) -> None:
        self.array = array
        self.name = name


class _Strange:
    """A value of a type that no answer can be made of: only its type is compared."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Strange) and self.name == other.name

    __hash__ = None  # type: ignore[assignment]


def _array_in(value: bytes) -> Any:
    import numpy

    try:
        return _Array(numpy.load(io.BytesIO(value), allow_pickle=False), "npy")
    except ValueError:
        return value


def _compare_arrays(seen: _Array, wanted: _Array, path: Path, tolerance: Tolerance) -> Iterator[tuple[str, str, str]]:
    import numpy

    ours, theirs = seen.array, wanted.array
    where = _shown_path(path)
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype or seen.name != wanted.name:
        yield where, _shape(seen), _shape(wanted)
        return
    if tolerance.any_number and ours.dtype.kind in "iufc":
        alike = (ours != ours) == (theirs != theirs)
    elif ours.dtype.kind in "fc":
        finite = numpy.abs(theirs[numpy.isfinite(theirs)]) if tolerance.of_largest else theirs[:0]
        off = max(tolerance.absolute, tolerance.of_largest * float(finite.max())) if finite.size else tolerance.absolute
        alike = numpy.isclose(ours, theirs, rtol=tolerance.relative, atol=off, equal_nan=True)
    else:
        alike = ours == theirs
    if not numpy.all(alike):
        index = tuple(int(at) for at in numpy.argwhere(~numpy.asarray(alike))[0])
        yield _shown_path((*path, *index)), show(ours[index].item()), show(theirs[index].item())


def _shape(array: _Array) -> str:
    return f"{array.name} {array.array.dtype} {list(array.array.shape)}"


def keep(value: Any, depth: int = 0) -> Any:
    """A copy of an answer that can be compared later, whatever its owner does to the answer meanwhile."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if depth > MOST_DEPTH:
        return _Strange("value nested too deeply")
    if isinstance(value, dict):
        return {key: keep(below, depth + 1) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [keep(below, depth + 1) for below in value]
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, JsonAnswer):
        return value.body
    if isinstance(value, bool | int | float | str):  # an author's own kind of these, an enumeration's member
        return next(kind(value) for kind in (int, float, str) if isinstance(value, kind))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        if tensor.dtype is torch.bfloat16:
            tensor = tensor.float()
        return _Array(tensor.numpy().copy(), "tensor")
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return _Array(value.copy(), "array")
    if numpy is not None and isinstance(value, numpy.generic):
        return keep(value.item(), depth + 1)
    return _Strange(type(value).__name__)


# ------------------------------------------------------------------------------------------------ words


def show(value: Any) -> str:
    """A value in few words."""
    if isinstance(value, _Array):
        return _shape(value)
    if isinstance(value, _Strange):
        return f"a {value.name}"
    if isinstance(value, list | dict) and len(value) > 20:
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, str | bytes):
        return shorten(repr(value[: MOST_TEXT + 1]))
    return shorten(repr(value))


def shorten(text: str) -> str:
    """At most `MOST_TEXT` characters."""
    return text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 1] + "…"


def _shown_path(path: Path) -> str:
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return shorten(text)


def _tokens(path: str) -> Path:
    """The steps of an `ignore` path: `boxes[*].id` is boxes, any index, id; a header's name is one step."""
    if path.startswith("header:"):
        return (path.lower(),)
    return tuple(re.findall(r"[^.\[\]]+", path))


def _is_ignored(path: Path, rules: list[Path]) -> bool:
    return any(
        rule
        and len(rule) <= len(path)
        and all(word in ("*", str(step)) for word, step in zip(rule, path, strict=False))
        for rule in rules
    )
