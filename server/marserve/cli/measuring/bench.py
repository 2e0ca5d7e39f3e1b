"""`marserve bench`: how fast a model answers its users' requests, and whether it is slower than another version."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Annotated, Any

import typer

from marserve.cli import INTERRUPTED_STATUS
from marserve.cli.options import Version
from marserve.cli.output import FAILED_STATUS, AsJson, CommandFailed, Output, WrongArguments, table
from marserve.cli.remote import (
    ConfigFile,
    InferenceAddress,
    Management,
    ManagementAddress,
    find_address,
    shown_by,
)
from marserve.errors import without_stop

if TYPE_CHECKING:
    from rich.table import Table

    from marserve.tuning.bench import Measured, Plan
    from marserve.tuning.load import Tally

DEFAULT_SECONDS = 10.0
# A load that is sent later than this says more of this machine than of the server.
MOST_LATE_S = 0.005
# An interval that ends above this leaves room for a build that is much slower.
WIDE = 1.2
_SHOWN_EXAMPLE = 200
_OF_THE_REQUEST = frozenset(("INVALID_ARGUMENT", "FAILED_PRECONDITION", "OUT_OF_RANGE", "NOT_FOUND", "UNIMPLEMENTED"))


def bench(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    inputs: Annotated[
        Path | None,
        typer.Option(
            "--inputs", metavar="DIR|FILE", help="Request bodies, one a file; what the model declares if not given."
        ),
    ] = None,
    version: Version = None,
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", min=1, max=1024, help="Closed loop: so many requests at a time; 1 if not given."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate", min=0.001, max=100_000, help="Open loop: so many requests a second, whether answered or not."
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", min=1, max=100_000_000, help="End after so many requests.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", min=0.01, max=86_400, help="End after so long; 10 s if not given.")
    ] = None,
    warm_up: Annotated[
        int, typer.Option("--warm-up", min=0, max=100_000, help="So many requests before, which do not count.")
    ] = 20,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            metavar="VERSION|URL",
            help="Take turns with this version, or this server; exit status 1 if the model is slower.",
        ),
    ] = None,
    allow: Annotated[
        float, typer.Option("--allow", min=0.0, max=10.0, help="So much slower is no fault: 0.05 are 5 %.")
    ] = 0.05,
    timeout: Annotated[
        float,
        typer.Option("--timeout", min=0.001, help="How long to wait for an answer, in s; a deadline over gRPC."),
    ] = 120.0,
    input_name: Annotated[
        str,
        typer.Option(
            "--input-name", metavar="NAME", help="Over gRPC: the key of the handler's row under which a body is."
        ),
    ] = "data",
    inference: InferenceAddress = None,
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Send requests to a model and show the times of its answers; exit status 1 if it is slower than its baseline."""
    # Here, for the time of other commands.
    from marserve.cli.measuring.load_target import described, find_payloads, find_place, target_at, try_once
    from marserve.tuning.bench import Plan, cut, measure
    from marserve.tuning.load import Limit, Shape

    with Output(as_json) as output:
        if rate is not None and concurrency is not None:
            raise WrongArguments(
                "--rate and --concurrency exclude each other.", "The first is an open loop, the second a closed one."
            )
        if requests is None and seconds is None:
            seconds = DEFAULT_SECONDS
        # The first request is sent by itself: it says whether there is a server, and such a model.
        plan = Plan(Shape(concurrency or 1, rate), Limit(requests, seconds), max(0, warm_up - 1), timeout, allow)
        if baseline is not None:
            try:
                cut(plan)
            except ValueError as error:
                raise WrongArguments(
                    f"{without_stop(error).capitalize()}.", "Ask for more with --requests or --seconds."
                ) from error
        about = None
        if inputs is None:
            with Management(find_address("management", management, config)) as server:
                about = described(server, model, version)
        payloads = find_payloads(inputs, about)
        address = find_place(inference, config)
        other_address, other_version = (
            (find_place(baseline.rstrip("/"), None, "--baseline"), version)
            if baseline is not None and "/" in baseline
            else (address, baseline)
        )
        target = target_at(address, model, version, input_name)
        other = None if baseline is None else target_at(other_address, model, other_version, input_name)
        if warm_up:
            try_once(address, target, model, version, payloads, timeout)
        if other is not None and warm_up:
            try_once(other_address, other, model, other_version, payloads, timeout)
        with output.progress() as bar:
            task = bar.add_task("")
            measured = measure(
                target,
                payloads,
                plan,
                other,
                lambda text, done, whole: bar.update(task, description=text, completed=done, total=whole or None),
            )
        name = f"{model} {version}" if version else model
        if not measured.was_cut_off:
            _raise_unanswered(name, measured.warm_up)
        if baseline is not None and not measured.was_cut_off:
            _raise_unanswered(f"The baseline {baseline}", measured.warm_up_of_baseline)
        output.result(
            _document(model, version, baseline, plan, measured), *_lines(name, address, baseline, plan, measured)
        )
        if measured.was_cut_off:
            raise typer.Exit(INTERRUPTED_STATUS)
        _raise_unanswered(name, measured.tally)
        if measured.tally.gave_up or (measured.baseline is not None and measured.baseline.gave_up):
            raise typer.Exit(FAILED_STATUS)
        if baseline is not None and (measured.times is None or measured.fails_more or measured.times.is_slower(allow)):
            raise typer.Exit(FAILED_STATUS)


