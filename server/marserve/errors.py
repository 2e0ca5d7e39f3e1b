"""The tree of errors. Knows no HTTP and no gRPC: one table in each surface turns types into statuses.

MarserveError
  ClientError                            the client asked for, or sent, what cannot be used
    BadInput                             its message says what was wrong
      BodyTooLarge, BadName
      BadDesiredState                    a desired state says what cannot be; names each line
    RouteNotFound, MethodNotAllowed
    InvalidToken                         no key, a wrong one, or one that has expired
    ManagementClosed                     asked from another machine where management asks for no key
    ModelNotFound, VersionNotFound, ArchiveNotFound
      NotInStore, AddressNotAllowed, WorkflowArchiveNotFound
    DownloadNotFound
    VersionConflict, DefaultVersionInUse
      LabelTaken
    LabelNotFound, VersionInUse, SwapUnderWay
    WorkflowNotFound, WorkflowConflict
    WatchNotFound                        no place is watched under that name
    DesiredStateDecides                  a desired state is in force, and the call would change what it says
    DesiredStateMoved, ApplyUnderWay, NothingToUndo
    WouldUnload                          a document does not name models that are there, and did not bring them
    ShadowNotFound, RolloutNotFound
    RolloutUnderWay                      the model has one already, or it cannot be told that in the state it is in
  Unavailable                            come back later (`retry_after_s` says when, where it is known)
    NoWorker                             no worker; and with it, for TorchServe's clients
      QueueFull, NoTicket, SequencesFull, SequenceGone
    WaitTooLong, Draining, FingerprintRefused
      DrainedAway                        accepted, and not answered before the server ended
    NoMemoryNow                          the model is not loaded, and those that are loaded are in use
    WorkflowBusy                         a workflow, or one of its nodes, takes no more now
  DeadlinePassed                         nobody waits any more
  ClientGone                             the client hung up; never sent, only counted
  RunFailed                              a worker had the request and could not answer it
    WorkerDied, OutOfMemory, HandlerFailed
    NodeFailed                           a node of a workflow gave no answer, however often it was tried
  LoadFailed                             workers of a version could not load the model
    SwapFailed                           or it was not fit to take the place of another
  ApplyFailed                            a desired state could not be carried out, and the one before serves on
  WorkflowFailed                         nodes of a workflow could not be registered
  NotEnoughDevices                       the server has too few for a worker of the model
  NotEnoughMemory                        the model would not fit beside those that stay; refused before it is loaded
    NotEnoughDeviceMemory                the same of its accelerators
  CleanUpTimedOut                        a worker did not end in time
  ArchiveExists                          a download would take the place of a file in the store
  DownloadFailed                         an archive that may be fetched could not be
    DigestMismatch
  BadArchive                             found while reading an archive; names it and the member
    UnsafeArchive, DependencyFailed
      RequirementsRefused, VenvNotMade
    BadWorkflow                          a workflow's archive or spec says what cannot be
      BadDag
  BadSettings                            found at start; names the key and where it stands
    InvalidSnapshot
  BadFrame                               bytes on the wire that no honest peer sends
"""

from __future__ import annotations

import math
from collections.abc import Sequence


class MarserveError(Exception):
    """Base of everything that marserve raises on purpose.

    `cause` is the class of cause that clients see as `x-marserve-cause`, or None. `version_header` names the version
    that it befell, where the client is to be told.
    """

    cause: str | None = None
    version_header: tuple[str, str] | None = None

    @property
    def message(self) -> str:
        """The sentence that a client may see: no paths, module names or tracebacks."""
        return str(self)


class ClientError(MarserveError):
    """The client asked for what is not there, or sent what cannot be used."""


class BadInput(ClientError):
    """What the client sent cannot be used; the message says what and what would be right."""


class BadName(BadInput):
    """A name that no model, version or workflow newly gets."""


class BodyTooLarge(BadInput):
    """A request body over the limit, that of the setting which is named."""

    def __init__(self, limit_bytes: int, setting: str = "max_request_size") -> None:
        self.limit_bytes = limit_bytes
        super().__init__(f"The request body is larger than {setting}, {limit_bytes} bytes.")


def without_stop(text: object) -> str:
    """A sentence, or an error's, to be gone on with: without the full stop at its end."""
    return str(text).rstrip().removesuffix(".")


