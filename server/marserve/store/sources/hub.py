"""Models of a hub, `hf://organisation/name@revision`: a repository's snapshot, or one archive of it.

A branch or tag is resolved to its present commit; that commit is fetched and shown, and a later start finds it again.
Files are in the cache of huggingface_hub (`HF_HOME`), which other programs share, and a model folder is served from
there. The library runs in a process of its own (`hub_program`), which ends when the server stops waiting for it. Its
messages are not shown. The token is passed to it in an environment variable.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marserve.errors import BadSettings
from marserve.settings.stores import NO_STORES, Stores
from marserve.store.addresses.fetch_guard import Target
from marserve.store.sources.hub_program import select
from marserve.store.sources.source import Broken, Cancel, Failed, Gathered, Missing, OnProgress, SourceError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+\-]{0,127}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository of a hub, or one file in it: `file` is its path, None for the whole repository."""

    organisation: str
    name: str
    revision: str
    file: str | None

    @property
    def id(self) -> str:
        """Its name on the hub, with the organisation."""
        return f"{self.organisation}/{self.name}"

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return bool(_COMMIT.fullmatch(self.revision))

    def at(self, commit: str) -> str:
        """The address of the same at this commit."""
        return f"hf://{self.id}@{commit}{'/' + self.file if self.file else ''}"


class IsArchive(Failed):
    """The repository is an archive, or has only one; none is wanted, and nothing was fetched."""

    def __init__(self, file: str, commit: str) -> None:
        super().__init__(f"{file} is an archive")
        self.file, self.commit = file, commit


@dataclass(frozen=True, slots=True)
class Selection:
    """Which files are fetched of a repository that is no archive: those that one of `names` fits and none of `but`.

    Both hold shell patterns, whose `*` takes slashes too. `needs` has patterns, each of which must fit a file, and how
    a sentence about a repository without such a file goes on. Without `archives` a repository that is an archive, or
    has only one, is refused with IsArchive.
    """

    names: tuple[str, ...]
    but: tuple[str, ...] = ()
    needs: Mapping[str, str] = field(default_factory=dict)
    archives: bool = True

    def of(self, files: Iterable[str]) -> list[str]:
        """Those of these files that are in the selection."""
        return select(files, self.names, self.but)


def read_repository(target: Target) -> Repository:
    """The repository or file of an address. Raises Failed for an address that is not a hub's."""
    first, _, file = target.key.partition("/")
    name, at, revision = first.partition("@")
    if not _NAME.fullmatch(name) or (at and not _REVISION.fullmatch(revision)):
        raise Failed("it is no hf://organisation/name@revision, with a commit, branch or tag as revision")
    return Repository(target.host, name, revision or "main", file or None)


class Hub:
    """Fetches from a hub. `max_bytes` bounds the files of a repository together, or of those in `selection`."""

    def __init__(
        self,
        stores: Stores = NO_STORES,
        environment: Mapping[str, str] | None = None,
        *,
        max_bytes: int = 64 * 1024**3,
        selection: Selection | None = None,
    ) -> None:
        self._stores = stores
        self._selection = selection
        self._environment = dict(environment or {})
        self._max_bytes = max_bytes

    def gather(self, target: Target, cancel: Cancel, on_progress: OnProgress) -> Gathered:
        """Fetch a repository or file, unless the cache has it. Blocks. Raises SourceError."""
        options = self._stores.choose("hf", target.url)
        repository = read_repository(target)
        if options.flag("pinned_only") and not repository.is_pinned:
            raise Failed(
                f"{repository.revision} is no commit, and pinned_only in stores wants one: name the 40 hex digits of a "
                "commit, which never changes"
            )
        environment = dict(self._environment)
        environment["HF_HUB_DISABLE_TELEMETRY"] = "1"
        if options.text("endpoint_url"):
            environment["HF_ENDPOINT"] = options.text("endpoint_url") or ""
        if options.path("cache_folder"):
            environment["HF_HUB_CACHE"] = str(options.path("cache_folder"))
        try:
            token = options.secret("token", self._environment)
        except BadSettings as error:
            raise Failed(error.message) from None
        if options.flag("anonymous"):
            environment.pop("HF_TOKEN", None)
            environment["HF_HUB_DISABLE_IMPLICIT_TOKEN"] = "1"
        elif token:
            environment["HF_TOKEN"] = token
        order: dict[str, Any] = {
            "repository": repository.id,
            "revision": repository.revision,
            "file": repository.file,
            "max_bytes": self._max_bytes,
        }
        if self._selection is not None:
            order |= {"names": self._selection.names, "but": self._selection.but, "needs": list(self._selection.needs)}
            order["archives"] = self._selection.archives
        said = _run(order, environment, cancel, on_progress)
        if said.get("trouble") == "Lacks" and self._selection is not None:
            raise Failed(f"{repository.id} {self._selection.needs[said['what']]}")
        if said.get("trouble") == "IsArchive":
            raise IsArchive(said["what"], said["commit"])
        if "path" not in said:
            raise _trouble(said, repository)
        return Gathered(Path(said["path"]), repository.at(said["commit"]))


def _run(order: dict[str, Any], environment: dict[str, str], cancel: Cancel, on_progress: OnProgress) -> dict[str, Any]:
    """Have the program carry out an order; returns its last message."""
    command = [sys.executable, "-m", "marserve.store.sources.hub_program"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with cancel.calling(process.kill):
            try:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(json.dumps(order).encode() + b"\n")
                    process.stdin.flush()
                for line in process.stdout:
                    said: dict[str, Any] = json.loads(line)
                    if "have" not in said:
                        return said
                    on_progress(said["have"], said["total"])
            finally:
                process.kill()
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
    cancel.check()
    return {"trouble": "it ended without a word"}


def _trouble(said: dict[str, Any], repository: Repository) -> SourceError:
    kinds = {said.get("trouble"), *said.get("kinds", ())}
    status = said.get("status")
    if "ImportError" in kinds:
        what = f"{said['what']}; " if "what" in said else ""
        return Failed(f"hf:// addresses need the extra hf: {what}pip install 'marserve[hf]'")
    if "TooLarge" in kinds:
        return Failed("its files have more bytes than an archive may have")
    if "GatedRepoError" in kinds:
        return Failed(f"{repository.id} is gated: ask for access at the hub, and set a token (HF_TOKEN)")
    if "RevisionNotFoundError" in kinds:
        return Failed(f"{repository.id} has no revision {repository.revision}: name a commit, tag or branch of it")
    if kinds & {"LocalEntryNotFoundError", "IncompleteSnapshotError", "OfflineModeIsEnabled"}:
        return Broken("it is not complete in the cache, and the hub is not asked (HF_HUB_OFFLINE) or not reached")
    if "EntryNotFoundError" in kinds:
        return Missing(f"{repository.id} has no file {repository.file}")
    if "RepositoryNotFoundError" in kinds or status in (401, 403):
        return Failed(f"the hub has no {repository.id}, or the token (HF_TOKEN) may not see it ({status or 404})")
    if status is not None:
        kind = Broken if status in (408, 429) or status >= 500 else Failed
        return kind(f"the hub's answer was {status}")
    return Broken(f"the hub could not be asked ({said.get('trouble')})")
