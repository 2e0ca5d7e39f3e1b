"""What a worker runs beside requests: the warm-up inputs, and checks that batches are answered as single items are.

`marserve_handlers.batch_check` compares; this file makes its rows, and a message of its verdict. Loaded only when there
are warm-up inputs or checks.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from marserve.errors import without_stop
from marserve.messages import Check, Checked, Item, Result, pack_head
from marserve.option_values import Sample
from marserve.worker.device.device_memory import give_back
from marserve.worker.load import LoadedModel
from marserve.worker.outgoing import has_run_out, say, shown
from marserve.worker.rows import Row, begin_unwatched, rows_of
from marserve_handlers.batch_check import (
    Outcome,
    Tolerance,
    Verdict,
    check_handler,
    compare_batch,
    differences,
    shorten,
    show,
)
from marserve_handlers.errors import ModelNotLoadable
from marserve_handlers.support.comparing.class_scores import compare_scores
from marserve_handlers.support.comparing.compared_answer import ComparedAnswer
from marserve_handlers.support.comparing.precision import Precision

# In place of the run in a reported difference: whether two answers differ, or could not be compared.
ANSWERS, FAILED = "answers", "failed"

AnswerAlone = Callable[[Item, Row], tuple[Result, bytes]]


def warm_up(
    model: LoadedModel,
    samples: Sequence[Sample],
    share: Callable[[Sequence[Item], Sequence[bytearray]], None] = lambda items, bodies: None,
) -> tuple[float, list[str], str]:
    """Run the samples one by one and, where batches are allowed, once together; compiled models in all batch sizes.

    Returns the seconds, sentences about problems, and the sentence about the first call that failed, or "".

    A model whose sample fails is served all the same; the sentence goes to describe. `share` gets the items and bodies
    of the calls before the first of them.
    """
    began = time.monotonic()
    problems: list[str] = []
    failure = ""
    items, rows, bodies = _read_samples(model, samples, problems)
    share(items, bodies)
    batches = [[index] for index in range(len(rows))]
    if model.load.batch_size > 1 and len(rows) > 1:
        batches.append(list(range(min(len(rows), model.load.batch_size))))
    if rows and model.context.is_compiled:
        ran = {len(batch) for batch in batches}
        sizes = model.load.allowed_batch_sizes or range(1, model.load.batch_size + 1)
        batches += [[at % len(rows) for at in range(size)] for size in sizes if size not in ran]
    for batch in batches:
        context = model.context
        begin_unwatched(context, [items[index] for index in batch])
        try:
            model.handle([dict(rows[index]) for index in batch], context)
        except SystemExit:
            raise
        except BaseException as error:  # the author's code
            say(logging.WARNING, "the warm-up inputs %s were not answered", batch, error=error)
            sentence = shorten(f"warm-up with sample {', '.join(map(str, batch))} failed: {shown(error)}")
            problems.append(sentence)
            failure = failure or sentence
            is_memory = has_run_out(error)
        else:
            is_memory = False
        if is_memory:  # only here: the error holds the call's objects no longer
            give_back()
    return time.monotonic() - began, problems[:10], failure


def _read_samples(
    model: LoadedModel, samples: Sequence[Sample], problems: list[str]
) -> tuple[list[Item], list[Row], list[bytearray]]:
    """The samples as items, rows and bodies; sentences about files that cannot be read go to `problems`."""
    rows: list[Row] = []
    items: list[Item] = []
    bodies: list[bytearray] = []
    for index, sample in enumerate(samples):
        try:
            body = Path(model.load.model_dir, sample.file).read_bytes() if sample.file else sample.body
        except OSError as error:
            problems.append(f"the sample {sample.file!r} of the archive cannot be read: {error.strerror}")
            continue
        item = Item(f"sample-{index}", [("body", sample.content_type)], pack_head([], []), None)
        rows.extend(rows_of([item], [bytearray(body)], model.load.decode_input))
        items.append(item)
        bodies.append(bytearray(body))
    return items, rows, bodies


class Place(Protocol):
    """A rank's place among the others while they load."""

    def begin_samples(self) -> None:
        """Wait until all are there."""

    def end_sample(self, why: str) -> str:
        """How another rank has ended a sample that this one ended with an error, or without if `why` is empty."""