class BadDesiredState(BadInput):
    """A desired state that cannot be meant. `problems` are sentences, each with its line; `name` is the document's."""

    def __init__(self, name: str, problems: list[str]) -> None:
        self.name, self.problems = name, problems
        super().__init__(f"{name} is refused, and nothing was changed: {'; '.join(problems)}")


class DesiredStateDecides(ClientError):
    """The server has the models of a desired state, and this call would change them. `remedy` is what to do instead."""

    cause = "desired_state"

    def __init__(self, where: str, remedy: str) -> None:
        self.where, self.remedy = where, remedy
        super().__init__(f"{where} says which models this server has, so this call is refused. {remedy}")


class DesiredStateMoved(ClientError):
    """The document is not the one that the change was made from."""

    cause = "desired_state"

    def __init__(self, where: str) -> None:
        self.where = where
        super().__init__(f"{where} was changed by somebody else meanwhile; nothing was changed. Read it and try again.")


class ApplyUnderWay(ClientError):
    """A desired state is being carried out, and there is only one at a time."""

    cause = "desired_state"

    def __init__(self) -> None:
        super().__init__("A desired state is being applied already; try again when that has ended.")


class NothingToUndo(ClientError):
    """There is no document before the one in force."""

    cause = "desired_state"

    def __init__(self) -> None:
        super().__init__("There is nothing to undo: no document was applied before the one in force.")


