"""A model of a hub, `hf://organisation/name@revision`, as a folder or an archive on this machine.

`marserve run` serves it and `marserve archive` packs it: the same files, and the same refusals. Files stay in the cache
of huggingface_hub, as for a server. Of a model of transformers it makes a folder of links to those of its files that
the handler reads: no code, and no weights other than safetensors.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from marserve.archive.writing.sources import Wishes, check_task, is_archive, is_of_transformers
from marserve.cli import Tidied
from marserve.cli.output import CommandFailed, Interrupted, Output, Step, WrongArguments
from marserve.cli.progress.wait_progress import while_showing
from marserve.cli.typed_settings import load_as_typed
from marserve.errors import CannotArchive, MarserveError, without_stop
from marserve.settings import Settings
from marserve.store.addresses.fetch_guard import Target, hide_query, parse_target
from marserve.store.sources.hub import Hub, IsArchive, Repository, Selection, read_repository
from marserve.store.sources.source import Broken, Cancel, Gathered, SourceError

_LATER = "Try again when the hub can be reached; what was fetched once stays in its cache."
FILES = Selection(
    names=(
        *("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"),
        *("*.tiktoken", "*.vocab", "*.bpe", "*.spm", "*.codes"),  # what tokenizers read
    ),
    but=("*/*.safetensors", "consolidated*.safetensors", "onnx/*", "openvino/*"),  # the same weights once more
)
_NO_WEIGHTS = "has no weights that end in .safetensors; other weights can run code, and are not fetched"


@dataclass(frozen=True, slots=True)
class Use:
    """What a command does with a model of a hub, in the words of its refusals.

    `takes` says what it is for, `lacking` how a sentence about a repository with none of that goes on, and `done` ends
    "cannot be". `archives`: it takes an archive, too.
    """

    takes: str
    lacking: str
    done: str
    archives: bool

    @property
    def selection(self) -> Selection:
        """The files to fetch."""
        needs = {"config.json": f"{self.lacking}; {self.takes}", "*.safetensors": _NO_WEIGHTS}
        return replace(FILES, needs=needs, archives=self.archives)


RUN = Use(
    "run serves models of transformers and marserve's archives",
    "has neither a config.json nor one archive",
    "run",
    True,
)
ARCHIVE = Use("archive packs models of transformers", "has no config.json", "archived", False)


@dataclass(frozen=True, slots=True)
class HubModel:
    """What was fetched: a folder or an archive at `path`; `address` has the commit in the place of the revision."""

    path: Path
    address: str


def fetch_model(
    address: str,
    wishes: Wishes,
    settings: Settings,
    folder: Path,
    output: Output,
    environment: Mapping[str, str] = os.environ,
    *,
    use: Use = RUN,
) -> HubModel:
    """Fetch the model of an address, unless the hub's cache has it; links to it are made below `folder`.

    Raises WrongArguments for what would fail again, CommandFailed for a hub that cannot be asked now, Interrupted.
    """
    target, repository = _read(address)
    try:
        check_task(wishes.task)  # before gigabytes are fetched
    except CannotArchive as error:
        raise WrongArguments(error.message) from error
    if repository.file is not None and not use.archives:
        raise WrongArguments(
            f"{hide_query(address)} names one file of a repository; {use.takes}, which are whole ones."
        )
    hub = Hub(settings.stores, environment, max_bytes=settings.max_archive_bytes, selection=use.selection)
    found = _gather(hub, target, repository, output, use)
    if is_archive(str(found.path)):
        return HubModel(found.path, found.address)
    if repository.file is not None:
        raise WrongArguments(f"{repository.file} of {repository.id} is no archive; {use.takes}.")
    linked = folder / repository.name
    _link(found.path, linked)
    if not is_of_transformers(linked):
        raise WrongArguments(f"The config.json of {found.address} is not one of transformers; {use.takes}.")
    return HubModel(linked, found.address)


@contextmanager
def fetched_to_pack(address: str, wishes: Wishes, output: Output) -> Iterator[HubModel]:
    """Fetch the model of an address for an archive, in a folder that goes with the block, by Ctrl-C or SIGTERM too.

    Variables set where the hub is and how much may be fetched. Raises as `fetch_model`, and BadSettings.
    """
    with Tidied(), tempfile.TemporaryDirectory(prefix="marserve-archive-") as folder:
        settings = load_as_typed({"model_store": folder}, reads_file=False)
        yield fetch_model(address, wishes, settings, Path(folder), output, use=ARCHIVE)


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


def _gather(hub: Hub, target: Target, repository: Repository, output: Output, use: Use) -> Gathered:
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
    except IsArchive as error:
        raise WrongArguments(
            f"{repository.id} is an archive already ({error.file}); {use.takes}.",
            f"A server loads it from there: marserve register {repository.at(error.commit)}",
        ) from error
    except Broken as error:
        raise CommandFailed(f"{target.url} could not be fetched: {without_stop(str(error))}.", _LATER) from error
    except SourceError as error:
        raise WrongArguments(f"{target.url} cannot be {use.done}: {without_stop(str(error))}.") from error


def _link(fetched: Path, linked: Path) -> None:
    """Make a folder of links to the files of the selection: the cache may have others of this commit."""
    for name in FILES.of(str(path.relative_to(fetched)) for path in fetched.rglob("*") if path.is_file()):
        place = linked / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to((fetched / name).resolve())