def _raise_unanswered(name: str, tally: Tally) -> None:
    """Raise CommandFailed where requests were sent and none was answered well: with the first failure's words."""
    if tally.answered or not tally.failures:
        return
    (reason, (_, example)), *_ = tally.failed.items()
    if reason.status is None:
        raise CommandFailed(
            f"{name}: none of {tally.failures} requests got an answer ({reason.text}).",
            "`marserve status` tells how the server is.",
        )
    raise CommandFailed(
        f"{name}: none of {tally.failures} requests was answered; the first got {reason.status} ({reason.text}): "
        f"{_short(example)}",
        "Is it the body that the model takes? `marserve infer` sends one file; --inputs names others."
        if _is_of_the_request(reason.status)
        else f"{shown_by(None)} why.",
    )


def _is_of_the_request(status: int | str) -> bool:
    """Whether a status says that the request was wrong."""
    return status < 500 if isinstance(status, int) else status in _OF_THE_REQUEST


def _lines(name: str, address: str, baseline: str | None, plan: Plan, measured: Measured) -> list[str | Table]:
    tally = measured.tally
    title = f"{name} at {address}: {plan.shape}"
    lines: list[str | Table] = [f"{title}, in turns with {baseline}." if baseline is not None else f"{title}."]
    lines += _of_one("" if baseline is None else f"{name}: ", tally)
    if measured.baseline is not None:
        lines += _of_one(f"baseline {baseline}: ", measured.baseline)
        lines.append(_verdict(plan, measured))
    if measured.was_cut_off:
        lines.append("Cut off by Ctrl-C: this is what was measured until then.")
    for one in (tally, measured.baseline):
        if one is not None and one.gave_up:
            lines.append(f"Given up early: {one.gave_up}.")
    if (late := _late(tally)) > MOST_LATE_S:
        lines.append(f"note: this machine sent one request in a hundred more than {_ms(late)} late, which counts.")
    return lines