def some_of(names: Sequence[str]) -> str:
    """Names for a sentence, the first eight: `m 1.0, n 1.0 and 3 more`."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


class WouldUnload(ClientError):
    """A document would unload versions that no document names. `versions` are their models and names."""

    cause = "desired_state"

    def __init__(self, versions: Sequence[tuple[str, str]]) -> None:
        self.versions = tuple(versions)
        shown = some_of([f"{model} {version}" for model, version in self.versions])
        super().__init__(
            f"No document has named {shown} so far, and this one does not: nothing was changed. To unload them say "
            "prune=true; to add them to the document say adopt=true. (`marserve apply` has --prune and "
            "--adopt-existing.)"
        )


class RouteNotFound(ClientError):
    """No such route."""

    def __init__(self) -> None:
        super().__init__("Requested resource is not found, please refer to API document.")


class MethodNotAllowed(ClientError):
    """The route exists, the method does not."""

    def __init__(self) -> None:
        super().__init__("Requested method is not allowed, please refer to API document.")


class InvalidToken(ClientError):
    """The request has no key, a wrong one, or one that has expired: which of them it was is not said.

    `what` is `Authorization`, or `Authentication` where a new key was asked for, as TorchServe words it.
    """

    cause = "token"

    def __init__(self, what: str) -> None:
        super().__init__(f"Token {what} failed. Token either incorrect, expired, or not provided correctly")


class ManagementClosed(ClientError):
    """Management is for callers on this machine alone, and this one is elsewhere."""

    cause = "management_closed"

    def __init__(self) -> None:
        super().__init__(
            "This server is managed from its own machine alone, because it asks nobody for a key. Whoever runs it can "
            "open management with keys (disable_token_authorization=false) or with allow_open_management=true."
        )


class ModelNotFound(ClientError):
    """No model of that name is registered."""

    def __init__(self, model: str) -> None:
        self.model = model
        super().__init__(f"Model not found: {model}")


class VersionNotFound(ClientError):
    """The model is registered, the version is not."""

    def __init__(self, model: str, version: str, text: str | None = None) -> None:
        self.model, self.version = model, version
        super().__init__(text or f"Model version: {version} does not exist for model: {model}")


class ArchiveNotFound(ClientError):
    """No archive can be taken from what the client named."""


class NotInStore(ArchiveNotFound):
    """The store holds no such archive."""

    cause = "not_in_store"


class AddressNotAllowed(ArchiveNotFound):
    """No pattern of `allowed_urls` matches the address."""

    cause = "address_not_allowed"

    def __init__(self, shown: str) -> None:
        super().__init__(f"Given URL {shown} does not match any allowed URL(s)")


class ArchiveExists(MarserveError):
    """A download would take the place of a file in the store."""

    cause = "archive_exists"

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"Model file already exists {name}")


class DownloadFailed(MarserveError):
    """An archive that may be fetched could not be. `reason` says why, in the sentence itself only with `is_told`."""

    cause = "download_failed"

    def __init__(self, url: str, reason: str = "", *, is_told: bool = False) -> None:
        self.url, self.reason = url, reason
        super().__init__(f"Failed to download archive from: {url}{f' ({reason})' if reason and is_told else ''}")


class DigestMismatch(DownloadFailed):
    """An archive is not what its SHA-256 digest says. `what` has the digest that was found."""

    cause = "digest_mismatch"

    def __init__(self, url: str, wanted: str, found: str, what: str = "what came") -> None:
        self.wanted, self.found = wanted, found
        sentence = f"{what} has the SHA-256 digest {found}, not {wanted}"
        super().__init__(url, sentence)
        self.args = (f"Failed to download archive from: {url}: {without_stop(sentence)}. Nothing was taken from it.",)


class DownloadNotFound(ClientError):
    """No download of that number is under way."""

    def __init__(self, number: str) -> None:
        super().__init__(f"No download {number[:40]} is under way; GET /downloads lists them.")


class VersionConflict(ClientError):
    """This version of the model is registered already."""

    def __init__(self, model: str, version: str) -> None:
        self.model, self.version = model, version
        super().__init__(f"Model version {version} is already registered for model {model}")


class LabelTaken(VersionConflict):
    """A version cannot have the name of a label, nor a label that of a version."""

    def __init__(self, model: str, label: str) -> None:
        self.model, self.version = model, label
        self.args = (
            f"{label} is a label of model {model} or to become one, and a version of it, too; give one of them another "
            "name.",
        )


class LabelNotFound(ClientError):
    """The model has no such label."""

    def __init__(self, model: str, label: str) -> None:
        self.model, self.label = model, label
        super().__init__(f"Model {model} has no label {label}.")


class ShadowNotFound(ClientError):
    """The model has no shadow."""

    def __init__(self, model: str) -> None:
        self.model = model
        super().__init__(f"Model {model} has no shadow; PUT /models/{model}/shadow begins one.")


class RolloutNotFound(ClientError):
    """There is, and was, no roll-out of the model that the server remembers."""

    def __init__(self, model: str) -> None:
        self.model = model
        super().__init__(f"Model {model} has no roll-out; POST /models/{model}/rollout begins one.")


class RolloutUnderWay(ClientError):
    """The model has a roll-out that this call would disturb, or one that cannot do what is asked as it stands now."""

    cause = "rollout"


class VersionInUse(ClientError):
    """A version that has a weight or a label cannot go unnoticed."""

    cause = "version_in_use"

    def __init__(self, model: str, version: str, *, has_weight: bool, labels: list[str]) -> None:
        self.model, self.version = model, version
        has = [*(["a weight in the model's traffic"] if has_weight else []), *(f"the label {name}" for name in labels)]
        super().__init__(
            f"Version {version} of model {model} has {' and '.join(has)}, so it is not unregistered. Take that from it "
            "first, or unregister it with force=true."
        )


class SwapUnderWay(ClientError):
    """A version of the model is being swapped already."""

    cause = "swap_under_way"

    def __init__(self, model: str) -> None:
        self.model = model
        super().__init__(f"A version of model {model} is being swapped already; try again when that has ended.")


class WatchNotFound(ClientError):
    """No place is watched under that name."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"There is no watch {name[:100]!r}; GET /watches lists them.")


class WorkflowNotFound(ClientError):
    """No workflow of that name is registered."""

    def __init__(self, workflow: str) -> None:
        self.workflow = workflow
        super().__init__(f"Workflow not found: {workflow}")


class WorkflowArchiveNotFound(ArchiveNotFound):
    """No workflow's archive can be taken from what the client named. `cause` is that of an `ArchiveNotFound`."""

    def __init__(self, message: str, cause: str | None = NotInStore.cause) -> None:
        self.cause = cause
        super().__init__(message)


class WorkflowConflict(ClientError):
    """A workflow of this name is registered, or being registered."""

    def __init__(self, workflow: str) -> None:
        self.workflow = workflow
        super().__init__(f"Workflow {workflow} is already registered.")


