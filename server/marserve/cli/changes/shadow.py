"""`marserve shadow`: mirror a share of a model's requests to another version, and read where its answers differ."""

from __future__ import annotations

import json
from math import floor
from typing import Annotated, Any

import typer

from marserve.cli.dry_run import as_dry, query
from marserve.cli.options import DryRun
from marserve.cli.output import AsJson, Output, WrongArguments, table
from marserve.cli.remote import ConfigFile, Management, ManagementAddress, find_address, model_path


def shadow(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    version: Annotated[
        str | None, typer.Argument(help="The version that gets copies; without it the shadow is shown.")
    ] = None,
    share: Annotated[
        float, typer.Option("--share", min=0, max=1, help="The share of requests that is mirrored.")
    ] = 0.1,
    compare: Annotated[
        str, typer.Option("--compare", help='How answers are compared: exact, handler, scores, or {"relative": 1e-3}.')
    ] = "exact",
    in_flight: Annotated[int, typer.Option("--in-flight", min=1, max=256, help="Copies at a time.")] = 8,
    off: Annotated[bool, typer.Option("--off", help="Mirror nothing more.")] = False,
    dry_run: DryRun = False,
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Mirror requests to a version whose answers no client gets, and compare them."""
    with Output(as_json) as output:
        if off and version is not None:
            raise WrongArguments("--off takes no version: a model has one shadow.", f"marserve shadow {model} --off")
        path = f"{model_path(model)}/shadow"
        if dry_run and version is None and not off:
            raise typer.BadParameter("it needs something to do: a version, or --off", param_hint="--dry-run")
        asked = query(dry_run)
        with Management(find_address("management", management, config)) as server:
            if version is None:
                described = server.order("DELETE" if off else "GET", path, asked)
            else:
                document = {
                    "version": version,
                    "share": share,
                    "compare": read_compare(compare),
                    "in_flight": in_flight,
                }
                described = server.order("PUT", path, asked, json=document)
        output.result(
            as_dry(described) if dry_run else described, *_shown(model, described, is_dry=dry_run, is_off=off)
        )


def _shown(model: str, described: dict[str, Any], *, is_dry: bool, is_off: bool) -> list[Any]:
    would = "would be" if is_dry else "were" if is_off else "are"
    head = (
        f"{100 * described['share']:g}% of the requests of {model} {would} mirrored to version {described['version']}."
    )
    if "mirrored" not in described:
        return [head]
    lines: list[Any] = [
        head,
        f"{described['mirrored']} mirrored, {described['compared']} compared, {described['differing']} differing, "
        f"{sum(described['dropped'].values())} dropped, {sum(described['errors'].values())} without an answer",
    ]
    if described["compared"] and "shownAgreement" in described:
        error = described.get("meanError")
        said = "" if error is None else f", with a mean error of {error:.2g} of the mean score"
        share = floor(1000 * described["shownAgreement"]) / 10
        lines.append(f"{share:g} % agreement is shown with 95 % certainty{said}")
    if described["differences"]:
        rows = [
            [each["requestId"], each["where"] or "answer", each["primary"], each["shadow"]]
            for each in described["differences"]
        ]
        lines.append(table(["request", "where", "primary", "shadow"], rows))
    return lines


def read_compare(word: str | None) -> Any:
    """How answers are compared: a word, or the object that JSON says. Raises WrongArguments."""
    if word is None or not word.startswith("{"):
        return word
    try:
        return json.loads(word)
    except ValueError:
        raise WrongArguments(
            f"--compare is {word!r}, which is not JSON.", '{"relative": 1e-3} is an example.'
        ) from None
