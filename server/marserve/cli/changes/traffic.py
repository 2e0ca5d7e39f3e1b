"""`marserve traffic`: how the requests of a model that name no version are shared out among its versions."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from marserve.cli.dry_run import HEAD, as_dry, query
from marserve.cli.options import DryRun
from marserve.cli.output import AsJson, Output, WrongArguments, table
from marserve.cli.remote import ConfigFile, Management, ManagementAddress, find_address, model_path


def traffic(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    weights: Annotated[
        list[str] | None,
        typer.Argument(metavar="[VERSION=WEIGHT]...", help="Weights, as 1.0=80 2.0=20; shows them if not given."),
    ] = None,
    sticky_header: Annotated[
        str | None, typer.Option("--sticky-header", metavar="NAME", help="Requests alike in this header stay together.")
    ] = None,
    sticky_cookie: Annotated[
        str | None, typer.Option("--sticky-cookie", metavar="NAME", help="Requests alike in this cookie stay together.")
    ] = None,
    salt: Annotated[str | None, typer.Option("--salt", help="Makes another draw of the same sticky keys.")] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Have the default version answer.")] = False,
    dry_run: DryRun = False,
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Show or set how requests are shared out among a model's versions."""
    sticky = {"header": sticky_header, "cookie": sticky_cookie, "salt": salt}
    sticky = {name: value for name, value in sticky.items() if value is not None}
    if reset and (weights or sticky):
        raise typer.BadParameter("it goes alone: weights are set, or they are reset", param_hint="--reset")
    if sticky and not weights:
        raise typer.BadParameter("it needs weights: marserve traffic MODEL 1.0=80 2.0=20", param_hint="--sticky-…")
    if dry_run and not (weights or reset):
        raise typer.BadParameter("it needs something to do: weights, or --reset", param_hint="--dry-run")
    with Output(as_json) as output, Management(find_address("management", management, config)) as server:
        path = f"{model_path(model)}/traffic"
        parameters = query(dry_run)
        if reset:
            described = server.order("DELETE", path, parameters)
        elif weights:
            body: dict[str, Any] = {
                "weights": dict(map(_read_weight, weights)),
                **({"sticky": sticky} if sticky else {}),
            }
            described = server.order("PUT", path, parameters, json=body)
        else:
            described = server.order("GET", path)
        document = {"model": model, **described}
        output.result(as_dry(document) if dry_run else document, *([HEAD] if dry_run else []), *_show(described))


def _read_weight(word: str) -> tuple[str, float]:
    """`1.0=80` or `1.0=80%`. Raises CommandFailed."""
    version, equals, weight = word.rpartition("=")
    try:
        number = float(weight.removesuffix("%"))
    except ValueError:
        equals = ""
        number = 0.0
    if not equals or not version:
        raise WrongArguments(f"{word!r} is no weight of a version.", "Say it as 1.0=80.", code=400)
    return version, int(number) if number.is_integer() else number


def _show(described: dict[str, Any]) -> list[str | Table]:
    weights: dict[str, float] = described["weights"]
    if described.get("isDefault"):
        return [f"No weights: version {next(iter(weights))}, the default one, answers."]
    total = sum(weights.values())
    pending = described.get("pending", [])
    rows = [
        [name, f"{weight:g}", f"{100 * weight / total:.4g} %", "not ready" if name in pending else ""]
        for name, weight in weights.items()
    ]
    lines: list[str | Table] = [table(["version", "weight", "share", ""], rows)]
    sticky = described.get("sticky")
    if sticky:
        what = f"header {sticky['header']}" if "header" in sticky else f"cookie {sticky['cookie']}"
        lines.append(f"Requests alike in {what} stay together.")
    if pending:
        lines.append("Versions that are not ready get nothing; the others have their share meanwhile.")
    return lines