def compare_ranks(model: LoadedModel, place: Place | None) -> None:
    """Have the ranks of a divided model answer its samples, and rank 0 compare that with the whole model's answers.

    All ranks do this alike, and after each sample ask the others by their `place` whether they have: a rank that has
    raised alone makes the others wait for it. Raises ModelNotLoadable then, if the answers differ, and for a model that
    was not divided.
    """
    load, context = model.load, model.context
    if context.one_rank is None:
        raise ModelNotLoadable(
            "parallel divides eager models (modelFile) that BaseHandler or context.load_model() loads, and nothing of "
            "this archive was loaded so. Leave parallel out, or divide the model in the handler, with parallelType: tp "
            "and parallelLevel."
        )
    said: list[str] = []
    items, rows, _ = _read_samples(model, load.parallel_samples, said)
    if place is not None:
        place.begin_samples()
    for item, row in zip(items, rows, strict=True):
        begin_unwatched(context, [item])
        index = int(item.id.removeprefix("sample-"))
        why = context.one_rank.run(index, functools.partial(model.handle, [row], context))
        if place is not None and (other := place.end_sample(why)):
            raise ModelNotLoadable(
                f"parallel: {item.id} raised here alone, and {other}: {without_stop(why)}. All ranks must end a sample "
                "alike: look at what the handler does by rank."
            )
        if why:
            said.append(shorten(f"{item.id} was not answered by the ranks: {why}"))
    compared = context.one_rank.compare()
    if load.rank is not None and load.rank.rank == 0 and not compared:
        said.append(
            "parallel: nothing shows that the ranks answer as one does, for no sample reached the model. Add samples "
            "to the model's configuration"
        )
    context.load_warnings += said[:10]


def run_check(
    model: LoadedModel,
    check: Check,
    bodies: Sequence[bytearray],
    before_call: Callable[[], None],
    answer_alone: AnswerAlone,
) -> Checked:
    """Carry out a check. `before_call` is called before each call of the handler; `answer_alone` runs one item."""
    tolerance = Tolerance(check.tolerance.relative, check.tolerance.absolute, tuple(check.tolerance.ignore))
    if check.answers is not None:
        return compare_answers(model, check, bodies, tolerance, before_call)
    inputs = sum(len(item.parts) for item in check.items)
    rows = rows_of(check.items, bodies[:inputs], model.load.decode_input)
    with Precision(model.handle) as precision:
        return _run(model, check, rows, bodies[inputs:], tolerance, precision, before_call, answer_alone)


def _run(
    model: LoadedModel,
    check: Check,
    rows: list[Row],
    answered: Sequence[Any],
    tolerance: Tolerance,
    precision: Precision,
    before_call: Callable[[], None],
    answer_alone: AnswerAlone,
) -> Checked:
    is_given = check.tolerance.is_given

    def bound(before: Tolerance) -> Tolerance:
        return before if is_given else precision.bound(before)

    if check.wanted is None:
        verdict = check_handler(
            model.handle,
            model.context,
            rows,
            check.items,
            batch_size=check.batch_size,
            tolerance=tolerance,
            limit_s=check.limit_s,
            before_call=before_call,
            bound=bound,
        )
    else:
        wanted = [outcome_of(*pair) for pair in zip(check.wanted, answered, strict=True)]
        verdict = _run_again(check, rows, wanted, lambda: bound(tolerance), before_call, answer_alone)
    used = bound(tolerance)
    return Checked(
        number=check.number,
        seconds=verdict.seconds,
        samples=verdict.samples,
        sizes=list(verdict.sizes),
        calls=verdict.calls,
        compared=verdict.compared,
        found=verdict.found,
        differences=[(each.run, each.item, each.path, each.seen, each.wanted) for each in verdict.differences],
        notes=verdict.notes,
        relative=used.relative,
        absolute=used.absolute,
        basis="batchTolerance" if is_given else precision.basis,
    )


