"""`marserve explain`: a request from its first byte to its last, and why it took as long as it did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import quote

import typer

from marserve.cli.output import AsJson, CommandFailed, Output, WrongArguments
from marserve.cli.remote import ConfigFile, Management, ManagementAddress, find_address

# A stage's bar is so long for the whole time.
BAR = 40
# Less is in the text of numbers, whose rows are of one size all the same.
LEAST_PADDING = 0.05


def explain(
    request_id: Annotated[
        str | None, typer.Argument(metavar="REQUEST_ID", help="The request's id: `x-request-id` of its answer.")
    ] = None,
    slowest: Annotated[bool, typer.Option("--slowest", help="The slowest request that is recorded.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="The slowest of those that failed.")] = False,
    model: Annotated[
        str | None, typer.Option("--model", help="With --slowest, --failed or --list: of this model.")
    ] = None,
    cause: Annotated[
        str | None, typer.Option("--cause", help="Only requests with this cause, as queue, slow_mate or handler.")
    ] = None,
    slower_than: Annotated[
        str | None, typer.Option("--slower-than", metavar="TIME", help="Only requests that took longer, as 250ms.")
    ] = None,
    previous: Annotated[
        bool, typer.Option("--previous", help="Of the server before, from its flight_recorder_file.")
    ] = False,
    as_list: Annotated[bool, typer.Option("--list", help="A line for each of the slowest requests.")] = False,
    newest: Annotated[
        bool, typer.Option("--newest", help="With --list: the newest requests, not the slowest.")
    ] = False,
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Say why a request took as long as it did: where its time went, its batch, and what else the server did."""
    is_search = slowest or failed or as_list
    if is_search == (request_id is not None):
        with Output(as_json):
            raise WrongArguments(
                "Name one request by its id, or say --slowest, --failed or --list.",
                "`x-request-id` of an answer is its id.",
            )
    if newest and not as_list:
        with Output(as_json):
            raise WrongArguments("--newest orders a list; say --list, too.")
    asked = {"model": model, "cause": cause, "slower_than": slower_than, "failed": "true" if failed else None}
    asked |= {"previous": "true" if previous else None, "order": "newest" if newest else None}
    given = {name: value for name, value in asked.items() if value is not None}
    with Output(as_json) as output, Management(find_address("management", management, config)) as server:
        if request_id is None:
            found = ask_recorder(server, "/requests", {**given, "limit": "50" if as_list else "1"})
            if as_list:
                output.result(found, *_rows(found["requests"]))
                return
            if not found["requests"]:
                raise CommandFailed(f"None of the {found['recorded']} recorded requests is such a one.")
            request_id = str(found["requests"][0]["id"])
        explained = ask_recorder(server, f"/requests/{quote(request_id, safe='')}", {})
        output.result(explained, *described(explained))


def ask_recorder(server: Management, path: str, query: dict[str, str]) -> dict[str, Any]:
    """What the server has recorded. Raises CommandFailed, for a server that records nothing with why."""
    try:
        found: dict[str, Any] = server.order("GET", path, query)
    except CommandFailed as failure:
        if failure.detail.get("code") in (404, 405) and not str(failure).startswith("Request not found"):
            raise CommandFailed(
                "This server records no requests: it was started as torchserve, or with flight_recorder_size=0.",
                **failure.detail,
            ) from failure
        raise
    return found


def described(request: Mapping[str, Any]) -> list[str]:
    """The lines about one request."""
    whose = f"{request['model']} {request['version']}".strip() or "no model"
    also_known = f" (the client's: {request['client_id']})" if request.get("client_id") else ""
    error = f", {request['error']}" if request.get("error") else ""
    lines = [
        f"{request['id']}{also_known}",
        f"{whose}, {request['worker'] or 'no worker'}: {request['status']}{error}, "
        f"{request['bytes_in']} bytes in, {request['bytes_out']} bytes out",
        f"came at {request['started']} and took {request['wall_ms']:.1f} ms",
        "",
        f"Why: {request['cause']}, {request['why']}",
        *(f"  also {sentence}" for sentence in request["also"]),
        "",
    ]
    most = max((stage["ms"] for stage in request["stages"]), default=0.0)
    below = _of_handle(request)
    for stage in request["stages"]:
        bar = "█" * round(BAR * stage["ms"] / most) if most else ""
        lines.append(f"  {stage['name']:<8} {stage['ms']:>10.2f} ms  {bar}".rstrip())
        if stage["name"] == "handle":
            lines += below
            below = []
    lines += below  # where there is no such stage
    batch = request.get("batch")
    if batch:
        lines += ["", *_of_batch(batch)]
    if request.get("trace_id"):
        lines += ["", f"Its trace: {request['trace_id']}"]
    if request["meanwhile"]:
        lines += ["", "Meanwhile:", *(f"  {sentence}" for sentence in request["meanwhile"])]
    if request["others"]:
        lines += ["", "Older requests of this id: " + ", ".join(each["started"] for each in request["others"])]
    return lines


def _of_handle(request: Mapping[str, Any]) -> list[str]:
    """What went on in the stage `handle`: the author's spans, a workflow's nodes, and models that were called."""
    lines = [
        f"    {span['name']}: {span['ms']:.2f} ms, {span['after_ms']:.2f} ms after the batch began"
        for span in request.get("spans") or ()
    ]
    for part in request.get("parts") or ():
        longest = max(part["stages"], key=lambda stage: float(stage["ms"]))
        failed = f", {part['status']} {part['error']}" if part.get("error") else ""
        lines.append(
            f"    {'  ' * (part['depth'] - 1)}{part['name']}: {part['ms']:.2f} ms, after {part['after_ms']:.2f} ms, "
            f"by {part['model'] or 'no model'} {part['version']}".rstrip()
            + f"; {longest['ms']:.2f} ms of it in {longest['name']}{failed}"
        )
    return lines


def _of_batch(batch: Mapping[str, Any]) -> list[str]:
    first = ", its worker's first" if batch["first_of_worker"] else ""
    again = f"; it was in {batch['runs']} batches" if batch["runs"] > 1 else ""
    lines = [f"Its batch had {batch['size']}{first}, {batch['handler_ms']:.2f} ms in the handler{again}"]
    if batch.get("padding", 0) >= LEAST_PADDING:
        lines.append(f"  {batch['padding']:.0%} of it are padding if inputs are padded to the largest, by their bytes")
    if batch["mates"]:
        lines.append("  with " + ", ".join(batch["mates"]))
    return lines


def _rows(requests: Sequence[Mapping[str, Any]]) -> list[str]:
    if not requests:
        return ["None of the recorded requests is such a one."]
    return [
        f"{each['wall_ms']:>10.1f} ms  {each['status']}  {each['cause']:<18} "
        f"{each['model']} {each['version']}  {each['id']}"
        for each in requests
    ]
