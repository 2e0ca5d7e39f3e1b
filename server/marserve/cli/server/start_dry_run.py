"""`marserve start --dry-run`: what a start would do, by the settings and files that it would find.

Nothing is started, written or fetched.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from marserve.app.grpc_ports import taken_grpc_ports
from marserve.app.listeners import taken_addresses
from marserve.app.places import refuse_unusable
from marserve.archive.contents.weight_size import weigh
from marserve.cli.dry_run import HEAD, MIB, as_dry
from marserve.cli.output import CommandFailed, Output, table
from marserve.cli.server.pid_file import AlreadyRunning, PidFile
from marserve.errors import MarserveError
from marserve.memory.needs import need_of
from marserve.registry.intake.startup import models_to_load
from marserve.settings import Settings
from marserve.settings.report import sources_report
from marserve.store.addresses.fetch_guard import AllowedUrls, hide_query, is_address, parse_target
from marserve.store.addresses.pinned_digest import split_digest
from marserve.store.sources.local import LocalStore


def show_dry_run_of_start(settings: Settings, pid_file: PidFile, output: Output) -> None:
    """Say which addresses would listen, which models would be loaded, and which source set what.

    Raises AlreadyRunning, BadSettings for folders that cannot be used, and CommandFailed for anything else that would
    keep the server or a model from starting.
    """
    refuse_unusable(settings)
    running = pid_file.running_pid()
    if running is not None:
        raise AlreadyRunning(running)
    models = list(_models(settings))
    taken = [str(each) for each in (*taken_addresses(settings), *taken_grpc_ports(settings))]
    failures = [*taken, *(each["reason"] for each in models if "reason" in each)]
    document: dict[str, Any] = {
        "inference": str(settings.inference_address),
        "management": str(settings.management_address),
        "metrics": str(settings.metrics_address) if settings.enable_metrics_api else None,
        "models": models,
        "sources": sources_report(settings),
        "warnings": [*settings.warnings, *settings.notes],
        "reasons": failures,
    }
    for warning in document["warnings"]:
        output.note(f"Warning: {warning}")
    if failures:
        raise CommandFailed("\n".join(failures), "Nothing was started.", **as_dry(document))
    output.result(as_dry(document), HEAD, *_lines(document))


def _lines(document: dict[str, Any]) -> Iterator[str | Table]:
    inference, management = document["inference"], document["management"]
    yield f"marserve would answer at {inference} (management {management}, metrics {document['metrics'] or 'nowhere'})."
    rows = [[each["archive"], each.get("name", "-"), _size(each.get("memoryBytes"))] for each in document["models"]]
    if rows:
        yield table(["archive", "as", "memory with one worker, estimated"], rows)
    yield from document["sources"]


def _models(settings: Settings) -> Iterator[dict[str, Any]]:
    """The models of `load_models`, unless something else decides; with `reason` if one cannot be loaded."""
    if settings.desired_state is not None or settings.model_snapshot is not None or not settings.load_models:
        return
    store = LocalStore(settings.model_store, roots=settings.model_roots)
    for model in models_to_load(settings.load_models, store.names() if settings.load_models == "all" else ()):
        found: dict[str, Any] = {"archive": hide_query(model.url), **({"name": model.name} if model.name else {})}
        try:
            if is_address(model.url):
                AllowedUrls(settings.allowed_urls).check(parse_target(split_digest(model.url)[0]))
            else:
                found["memoryBytes"] = _estimate(store.find(split_digest(model.url)[0]).path)
        except (MarserveError, OSError) as error:
            found["reason"] = f"{hide_query(model.url)} would not be loaded: {error}"
        yield found


def _estimate(archive: Path) -> int:
    need = need_of(
        declared_bytes=None,
        learned=None,
        weight_bytes=weigh(archive).weights,
        shares_weights=True,
        uses_devices=False,
    )
    return need.loading(1)


def _size(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / MIB:,.0f} MiB"