class DefaultVersionInUse(ClientError):
    """The default version cannot go while others exist."""

    def __init__(self, model: str) -> None:
        self.model = model
        super().__init__(f"Cannot remove default version for model {model}")


class Unavailable(MarserveError):
    """Not now. `retry_after_s` is when trying again may pay, in seconds, or None.

    `retry_spread_s` is how much later clients may be told at most, where each has a moment of its own already.
    """

    retry_after_s: float | None = None
    retry_spread_s: int | None = None


class NoWorker(Unavailable):
    """The version has no worker that could ever take the request.

    Its subclasses share TorchServe's one text for all three (its clients match on it); `cause` tells them apart.
    """

    cause = "no_worker"

    def __init__(
        self,
        model: str,
        version: str | None = None,
        *,
        retry_after_s: float | None = None,
        death: str = "",
        awaited_device: str = "",
    ) -> None:
        """`death` is the class of cause by which the last worker ended; without one there is no worker by choice.

        `awaited_device` says which devices are lost that its workers wait for.
        """
        self.model, self.version, self.retry_after_s, self.death = model, version, retry_after_s, death
        where = f'Model "{model}"' + (f" Version {version}" if version else "")
        again = "" if retry_after_s is None else f" The next one is started {_in_seconds(retry_after_s)}."
        if awaited_device:
            awaited = f"they wait for a device ({awaited_device})"
            super().__init__(f"{where} has no worker to serve inference request: {awaited}.")
            return
        super().__init__(
            f"{where} has no worker to serve inference request: its workers ended, the last one by {death}.{again} The "
            "model's description (`lastDeath`) and the server's log say why; scaling it starts them anew."
            if death
            else f"{where} has no worker to serve inference request. Please use scale workers API to add workers. "
            "If this is a sequence inference, please check if it is closed, or expired; or exceeds "
            "maxSequenceJobQueueSize"
        )


def _in_seconds(seconds: float) -> str:
    whole = math.ceil(seconds)
    return "now" if whole <= 0 else "in a second" if whole == 1 else f"in {whole} seconds"


class QueueFull(NoWorker):
    """The version's queue is at its bound."""

    cause = "queue_full"


class NoTicket(NoWorker):
    """The model uses job tickets and no worker is idle."""

    cause = "no_ticket"


class SequencesFull(NoWorker):
    """There is no room for another sequence, or in the line of this one. `cause` says which."""

    def __init__(self, model: str, cause: str) -> None:
        super().__init__(model)
        self.cause = cause


class SequenceGone(NoWorker):
    """What a worker knew of the sequence is no more: its worker ended, or the sequence did. `cause` says which."""

    def __init__(self, model: str, cause: str) -> None:
        super().__init__(model)
        self.cause = cause


class WaitTooLong(Unavailable):
    """The request would wait longer than its deadline allows, so it is refused at once. Times in seconds."""

    cause = "predicted_wait"

    def __init__(self, wait_s: float, left_s: float, *, retry_after_s: float | None = None) -> None:
        self.wait_s, self.left_s, self.retry_after_s = wait_s, left_s, retry_after_s
        super().__init__(
            f"The request would wait about {wait_s:.3g} seconds for its answer, but its deadline is in {left_s:.3g}."
        )


class NoDescribeWorker(NoWorker):
    """The version has no worker that could be asked to describe itself."""

    def __init__(self, model: str, version: str | None = None, *, retry_after_s: float | None = None) -> None:
        super().__init__(model, version, retry_after_s=retry_after_s)
        self.args = (
            f'Model "{model}" has no worker to serve describe request. Please use scale workers API to add workers.',
        )