def _of_one(title: str, tally: Tally) -> list[str | Table]:
    from marserve.tuning.percentiles import percentiles_of  # here, for the time of other commands

    unfinished = tally.sent - tally.answered - tally.failures
    rest = f", {unfinished} without an end" if unfinished else ""
    lines: list[str | Table] = [
        f"{title}{tally.answered:,} answered, {tally.failures:,} failed{rest} in {tally.lasted_s:.1f} s: "
        f"{_rate(tally):.1f} answers a second."
    ]
    rows = []
    for each in percentiles_of(tally.seconds):
        if each.seconds is None:
            rows.append([each.name, "-", f"cannot be known: it takes {each.needed:,} answers"])
        else:
            assert each.low is not None
            assert each.high is not None
            rows.append([each.name, _ms(each.seconds), f"{_ms(each.low)} to {_ms(each.high)}"])
    lines.append(table(["", "time", "bounds, 95 % sure each"], rows))
    if tally.failed:
        lines.append(
            table(
                ["failed", "status", "reason", "example"],
                [
                    [f"{count:,}", str(reason.status or "-"), reason.text, _short(example)]
                    for reason, (count, example) in tally.failed.items()
                ],
            )
        )
    return lines


def _verdict(plan: Plan, measured: Measured) -> str:
    times = measured.times
    if times is None:
        return f"Only {len(measured.pairs)} pairs of turns were answered: they show nothing."
    if measured.fails_more:
        return "It fails more often than its baseline, beyond chance."
    figure = f"{times} times as long as the baseline, by {times.pairs} pairs"
    if times.is_slower(plan.allowed):
        return f"Slower: {figure}."
    if times.is_faster(plan.allowed):
        return f"Faster: {figure}."
    more = " More requests make the interval narrower." if times.high > WIDE else ""
    return f"Not slower beyond chance and {plan.allowed:.0%}: {figure}.{more}"


def _document(model: str, version: str | None, baseline: str | None, plan: Plan, measured: Measured) -> dict[str, Any]:
    times = measured.times
    document: dict[str, Any] = {
        "modelName": model,
        "modelVersion": version,
        "loop": "closed" if plan.shape.rate is None else "open",
        "concurrency": plan.shape.clients if plan.shape.rate is None else None,
        "rate": plan.shape.rate,
        "wasCutOff": measured.was_cut_off,
        **_document_of(measured.tally),
    }
    if measured.baseline is not None:
        document["baseline"] = {"name": baseline, **_document_of(measured.baseline)}
        document["timesAsLong"] = (
            None
            if times is None
            else {"middle": times.middle, "low": times.low, "high": times.high, "pairs": times.pairs}
        )
        document["isSlower"] = None if times is None else times.is_slower(plan.allowed)
        document["failsMore"] = measured.fails_more
    return document


def _document_of(tally: Tally) -> dict[str, Any]:
    from marserve.tuning.percentiles import percentiles_of  # here, for the time of other commands

    return {
        "sent": tally.sent,
        "answered": tally.answered,
        "failed": tally.failures,
        "seconds": tally.lasted_s,
        "answersPerSecond": _rate(tally),
        "lateMs": 1000 * _late(tally),
        "gaveUp": tally.gave_up or None,
        "percentiles": {
            each.name: None
            if each.seconds is None or each.low is None or each.high is None
            else {"ms": 1000 * each.seconds, "lowMs": 1000 * each.low, "highMs": 1000 * each.high}
            for each in percentiles_of(tally.seconds)
        },
        "failures": [
            {"status": reason.status, "reason": reason.text, "count": count, "example": example}
            for reason, (count, example) in tally.failed.items()
        ],
    }


def _rate(tally: Tally) -> float:
    return tally.answered / tally.lasted_s if tally.lasted_s else 0.0


def _late(tally: Tally) -> float:
    """How late one request in a hundred was sent, at least."""
    late: Sequence[float] = tally.late
    return quantiles(late, n=100)[-1] if len(late) > 1 else max(late, default=0.0)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def _short(text: str) -> str:
    """An answer's message, else what it is, in a line."""
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        text = str(json.loads(text)["message"])
    line = " ".join(without_stop(text).split())
    return line if len(line) <= _SHOWN_EXAMPLE else f"{line[:_SHOWN_EXAMPLE]}…"
