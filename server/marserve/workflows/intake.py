"""Takes in the archive that a registration names: finds, unpacks, checks and reads it.

Everything here blocks and runs in a thread. Each archive gets a private folder of its own. After any error that folder
is deleted before the error reaches the caller. None of the archive's code is run.
"""

from __future__ import annotations

import errno
import threading
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from marserve.archive.contents.workflow_manifest import WorkflowManifest, read_workflow_manifest
from marserve.archive.pickles.pickle_check import check_folder
from marserve.archive.reading.reader import Limits
from marserve.archive.reading.unpacked import UnpackedArchives
from marserve.errors import (
    ArchiveNotFound,
    BadArchive,
    BadWorkflow,
    MarserveError,
    OutOfMemory,
    UnsafeArchive,
    WorkflowArchiveNotFound,
)
from marserve.files.regular import open_regular
from marserve.registry.intake.intake import compare_digest, is_trusted, unpack_as
from marserve.store.addresses.fetch_guard import hide_query
from marserve.store.addresses.pinned_digest import split_digest
from marserve.store.fetching.fetcher import Fetched, Fetcher
from marserve.store.sources.local import LocalStore, look_at
from marserve.workflows.spec import MAX_BYTES, WorkflowSpec, parse_spec

MISSING = "Workflow not found in workflow store: {name}"


@dataclass(frozen=True, slots=True)
class UnpackedWorkflow:
    """A workflow's archive that was taken in. The holder of this object owns the folder.

    `warnings` name what is odd about the spec, and what was found in pickles of an archive that the operator trusts.
    """

    folder: Path
    manifest: WorkflowManifest
    spec: WorkflowSpec
    warnings: tuple[str, ...] = ()
    archives: UnpackedArchives = field(default_factory=UnpackedArchives)

    def discard(self) -> None:
        """Delete the folder. Blocks; may be called twice."""
        self.archives.discard(self.folder)


class WorkflowIntake:
    """Takes workflow archives of one store into folders below `scratch`. `trusted` is as for models' archives."""

    def __init__(
        self,
        store_folder: Path | None,
        scratch: Path,
        limits: Limits,
        trusted: Collection[str] = (),
        fetcher: Fetcher | None = None,
        archives: UnpackedArchives | None = None,
    ) -> None:
        """`fetcher` fetches addresses into the store; without one they are refused. `archives` notes folders."""
        self._store = LocalStore(store_folder, missing=MISSING)
        self._scratch = scratch
        self._limits = limits
        self._trusted = frozenset(trusted)
        self._fetcher = fetcher
        self._archives = archives or UnpackedArchives()
        self._is_stopped = threading.Event()

    def take_in(self, url: str) -> UnpackedWorkflow:
        """Find, unpack, check and read one archive.

        Raises WorkflowArchiveNotFound, BadWorkflow or BadDag; OutOfMemory when the disk is full, and MarserveError
        when files cannot be read or written for another reason; what fetching raises. A fetched archive that cannot
        be used is deleted again.
        """
        try:
            fetched = None
            if self._fetcher is not None and self._store.root is not None and ".." not in url:
                fetched = self._fetcher.fetch_address(url, self._store.root)
            try:
                unpacked = self._take_in(url, fetched)
            except BaseException:
                if fetched is not None:
                    fetched.discard()
                raise
            if fetched is not None:
                fetched.release()
            return unpacked
        except ArchiveNotFound as error:
            raise WorkflowArchiveNotFound(error.message, error.cause) from None
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OutOfMemory(f"No space is left to save workflow: {hide_query(url)}") from error
            raise MarserveError(f"Failed to save workflow: {hide_query(url)}") from error

    def stop_taking_in(self) -> None:
        """End downloads, and checks of archives, that are under way or begin later."""
        self._is_stopped.set()
        if self._fetcher is not None:
            self._fetcher.close()

    def clear(self) -> None:
        """Delete the scratch folder if nothing is left in it."""
        try:
            self._scratch.rmdir()
        except OSError:
            return

    def _take_in(self, url: str, fetched: Fetched | None) -> UnpackedWorkflow:
        if not url:
            raise WorkflowArchiveNotFound("Workflow not found at: ")
        digest: str | None = None
        if fetched is not None:
            # An archive without a name in the store can only be trusted by its digest.
            name = fetched.name if fetched.in_store is not None else str(fetched.path)
            found = look_at(fetched.path, name)
        else:
            plain, digest = split_digest(url)
            found = self._store.find(plain)
            if digest is not None:
                compare_digest(found, digest, url, self._archives.digests)
        if found.kind == "folder":
            raise WorkflowArchiveNotFound(f"Workflow not found at: {hide_query(url)}")
        self._scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = self._scratch / uuid.uuid4().hex
        try:
            wanted = digest if fetched is None else fetched.sha256
            label = found.path.name if fetched is None else fetched.name
            sha256 = unpack_as(self._archives, found, folder, self._limits, wanted, url, label)
            trusted = is_trusted(found, self._trusted, sha256)
            findings = check_folder(folder, trusted=trusted, is_stopped=self._is_stopped.is_set)
            return replace(_read(folder, findings), archives=self._archives)
        except BaseException as error:
            self._archives.discard(folder)
            if isinstance(error, BadArchive) and not isinstance(error, BadWorkflow | UnsafeArchive):
                raise BadWorkflow(error.message) from error
            raise


def _read(folder: Path, findings: list[str]) -> UnpackedWorkflow:
    manifest = read_workflow_manifest(folder)
    path = folder / manifest.spec_file
    if not path.is_file():
        raise BadWorkflow(f"The archive has no {manifest.spec_file}, which its manifest names as specFile.")
    with open_regular(path) as file:
        spec = parse_spec(file.read(MAX_BYTES + 1), manifest.spec_file)
    functions = [node.name for node in spec.nodes.values() if node.is_function]
    if functions:
        if manifest.handler is None:
            raise BadWorkflow(
                f"{', '.join(functions)} of {manifest.spec_file} are no models, and the manifest names no handler file "
                "that they could be functions of."
            )
        if not (folder / manifest.handler).is_file():
            raise BadWorkflow(f"The archive has no {manifest.handler}, which its manifest names as handler.")
    warnings = (*spec.warnings, *(f"trusted all the same: {finding}" for finding in findings))
    return UnpackedWorkflow(folder, manifest, spec, warnings)
