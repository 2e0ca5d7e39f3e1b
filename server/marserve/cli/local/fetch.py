"""`marserve fetch`: downloads archives into a folder, without a server. For init containers.

Typed addresses are allowed. The settings decide redirects, digests, credentials and bounds, as in a server.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from marserve.app.building.stores import build_fetcher
from marserve.cli.dry_run import HEAD, as_dry
from marserve.cli.options import DryRun
from marserve.cli.output import AsJson, CommandFailed, Interrupted, Output, Step
from marserve.cli.progress.downloads import step_of
from marserve.cli.progress.wait_progress import while_showing
from marserve.cli.remote import ConfigFile
from marserve.cli.typed_settings import load_as_typed
from marserve.errors import ArchiveExists, MarserveError
from marserve.settings import Settings
from marserve.store.addresses.fetch_guard import Target, hide_query, parse_target
from marserve.store.addresses.pinned_digest import BESIDE, split_digest
from marserve.store.fetching.download_list import DownloadList
from marserve.store.fetching.fetcher import Fetcher


@dataclass(frozen=True)
class Wanted:
    """One address as it was typed, and what it means."""

    address: str
    target: Target

    @property
    def shown(self) -> str:
        """The address without its secrets."""
        return hide_query(self.address)


def fetch(
    addresses: Annotated[
        list[str], typer.Argument(metavar="ADDRESS…", help="Archives: https://…, s3://…, gs://…, az://…, file:///….")
    ],
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="Where they are put; made where it is missing.")],
    dry_run: DryRun = False,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Fetch archives into a folder, each whole or not at all. What is there already is left as it is."""
    with Output(as_json) as output:
        wanted = [_read(address) for address in addresses]
        _refuse_one_name_twice(wanted)
        if dry_run:
            _refuse_unmakeable(to)
        else:
            _make(to)
        # The settings need a model store that exists; `to` may not exist yet.
        store = next(folder for folder in (to, *to.absolute().parents) if folder.is_dir())
        settings = load_as_typed({"model_store": str(store)} | ({} if config is None else {"ts_config": str(config)}))
        if dry_run:
            settings = replace(settings, download_cache=None)  # else it would be made and swept
        downloads = DownloadList()
        fetcher = build_fetcher(_allowing(settings, wanted), settings.max_archive_bytes, downloads)
        if dry_run:
            _show_dry_run(output, fetcher, wanted, to)
            return
        try:
            done = while_showing(
                lambda: [_fetch(fetcher, one, to) for one in wanted],
                lambda: _steps(downloads),
                output,
                f"Fetching {len(wanted)} archives" if len(wanted) > 1 else f"Fetching {wanted[0].shown}",
            )
        except KeyboardInterrupt:
            fetcher.close()
            raise Interrupted("The fetching was ended; archives that had come whole stay.") from None
        output.result({"folder": str(to), "archives": done}, *(_line(one) for one in done))


def _read(address: str) -> Wanted:
    """What a typed address means. Raises CommandFailed."""
    try:
        target = parse_target(split_digest(address)[0])
    except MarserveError as error:
        raise CommandFailed(str(error)) from error
    if target.scheme == "hf":
        raise CommandFailed(
            f"{hide_query(address)} is kept in the hub's own cache, and cannot be put into a folder.",
            f"Let the server load it: load_models={address}, with HF_HOME where its cache may be.",
        )
    return Wanted(address, target)


def _refuse_one_name_twice(wanted: Sequence[Wanted]) -> None:
    """Raise CommandFailed for two archives of one name, as the folder can hold only one."""
    first: dict[str, Wanted] = {}
    for one in wanted:
        other = first.setdefault(one.target.file_name, one)
        if other is not one:
            raise CommandFailed(
                f"{other.shown} and {one.shown} would both be called {one.target.file_name}.",
                "Fetch them into two folders.",
            )


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unmakeable(folder, f"{error.strerror}") from error


def _refuse_unmakeable(folder: Path) -> None:
    """Raise CommandFailed if `_make` would fail, judged by the nearest folder that exists."""
    if os.path.isdir(folder):
        return
    nearest = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not os.path.isdir(nearest):
        raise _unmakeable(folder, f"{nearest} is no folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise _unmakeable(folder, f"{nearest} may not be written")


def _unmakeable(folder: Path, why: str) -> CommandFailed:
    return CommandFailed(f"The folder {folder} cannot be made ({why}).", "Name another one with --to.")


def _allowing(settings: Settings, wanted: Sequence[Wanted]) -> Settings:
    """The settings with the typed addresses allowed, and with their digests."""
    typed = [re.escape(one.target.url) for one in wanted]
    typed += [re.escape(replace(one.target, path=one.target.path + BESIDE).url) for one in wanted]
    return replace(settings, allowed_urls=(*settings.allowed_urls, *typed))


def _fetch(fetcher: Fetcher, one: Wanted, folder: Path) -> dict[str, Any]:
    """Fetch one archive. Raises CommandFailed for errors of the origin, the digest or the disk."""
    said = {"address": one.shown, "name": one.target.file_name}
    try:
        fetched = fetcher.fetch(one.address, folder)
    except ArchiveExists:
        return {**said, "outcome": "kept"}
    except MarserveError as error:
        raise _failed(error) from error
    fetched.release()
    if fetched.in_store is None:
        raise CommandFailed(
            f"{one.target.file_name} cannot be put into {folder}, which may not be written.",
            "Name another folder with --to, or let this user write there.",
        )
    return {**said, "outcome": "fetched" if fetched.is_new else "kept", "sha256": fetched.sha256}


def _show_dry_run(output: Output, fetcher: Fetcher, wanted: Sequence[Wanted], folder: Path) -> None:
    """Say what would be fetched: origins are asked, and nothing is fetched. Raises CommandFailed."""
    seen = while_showing(
        lambda: [_look(fetcher, one, folder) for one in wanted], list, output, "Asking where they are kept"
    )
    missing = [] if folder.is_dir() else [f"The folder {folder} would be made."]
    lines = [f"{one['name']} is there already" if one["outcome"] == "kept" else _coming(one) for one in seen]
    output.result(as_dry({"folder": str(folder), "archives": seen}), HEAD, *missing, *lines)


def _look(fetcher: Fetcher, one: Wanted, folder: Path) -> dict[str, Any]:
    """What fetching one archive would do. Raises CommandFailed."""
    said = {"address": one.shown, "name": one.target.file_name}
    try:
        found = fetcher.look(one.address, folder)
    except ArchiveExists:
        return {**said, "outcome": "kept"}
    except MarserveError as error:
        raise _failed(error) from error
    if found is None:
        return {**said, "outcome": "kept"}
    return {**said, "outcome": "would be fetched", "bytes": found.size}


def _failed(error: MarserveError) -> CommandFailed:
    reason = getattr(error, "reason", "")
    return CommandFailed(str(error), **({"reason": reason} if reason and reason not in str(error) else {}))


def _coming(one: dict[str, Any]) -> str:
    size = "of unknown size" if one["bytes"] is None else f"{one['bytes'] / 1e6:.1f} MB"
    return f"{one['name']} would be fetched from {one['address']}, {size}"


def _steps(downloads: DownloadList) -> list[Step]:
    running = [status for status in downloads.statuses() if status.state in ("waiting", "downloading")]
    return [step_of(status) for status in running]


def _line(done: dict[str, Any]) -> str:
    if done["outcome"] == "kept":
        return f"{done['name']} is there already"
    return f"{done['name']} fetched from {done['address']}, sha256 {done['sha256']}"
