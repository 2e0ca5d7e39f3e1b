"""`marserve replay`: a request runs again, with those that were in its batch, beside its first time."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Annotated, Any
from urllib.parse import quote

import typer

from marserve.cli.output import AsJson, Output
from marserve.cli.remote import ConfigFile, Management, ManagementAddress, find_address

_ANSWERS = {
    "equal": "The answer is equal to the first one.",
    "different": "The answer is different from the first one.",
    "unknown": "The answer was too large the first time to be compared; status and length are equal.",
}


def replay(
    request_id: Annotated[
        str, typer.Argument(metavar="REQUEST_ID", help="The request's id: `x-request-id` of its answer.")
    ],
    version: Annotated[
        str | None, typer.Option("--version", help="The version that runs it, or a label; without: the one that did.")
    ] = None,
    times: Annotated[int | None, typer.Option("--times", metavar="N", help="How often, at most 100.")] = None,
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Run a request again in the same batch, if the server kept it (replay_sample), and compare answers and times."""
    asked = {"version": version, "times": None if times is None else str(times)}
    query = {name: value for name, value in asked.items() if value is not None}
    with Output(as_json) as output, Management(find_address("management", management, config)) as server:
        path = f"/requests/{quote(request_id, safe='')}/replay"
        ran = server.order("POST", path, query, timeout_s=None)
        output.result(ran, *_described(ran))


def _described(ran: Mapping[str, Any]) -> list[str]:
    first, times, batch = ran["first"], ran["times"], ran["batch"]
    often = "" if len(times) == 1 else f", {len(times)} times, of which the medians are shown"
    lines = [
        f"{ran['id']}: {ran['model']} {ran['version']}, {times[-1]['worker']}{often}",
        f"first by {first['version']}, {first['worker']}",
        "",
        _ANSWERS[ran["answer"]],
        f"  first: {_answer(first['answer'])}",
        *dict.fromkeys(f"  again: {_answer(each['answer'])}" for each in times),
    ]
    mates = dict.fromkeys(mate for each in times for mate in each.get("mates_different") or ())
    if mates:
        lines.append("  different, too, of its batch: " + ", ".join(mates))
    lines += ["", f"  {'':<8} {'first':>10}    {'again':>10}"]
    for index, stage in enumerate(first["stages"]):
        again = median(each["stages"][index]["ms"] for each in times)
        lines.append(f"  {stage['name']:<8} {stage['ms']:>10.2f} ms {again:>10.2f} ms")
    walls = median(each["wall_ms"] for each in times)
    lines += [f"  {'in all':<8} {first['wall_ms']:>10.2f} ms {walls:>10.2f} ms", ""]
    if any(each["first_of_worker"] for each in times):
        lines.append("A run was its worker's first batch.")
    whole = "all of them" if len(batch["ran"]) == batch["size"] else f"{len(batch['ran'])} of them"
    lines.append(f"Its batch had {batch['size']}; {whole} ran again")
    lines += [f"  without {each['id']}: {each['why']}" for each in batch["missing"]]
    if batch["unknown"]:
        lines.append(f"  without {batch['unknown']} of which nothing is kept")
    if ran.get("headers_left_out"):
        lines.append("Without its headers " + ", ".join(ran["headers_left_out"]) + ", which are not kept")
    if ran.get("asked_times"):
        lines.append(f"Of {ran['asked_times']} runs {len(times)} were made: that took a minute")
    return lines


def _answer(answer: Mapping[str, Any]) -> str:
    if answer.get("error"):
        message = f": {answer['message']}" if answer.get("message") else ""
        return f"{answer['status']}, {answer['error']}{message}"
    digest = f", sha256 {answer['sha256'][:16]}…" if answer.get("sha256") else ""
    return f"{answer['status']}, {answer['bytes']} bytes{digest}"