def compare_answers(
    model: LoadedModel,
    check: Check,
    bodies: Sequence[bytearray],
    tolerance: Tolerance,
    before_call: Callable[[], None],
) -> Checked:
    """Compare pairs of answers, the primary's and the shadow's. An exception of the author's `compare` is reported."""
    results = check.wanted or []
    pairs = list(zip(results[::2], bodies[::2], results[1::2], bodies[1::2], strict=True))
    reported: list[tuple[str, int, str, str, str]] = []
    compared, error_sum, magnitude = 0, 0.0, 0.0
    began = time.perf_counter()
    for index, (primary, primary_body, shadow, shadow_body) in enumerate(pairs):
        if time.perf_counter() - began > check.limit_s:
            reported += [(FAILED, rest, "", "the comparison took too long", "") for rest in range(index, len(pairs))]
            break
        before_call()
        ours, theirs = outcome_of(primary, primary_body), outcome_of(shadow, shadow_body)
        try:
            if check.answers == "tolerance":
                first = next(differences(theirs, ours, tolerance), None)
            elif check.answers == "scores":
                scores = compare_scores(theirs.value, ours.value)
                error_sum, magnitude = error_sum + scores.error, magnitude + scores.magnitude
                first = None if scores.seen == scores.wanted else ("best class", scores.seen, scores.wanted)
            else:
                first = _compare_by_handler(model, ours, theirs)
        except SystemExit:
            raise
        except BaseException as error:  # the author's code
            if check.answers == "scores" and type(error) is ValueError:
                reported.append((FAILED, index, "", shorten(str(error)), ""))
                continue
            say(logging.WARNING, "compare(primary, shadow) failed", error=error)
            reported.append((FAILED, index, "", shorten(f"compare failed: {shown(error)}"), ""))
            continue
        compared += 1
        if first is not None:
            where, seen, wanted = map(shorten, first)
            reported.append((ANSWERS, index, where, seen, wanted))
    seconds = time.perf_counter() - began
    found = sum(each[0] == ANSWERS for each in reported)
    return Checked(
        check.number, seconds, len(pairs), [1], len(pairs), compared, found, reported, [], error=error_sum,
        magnitude=magnitude,
    )  # fmt: skip


def _compare_by_handler(model: LoadedModel, primary: Outcome, shadow: Outcome) -> tuple[str, str, str] | None:
    """Path, seen and wanted if the author's `compare` says that two answers differ; None if they are alike."""
    if model.compare is None:
        raise TypeError("the handler has no method compare(primary, shadow)")
    verdict = model.compare(_shown(primary), _shown(shadow))
    if verdict is True or verdict == "":
        return None
    if verdict is False:
        return "", show(shadow.value), show(primary.value)
    if not isinstance(verdict, str):
        raise TypeError(
            f"compare() returned {type(verdict).__name__}; it must return True, False, or what differs as text"
        )
    return verdict, show(shadow.value), show(primary.value)


def _shown(outcome: Outcome) -> ComparedAnswer:
    return ComparedAnswer(outcome.value, outcome.status, outcome.headers)


def _run_again(
    check: Check,
    rows: Sequence[Row],
    wanted: Sequence[Outcome],
    bound: Callable[[], Tolerance],
    before_call: Callable[[], None],
    answer_alone: AnswerAlone,
) -> Verdict:
    """Run the items of an answered batch again, each alone, and compare the bytes and headers that clients got."""
    verdict = Verdict(samples=len(rows), sizes=(1,))
    began = time.perf_counter()
    for index, (item, row) in enumerate(zip(check.items, rows, strict=True)):
        if time.perf_counter() - began > check.limit_s:
            break
        before_call()
        seen = outcome_of(*answer_alone(item, row))
        verdict.calls += 1
        # The batch's answer is judged; the item's answer alone is what it should have been.
        compare_batch(verdict, f"in a batch of {len(rows)}", [index], [wanted[index]], [seen], bound())
    verdict.seconds = time.perf_counter() - began
    return verdict


def outcome_of(result: Result, body: bytes | bytearray) -> Outcome:
    """An encoded answer as the comparison takes it."""
    if result.error is not None:
        return Outcome(failure=f"{result.status} {result.reason}")
    headers = {name.lower(): value for name, value in result.headers}
    return Outcome(bytes(body), None, result.status, result.reason, headers)
