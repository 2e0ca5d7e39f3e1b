"""A model of a hub for `marserve run`: `hf://organisation/name@revision` as a folder or an archive on this machine.

Files stay in the cache of huggingface_hub, as for a server. What is served of a model of transformers is a folder of
links to those of its files that the handler reads: no code, and no weights other than safetensors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from marserve.archive.writing.sources import is_archive, is_of_transformers
from marserve.cli.output import CommandFailed, Interrupted, Output, Step, WrongArguments
from marserve.cli.progress.wait_progress import while_showing
from marserve.errors import MarserveError, without_stop
from marserve.settings import Settings
from marserve.store.addresses.fetch_guard import Target, hide_query, parse_target
from marserve.store.sources.hub import Hub, Repository, Selection, read_repository
from marserve.store.sources.source import Broken, Cancel, Gathered, SourceError

_SERVED = "run serves models of transformers and marserve's archives"
_LATER = "Try again when the hub can be reached; what was fetched once stays in its cache."
FILES = Selection(
    names=(
        *("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"),
        *("*.tiktoken", "*.vocab", "*.bpe", "*.spm", "*.codes"),  # what tokenizers read
    ),
    but=("*/*.safetensors", "consolidated*.safetensors", "onnx/*", "openvino/*"),  # the same weights once more
    needs={
        "config.json": f"has neither a config.json nor one archive; {_SERVED}",
        "*.safetensors": "has no weights that end in .safetensors; other weights can run code, and are not fetched",
    },
)


@dataclass(frozen=True, slots=True)
class HubModel:
    """What was fetched: a folder or an archive at `path`; `address` has the commit in the place of the revision."""

    path: Path
    address: str


def fetch_model(
    address: str, settings: Settings, folder: Path, output: Output, environment: Mapping[str, str] = os.environ
) -> HubModel:
    """Fetch the model of an address, unless the hub's cache has it; links to it are made below `folder`.

    Raises WrongArguments for what would fail again, CommandFailed for a hub that cannot be asked now, Interrupted.
    """
    target, repository = _read(address)
    hub = Hub(settings.stores, environment, max_bytes=settings.max_archive_bytes, selection=FILES)
    found = _gather(hub, target, repository, output)
    if is_archive(str(found.path)):
        return HubModel(found.path, found.address)
    if repository.file is not None:
        raise WrongArguments(f"{repository.file} of {repository.id} is no archive; {_SERVED}.")
    linked = folder / repository.name
    _link(found.path, linked)
    if not is_of_transformers(linked):
        raise WrongArguments(f"The config.json of {found.address} is not one of transformers; {_SERVED}.")
    return HubModel(linked, found.address)


def _read(address: str) -> tuple[Target, Repository]:
    try:
        target = parse_target(address)
        repository = read_repository(target)
    except (MarserveError, SourceError):
        raise WrongArguments(
            "A model of a hub is named by hf://OWNER/NAME@REVISION, with a commit, a tag or a branch as the revision."
        ) from None
    if "@" not in target.key.partition("/")[0]:
        raise WrongArguments(
            f"{hide_query(address)} names no revision, and the hub's files change.",
            f"Name a commit, a tag or a branch: hf://{repository.id}@main is the usual branch as it is now.",
        )
    return target, repository


def _gather(hub: Hub, target: Target, repository: Repository, output: Output) -> Gathered:
    cancel, seen = Cancel(), Step("")

    def on_progress(have: int, total: int | None) -> None:
        nonlocal seen
        of = "" if total is None else f"of {total / 1e6:.1f} "
        seen = Step(f"{repository.id}: {have / 1e6:.1f} {of}MB", have, total)

    try:
        return while_showing(
            lambda: hub.gather(target, cancel, on_progress),
            lambda: [seen] if seen.text else [],
            output,
            f"Asking the hub for {repository.id}",
        )
    except KeyboardInterrupt:
        cancel.set("it was interrupted")
        raise Interrupted("The fetching was ended; what had come stays in the hub's cache.") from None
    except Broken as error:
        raise CommandFailed(f"{target.url} could not be fetched: {without_stop(str(error))}.", _LATER) from error
    except SourceError as error:
        raise WrongArguments(f"{target.url} cannot be run: {without_stop(str(error))}.") from error


def _link(fetched: Path, linked: Path) -> None:
    """Make a folder of links to the files of the selection: the cache may have others of this commit."""
    for name in FILES.of(str(path.relative_to(fetched)) for path in fetched.rglob("*") if path.is_file()):
        place = linked / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to((fetched / name).resolve())