class NoDescribeRoom(NoDescribeWorker):
    """All workers are busy, and the queue is full or there is none; `cause` is that of the refusal behind it."""

    def __init__(self, model: str, cause: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(model, retry_after_s=retry_after_s)
        self.cause = cause


class CallHangs(Unavailable):
    """The server stops, and a call into the system that this waits for does not come back. `what` says which."""

    cause = "hangs"

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(f"The server stops, and {what} has not come back for {seconds:g} s.")


class Draining(Unavailable):
    """The server is stopping and takes no more requests."""

    cause = "draining"
    retry_after_s = 1.0

    def __init__(self) -> None:
        super().__init__("The server is shutting down and takes no more requests.")


class RolloutsUnread(Unavailable):
    """The server starts, and has not read yet which roll-outs it goes on with."""

    cause = "rollouts_unread"
    retry_after_s = 1.0

    def __init__(self) -> None:
        super().__init__("The server is starting and has not taken up its roll-outs again yet.")


class DrainedAway(Draining):
    """The server is stopping, and had accepted this request, and has no more time for it."""

    def __init__(self) -> None:
        Unavailable.__init__(self, "The server is shutting down; the request was not answered in the time it had left.")


class FingerprintRefused(Unavailable):
    """A request with this body killed two workers lately."""

    cause = "refused_fingerprint"

    def __init__(self, model: str, retry_after_s: float) -> None:
        self.model, self.retry_after_s = model, retry_after_s
        super().__init__(f'This request killed workers of model "{model}" lately; it is refused for a while.')


class NoMemoryNow(Unavailable):
    """The model is not loaded, and the memory for it did not come free in time: others that are loaded are in use."""

    cause = "no_memory"

    def __init__(self, model: str, *, retry_after_s: float) -> None:
        self.model, self.retry_after_s = model, retry_after_s
        super().__init__(
            f'There is no memory to load model "{model}" now: the models that are loaded are in use. Try again later.'
        )


class WorkflowBusy(Unavailable):
    """A workflow has as many unfinished requests as it may have, or one of its nodes takes no more (`node`)."""

    def __init__(
        self, workflow: str, node: str | None = None, *, cause: str = "queue_full", retry_after_s: float | None = None
    ) -> None:
        self.workflow, self.node, self.cause, self.retry_after_s = workflow, node, cause, retry_after_s
        what = f"Workflow {workflow}" if node is None else f"Node {node} of workflow {workflow}"
        super().__init__(f"{what} takes no more requests now. Try again later.")


class DeadlinePassed(MarserveError):
    """The request's deadline passed, `where` it was: `queue` or `worker`."""

    cause = "deadline"

    def __init__(self, where: str) -> None:
        self.where = where
        super().__init__("The request's deadline passed before it was answered.")


class ClientGone(MarserveError):
    """The client hung up before the answer."""

    cause = "client_gone"

    def __init__(self) -> None:
        super().__init__("The client closed the connection.")


class RunFailed(MarserveError):
    """A worker had the request and could not answer it."""


class WorkerDied(RunFailed):
    """The worker ended, or was ended, with the request. `cause` is a name of `pool.worker_end.cause_of_death.Cause`."""

    def __init__(self, cause: str) -> None:
        self.cause = cause
        super().__init__("Worker died.")


class OutOfMemory(RunFailed):
    """Host or device memory ran out. `message` is `Out of resources`, or `Worker died.` when it killed the worker."""

    cause = "out_of_memory"

    def __init__(self, message: str = "Out of resources") -> None:
        super().__init__(message)


class HandlerFailed(RunFailed):
    """The author's code raised, or returned what cannot be an answer.

    `code` is the status the contract gives it (503 unless the author chose another); `traceback` is for the log.
    """

    cause = "handler"

    def __init__(self, message: str = "Prediction failed", code: int = 503, traceback: str = "") -> None:
        self.code, self.traceback = code, traceback
        super().__init__(message)


class NodeFailed(RunFailed):
    """A node of a workflow gave no answer, or one that cannot be used. `cause` is that of what befell it."""

    def __init__(self, workflow: str, node: str, cause: str | None = None, text: str | None = None) -> None:
        self.workflow, self.node, self.cause = workflow, node, cause
        super().__init__(text or f"Error executing {node}")


class LoadFailed(MarserveError):
    """No worker of the version could load the model. `reason` is for the log and for describe.

    `cause` is a name of `pool.worker_end.cause_of_death.Cause`.
    """

    def __init__(
        self, model: str, version: str | None, *, out_of_memory: bool = False, reason: str = "", cause: str = ""
    ) -> None:
        self.model, self.version, self.out_of_memory, self.reason = model, version, out_of_memory, reason
        self.cause = cause or ("out_of_memory" if out_of_memory else "load_failed")
        super().__init__(f"Failed to start workers for model {model} version: {version or 'null'}")


class SwapFailed(LoadFailed):
    """A version did not take the place of another, which goes on answering. `why` is for the client, without paths."""

    def __init__(self, model: str, version: str, old: str, why: str, *, reason: str = "", cause: str = "") -> None:
        super().__init__(
            model, version, reason=reason, cause=cause, out_of_memory=cause in ("out_of_memory", "no_memory")
        )
        self.args = (f"Version {version} of model {model} was not taken, version {old} goes on answering: {why}",)


class ApplyFailed(MarserveError):
    """A desired state could not be carried out, and what was begun is undone. `failures` are sentences.

    `is_authors`: what is wrong stands in the document or in an archive, and trying again would not help.
    """

    cause = "desired_state"

    def __init__(self, where: str, failures: list[str], *, is_authors: bool = False) -> None:
        self.where, self.failures, self.is_authors = where, failures, is_authors
        super().__init__(f"{where} was not applied, and nothing was changed: {'; '.join(failures)}")


class WorkflowFailed(MarserveError):
    """A workflow is not registered, because nodes of it could not be. `failures` are sentences, one a node.

    `is_authors`: what is wrong stands in the archive or in the call, and trying again would not help. `reason` says why
    workers could not load a node, for the log and for who manages the server.
    """

    def __init__(self, workflow: str, failures: list[str], *, is_authors: bool = False, reason: str = "") -> None:
        self.workflow, self.failures, self.is_authors, self.reason = workflow, failures, is_authors, reason
        super().__init__(f"Workflow {workflow} has failed to register. Failures: [{', '.join(failures)}]")


class NotEnoughMemory(MarserveError):
    """A version, or a worker more of it, would not fit beside what stays; nothing was started. Sizes in bytes.

    `source` says how the need is known. `holders` are the versions that stay, as `name version`, largest first, with
    what they hold; None where that is nothing for who asks (`for_clients`).
    """

    cause = "no_memory"

    def __init__(
        self,
        model: str,
        version: str,
        *,
        needed_bytes: int,
        source: str,
        could_be_had: int,
        budget_bytes: int,
        holders: Sequence[tuple[str, int]] | None = (),
    ) -> None:
        self.model, self.version, self.needed_bytes, self.holders = model, version, needed_bytes, holders
        self.could_be_had, self.budget_bytes, self.source = could_be_had, budget_bytes, source
        super().__init__(self._text())

    def _text(self) -> str:
        text = (
            f"Model {self.model} version {self.version} does not fit into memory: it needs {_mib(self.needed_bytes)} "
            f"MiB ({self.source}), and {_mib(self.could_be_had)} MiB of the {_mib(self.budget_bytes)} MiB for models "
            "can be had."
        )
        if self.holders is None:
            return text
        way_out = _way_out(self.holders, would_fit_alone=self.budget_bytes >= self.needed_bytes)
        return f"{text}{_held_by(self.holders)} {way_out}"

    def for_clients(self) -> NotEnoughMemory:
        """The same for who asks for predictions: without the other models, and without what an operator would do."""
        return NotEnoughMemory(
            self.model,
            self.version,
            needed_bytes=self.needed_bytes,
            source=self.source,
            could_be_had=self.could_be_had,
            budget_bytes=self.budget_bytes,
            holders=None,
        )


class NotEnoughDeviceMemory(NotEnoughMemory):
    """A worker more of a version fits on none of its devices; nothing was started. Sizes in bytes.

    `devices` are those that it may use: number, what could be had of it, and how much it has. `holders` are workers of
    this server on them, by version; None where that is nothing for who asks.
    """

    def __init__(
        self,
        model: str,
        version: str,
        *,
        needed_bytes: int,
        source: str,
        devices: Sequence[tuple[int, int, int]],
        holders: Sequence[tuple[str, int]] | None = (),
    ) -> None:
        self.devices = devices
        super().__init__(
            model,
            version,
            needed_bytes=needed_bytes,
            source=source,
            could_be_had=max((free for _, free, _ in devices), default=0),
            budget_bytes=max((total for _, _, total in devices), default=0),
            holders=holders,
        )

    def _text(self) -> str:
        free = ", ".join(
            f"device {device} has {_mib(free)} MiB of {_mib(total)} MiB free" for device, free, total in self.devices
        )
        text = (
            f"Model {self.model} version {self.version} does not fit into the memory of its devices: a worker needs "
            f"{_mib(self.needed_bytes)} MiB ({self.source}), and {free or 'none of them is known'}."
        )
        if self.holders is None:
            return text
        promised = ", ".join(f"{label} with {_mib(size)} MiB" for label, size in self.holders[:5])
        text += f" On them: {promised}." if promised else ""
        return (
            f"{text} Scale down or unregister what is there, name other devices (deviceIds), or say what a worker "
            "needs with the key deviceMemory of the model's configuration."
        )

    def for_clients(self) -> NotEnoughDeviceMemory:
        """The same for who asks for predictions."""
        return NotEnoughDeviceMemory(
            self.model,
            self.version,
            needed_bytes=self.needed_bytes,
            source=self.source,
            devices=self.devices,
            holders=None,
        )


class NotEnoughDevices(MarserveError):
    """The server has fewer devices than one worker of the model needs (`parallelLevel`)."""

    cause = "no_devices"

    def __init__(self, model: str, level: int, devices: int) -> None:
        self.model, self.level, self.devices = model, level, devices
        super().__init__(f"No enough gpu devices for model:{model} parallelLevel:{level}")


class CleanUpTimedOut(MarserveError):
    """A worker did not end within `unregister_model_timeout`."""

    def __init__(self, model: str) -> None:
        self.model = model
        super().__init__(f"Timed out while cleaning resources: {model}")


class BadArchive(MarserveError):
    """The archive cannot be used. The message names what is wrong with it."""


class UnsafeArchive(BadArchive):
    """The archive holds what must not be unpacked or opened; `member` is its name inside the archive."""

    def __init__(self, member: str, reason: str) -> None:
        self.member, self.reason = member, reason
        super().__init__(f"Refused archive member {member!r}: {reason}")


class DependencyFailed(BadArchive):
    """The archive's own requirements could not be installed. `reason` is for the log: pip's own words, as a rule."""

    cause = "requirements_not_installed"

    def __init__(self, message: str, reason: str = "") -> None:
        self.reason = reason
        super().__init__(message)


class RequirementsRefused(DependencyFailed):
    """A requirements file asks for what is not allowed, or cannot be read. The message names the line."""

    cause = "requirements_refused"


class VenvNotMade(DependencyFailed):
    """The virtual environment for a model's requirements could not be made."""

    cause = "venv_not_made"


class BadWorkflow(BadArchive):
    """A workflow's archive or its spec cannot be used. `reason` says more than TorchServe's words, if that is known."""

    def __init__(self, message: str, reason: str = "") -> None:
        self.reason = reason
        super().__init__(message)


class BadDag(BadWorkflow):
    """The nodes of a workflow do not make a graph that can be run."""


class CannotArchive(MarserveError):
    """No archive can be made of the files that were named. The message names the file or the value."""


class BadSettings(MarserveError):
    """A setting is wrong. `key` is its name, `source` where it stands (`config.properties, line 14`, `--models`)."""

    def __init__(self, message: str, key: str | None = None, source: str | None = None) -> None:
        self.key, self.source = key, source
        super().__init__(f"{message} ({source})" if source else message)


class InvalidSnapshot(BadSettings):
    """A snapshot says what cannot be, or names an archive that is not in the store."""


class BadFrame(MarserveError):
    """Bytes on the wire that no honest peer sends: wrong version, a length over its bound, no message in it."""


def _mib(size_bytes: int) -> str:
    return f"{round(size_bytes / (1024 * 1024)):,}"


def _held_by(holders: Sequence[tuple[str, int]]) -> str:
    listed = ", ".join(f"{label} with {_mib(size)} MiB" for label, size in holders[:5])
    more = len(holders) - 5
    return f" Loaded, and not to be unloaded: {listed}{f', and {more} more' if more > 0 else ''}." if listed else ""


def _way_out(holders: Sequence[tuple[str, int]], *, would_fit_alone: bool) -> str:
    own = "raise model_memory, or say what the model needs with the key memory of its configuration."
    if not holders or not would_fit_alone:
        return own[0].upper() + own[1:]
    return f"Unregister or scale down one of those, or let it make room for others (load: on_demand); or {own}"
