"""The tree of errors. Knows no HTTP and no gRPC: one table in each surface turns types into statuses.

MarserveError
  ClientError                            the client asked for something that is not there, or sent something unusable
    BadInput                             its message says what was wrong
      BodyTooLarge, UnknownEncoding, BadName
      BadDesiredState                    a desired state that cannot be used; names each line
    RouteNotFound, MethodNotAllowed
    InvalidToken                         no key, a wrong one, or one that has expired, in TorchServe's words
      MissingKey, WrongKey, ExpiredKey   the same, by what is wrong
    ManagementClosed                     a management call from another machine, while management needs no key
    ControlClosed                        a call that changes the server, at an address for inference
    ModelApiClosed                       clients may load and unload no models
    RequestUnknown, CannotReplay, CannotProfile, ProfileUnknown
    ModelNotFound, VersionNotFound, ArchiveNotFound
      NotInStore, AddressNotAllowed, WorkflowArchiveNotFound
    DownloadNotFound
    OtherArchiveThere                    an upload would take the place of a file in the store
      ArchiveInUse
    ArchiveNotAsSaid, TrustedByName, StoreNotWritable, UploadsClosed
    VersionConflict, DefaultVersionInUse
      LabelTaken
    LabelNotFound, SwapUnderWay
    VersionInUse
      NodeInUse                          it is a node of a workflow
    WorkflowNotFound, WorkflowConflict
    WatchNotFound                        no place is watched under that name
    DesiredStateDecides                  a desired state is in force, and the call would change its models
    DesiredStateMoved, ApplyUnderWay, NothingToUndo
    WouldUnload                          a document would unload models that no document has named
    ShadowNotFound, RolloutNotFound
    RolloutUnderWay                      the model has one already, or its state does not allow the call
  Unavailable                            come back later (`retry_after_s` says when, if it is known)
    NoWorker                             no worker; for TorchServe's clients also these:
      QueueFull, NoTicket, SequencesFull, SequenceGone
    WaitTooLong, Draining, FingerprintRefused
      DrainedAway                        accepted, and not answered before the server ended
    NoMemoryNow                          the model is not loaded, and the loaded models are in use
    TooManyUploads
    WorkflowBusy                         a workflow, or one of its nodes, takes no more requests now
  DeadlinePassed                         the request's deadline passed before the answer
  ClientGone                             the client hung up; never sent, only counted
  RunFailed                              a worker had the request and could not answer it
    WorkerDied, OutOfMemory, HandlerFailed
    NodeFailed                           a node of a workflow gave no answer, however often it was tried
  LoadFailed                             workers of a version could not load the model
    HandlerNotFound                      they could not, as its handler is nowhere; none was started
    SwapFailed                           the same, or a version was not fit to take another's place
  ApplyFailed                            a desired state could not be carried out, and the one before serves on
  WorkflowFailed                         nodes of a workflow could not be registered
  NotEnoughDevices                       the server has too few devices for a worker of the model
  NotEnoughMemory                        the model would not fit beside those that stay; refused before it is loaded
    NotEnoughDeviceMemory                the same for its accelerators
  CleanUpTimedOut                        a worker did not end in time
  ArchiveExists                          a download would take the place of a file in the store
  DownloadFailed                         an archive could not be fetched
    DigestMismatch
  BadArchive                             found while reading an archive; names it and the member
    UnsafeArchive, InterpreterRefused, DependencyFailed
      RequirementsRefused, VenvNotMade
    BadWorkflow                          a workflow's archive or spec cannot be used
      BadDag
  BadSettings                            found at start; names the key and where it stands
    InvalidSnapshot
  BadFrame                               bytes on the wire that break the protocol
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeVar


class MarserveError(Exception):
    """Base of everything that marserve raises on purpose.

    `cause` is the class of cause that clients see as `x-marserve-cause`, or None. `version_header` names the version
    that failed, for a header of the answer; None for none.
    """

    cause: str | None = None
    version_header: tuple[str, str] | None = None
    _own_words = ""

    @property
    def message(self) -> str:
        """The sentence that a client may see: no paths, module names or tracebacks."""
        return str(self)

    @property
    def own_message(self) -> str:
        """The same where no client matches on TorchServe's words, which `message` has for some errors."""
        return self._own_words or self.message


class ClientError(MarserveError):
    """The client asked for something that is not there, or sent something that cannot be used."""


class BadInput(ClientError):
    """The client's input cannot be used; the message says what is wrong and what would be right."""


class BadName(BadInput):
    """A name that no model, version or workflow may newly get."""


class BodyTooLarge(BadInput):
    """A request body over the limit of the named setting."""

    def __init__(self, limit_bytes: int, setting: str = "max_request_size") -> None:
        super().__init__(f"The request body is larger than {setting}, {limit_bytes} bytes.")


class UnknownEncoding(BadInput):
    """A request body is compressed in a way that cannot be read, or where it is not taken compressed."""


def without_stop(text: object) -> str:
    """A sentence, or an error's text, without the full stop at its end, to go on with."""
    return str(text).rstrip().removesuffix(".")


class BadDesiredState(BadInput):
    """A desired state that cannot be used. `problems` are sentences, each with its line; `name` is the document's."""

    def __init__(self, name: str, problems: list[str]) -> None:
        self.problems = problems
        super().__init__(f"{name} is refused, and nothing was changed: {'; '.join(problems)}")


class DesiredStateDecides(ClientError):
    """A desired state is in force, and this call would change its models. `remedy` says what to do instead."""

    cause = "desired_state"

    def __init__(self, where: str, remedy: str) -> None:
        super().__init__(f"{where} says which models this server has, so this call is refused. {remedy}")


class DesiredStateMoved(ClientError):
    """The document was changed after the one that the change was made from."""

    cause = "desired_state"

    def __init__(self, where: str) -> None:
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
    """No such route. The text is TorchServe's without another one."""

    def __init__(self, text: str = "Requested resource is not found, please refer to API document.") -> None:
        super().__init__(text)


class MethodNotAllowed(ClientError):
    """The route exists, the method does not. The text is TorchServe's without another one.

    `methods` are those of the route, where they are known.
    """

    def __init__(
        self,
        text: str = "Requested method is not allowed, please refer to API document.",
        methods: Sequence[str] = (),
    ) -> None:
        super().__init__(text)
        self.methods = methods


class InvalidToken(ClientError):
    """The request has no key, a wrong one, or an expired one; the text does not say which.

    `what` is `Authorization`, or `Authentication` for a call for a new key, in TorchServe's words.
    """

    cause = "token"

    def __init__(self, what: str) -> None:
        super().__init__(f"Token {what} failed. Token either incorrect, expired, or not provided correctly")


class MissingKey(InvalidToken):
    """The request has no key. `which` is what it needs, as in `the inference key`."""

    def __init__(self, which: str) -> None:
        self.args = (
            f"This request needs {which}: send it in the header `Authorization: Bearer KEY`. The server "
            "writes its keys into the file of its setting token_file.",
        )


class WrongKey(InvalidToken):
    """The request has a key that is not the one it needs. `which` as for MissingKey."""

    def __init__(self, which: str) -> None:
        self.args = (
            f"The key of this request is not {which}. Each start of the server makes new keys, in the file of its "
            "setting token_file.",
        )


class ExpiredKey(InvalidToken):
    """The request has the right key, whose time is over."""

    def __init__(self, which: str) -> None:
        self.args = (
            f"The {which} key has expired: `GET /token?type={which}` on the management address, with the API key, "
            "makes a new one.",
        )


class ManagementClosed(ClientError):
    """Management is open only to callers on this machine, and this caller is on another."""

    cause = "management_closed"

    def __init__(self) -> None:
        super().__init__(
            "This server can be managed from its own machine only, because management needs no key. Its operator can "
            "open management with keys (disable_token_authorization=false) or with allow_open_management=true."
        )


class ControlClosed(ClientError):
    """A call of the Open Inference Protocol that changes the server, at an address that takes none."""

    cause = "control_closed"

    def __init__(self, call: str) -> None:
        super().__init__(
            f"{call} changes the server, and this address is for inference: send it to the management address, or let "
            "the operator set open_inference_control=true."
        )


class ModelApiClosed(ClientError):
    """This server's settings let no client load or unload models."""

    cause = "model_api_disabled"

    def __init__(self) -> None:
        super().__init__(
            "This server loads and unloads no models by calls (enable_model_api=false); its operator can set "
            "enable_model_api=true."
        )


class ModelNotFound(ClientError):
    """No model of that name is registered. `known` are the names of those that are, None if they are not known here."""

    def __init__(self, model: str, known: Collection[str] | None = None) -> None:
        self.model, self.known = model, known
        super().__init__(f"Model not found: {model}")


class VersionNotFound(ClientError):
    """The model is registered, the version is not. `known` are its versions and labels, empty if not known here."""

    def __init__(self, model: str, version: str, text: str | None = None, known: Collection[str] = ()) -> None:
        self.known = known
        super().__init__(text or f"Model version: {version} does not exist for model: {model}")


class RequestUnknown(ClientError):
    """The recorder has no request of this id: there was none, or it is gone. `kept` is how many it keeps."""

    def __init__(self, request_id: str, kept: int) -> None:
        super().__init__(
            f"Request not found: {request_id}. The newest {kept} requests are recorded, and of each model the slowest "
            "of the last hour and the latest failed ones; flight_recorder_size makes room for more."
        )


class CannotReplay(ClientError):
    """A recorded request cannot be run again, or not now; the text says why."""

    cause = "cannot_replay"


class CannotProfile(ClientError):
    """A version cannot be profiled, or not now; the text says why."""

    cause = "cannot_profile"


class ProfileUnknown(ClientError):
    """There is no profile, or none with a trace."""


class ArchiveNotFound(ClientError):
    """There is no archive that can be used under the name or address that the client gave."""


class NotInStore(ArchiveNotFound):
    """The store holds no such archive."""

    cause = "not_in_store"


class AddressNotAllowed(ArchiveNotFound):
    """No pattern of `allowed_urls` matches the address."""

    cause = "address_not_allowed"

    def __init__(self, shown: str) -> None:
        super().__init__(f"Given URL {shown} does not match any allowed URL(s)")
        self._own_words = f"{shown} matches none of the server's allowed_urls."


class ArchiveExists(MarserveError):
    """A download would take the place of a file in the store."""

    cause = "archive_exists"

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"Model file already exists {name}")
        self._own_words = f"The model store has a file {name} already; register that, or remove it first."


class DownloadFailed(MarserveError):
    """An archive, or `what`, could not be fetched. `reason` says why; the client sees it only with `is_told`."""

    cause = "download_failed"

    def __init__(self, url: str, reason: str = "", *, is_told: bool = False, what: str = "archive") -> None:
        self.reason = reason
        super().__init__(f"Failed to download {what} from: {url}{f' ({reason})' if reason and is_told else ''}")


class DigestMismatch(DownloadFailed):
    """An archive is not what its SHA-256 digest says. `what` has the digest that was found."""

    cause = "digest_mismatch"

    def __init__(self, url: str, wanted: str, found: str, what: str = "what came") -> None:
        sentence = f"{what} has the SHA-256 digest {found}, not {wanted}"
        super().__init__(url, sentence)
        self.args = (f"Failed to download archive from: {url}: {without_stop(sentence)}. Nothing was taken from it.",)


class DownloadNotFound(ClientError):
    """No download of that number is under way."""

    def __init__(self, number: str) -> None:
        super().__init__(f"No download {number[:40]} is under way; GET /downloads lists them.")


class OtherArchiveThere(ClientError):
    """The store has an archive of that name, with other content."""

    cause = "archive_exists"

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"The model store has {name} with other content, which stays. Upload the file under another name, or with "
            "replace=true if no version uses the one that is there."
        )


class ArchiveInUse(OtherArchiveThere):
    """An archive was to be replaced, and a version uses it, or it is a folder."""

    cause = "archive_in_use"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.args = (
            f"The model store has {name} with other content, and a version uses it, or it is a folder: it is not "
            "replaced. Unregister the version first, or upload the file under another name and swap that in.",
        )


class ArchiveNotAsSaid(ClientError):
    """An uploaded archive has another digest than its request says."""

    cause = "digest_mismatch"

    def __init__(self, name: str, wanted: str, found: str) -> None:
        self.name, self.wanted, self.found = name, wanted, found
        super().__init__(
            f"{name} came with the SHA-256 digest {found}, and its request says {wanted}: nothing of it was kept. Send "
            "it again."
        )


class TrustedByName(ClientError):
    """Settings trust an archive by its name, so that clients may not put a file there."""

    cause = "trusted_name"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"trusted_models names {name}, so its pickles would be opened unchecked: an upload cannot have that name. "
            "Name the SHA-256 digest in trusted_models instead, or copy the file into the model store."
        )


class StoreNotWritable(ClientError):
    """Nothing can be uploaded to this server; `why` is a clause."""

    cause = "store_not_writable"

    def __init__(self, why: str) -> None:
        super().__init__(
            f"This server takes no uploads: {without_stop(why)}. Register an archive by an address that its "
            "allowed_urls let through, or put it where the store's content comes from."
        )


class UploadsClosed(ClientError):
    """Uploads need a key from callers on other machines, and this server has none."""

    cause = "uploads_closed"

    def __init__(self) -> None:
        super().__init__(
            "This server takes uploads without a key from its own machine only. Its operator can ask for keys "
            "(disable_token_authorization=false), or set allow_uploads=true if something in front protects it."
        )


class VersionConflict(ClientError):
    """This version of the model is registered already."""

    def __init__(self, model: str, version: str) -> None:
        super().__init__(f"Model version {version} is already registered for model {model}")
        self._own_words = (
            f"Model {model} has a version {version} already. Unregister or swap that one, or give the archive another "
            "version."
        )


class LabelTaken(VersionConflict):
    """A version cannot have the name of a label, nor a label that of a version."""

    def __init__(self, model: str, label: str) -> None:
        self.args = (
            f"{label} is a label of model {model} or to become one, and a version of it, too; give one of them another "
            "name.",
        )


class CopyRefused(VersionConflict):
    """A copy that is to be measured needs a name that no other model has."""

    def __init__(self, model: str, name: str) -> None:
        self.args = (
            f"{name} is a model, and no copy of one: a copy of {model} needs a model_name that nothing else has.",
        )


class LabelNotFound(ClientError):
    """The model has no such label."""

    def __init__(self, model: str, label: str) -> None:
        super().__init__(f"Model {model} has no label {label}.")


class ShadowNotFound(ClientError):
    """The model has no shadow."""

    def __init__(self, model: str) -> None:
        super().__init__(f"Model {model} has no shadow; PUT /models/{model}/shadow begins one.")


class RolloutNotFound(ClientError):
    """The model has no roll-out, and the server remembers none."""

    def __init__(self, model: str) -> None:
        super().__init__(f"Model {model} has no roll-out; POST /models/{model}/rollout begins one.")


class RolloutUnderWay(ClientError):
    """The model has a roll-out that this call would disturb, or whose state does not allow the call."""

    cause = "rollout"


class VersionInUse(ClientError):
    """A version that has a weight or a label is not unregistered without `force`."""

    cause = "version_in_use"

    def __init__(self, model: str, version: str, *, has_weight: bool, labels: list[str]) -> None:
        has = [*(["a weight in the model's traffic"] if has_weight else []), *(f"the label {name}" for name in labels)]
        super().__init__(
            f"Version {version} of model {model} has {' and '.join(has)}, so it is not unregistered. Take that from it "
            "first, or unregister it with force=true."
        )


class NodeInUse(VersionInUse):
    """A version that is a node of a workflow is not unregistered without `force`."""

    def __init__(self, model: str, workflow: str) -> None:
        self.args = (
            f"Model {model} is a node of workflow {workflow}, whose requests would fail without it. DELETE "
            f"/workflows/{workflow} unregisters both; with force=true only the model goes.",
        )


class SwapUnderWay(ClientError):
    """A version of the model is being swapped already."""

    cause = "swap_under_way"

    def __init__(self, model: str) -> None:
        super().__init__(f"A version of model {model} is being swapped already; try again when that has ended.")


class WatchNotFound(ClientError):
    """No place is watched under that name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"There is no watch {name[:100]!r}; GET /watches lists them.")


class WorkflowNotFound(ClientError):
    """No workflow of that name is registered."""

    def __init__(self, workflow: str) -> None:
        super().__init__(f"Workflow not found: {workflow}")


class WorkflowArchiveNotFound(ArchiveNotFound):
    """As `ArchiveNotFound`, for a workflow's archive; `cause` is one of its causes."""

    def __init__(self, message: str, cause: str | None = NotInStore.cause) -> None:
        self.cause = cause
        super().__init__(message)


class WorkflowConflict(ClientError):
    """A workflow of this name is registered, or being registered."""

    def __init__(self, workflow: str) -> None:
        super().__init__(f"Workflow {workflow} is already registered.")


class DefaultVersionInUse(ClientError):
    """The default version cannot go while others exist."""

    def __init__(self, model: str) -> None:
        super().__init__(f"Cannot remove default version for model {model}")
        self._own_words = (
            f"This is the default version of model {model}, which has others: make one of those the default first, or "
            "unregister them before."
        )


class Unavailable(MarserveError):
    """Not now. `retry_after_s` is after how many seconds another try may succeed, or None.

    `retry_spread_s` bounds the random delay that a surface adds, if each client has a moment of its own already.
    """

    retry_after_s: float | None = None
    retry_spread_s: int | None = None


class NoWorker(Unavailable):
    """The version has no worker that could ever take the request.

    Its subclasses share TorchServe's text, since its clients match on it; `cause` distinguishes them.
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
        """`death` is the class of cause of the last worker's end; empty if there is no worker by choice.

        `awaited_device` says which lost devices its workers wait for.
        """
        self.model, self.retry_after_s, self.death = model, retry_after_s, death
        where = f'Model "{model}"' + (f" Version {version}" if version else "")
        named = f"Model {model}" + (f" version {version}" if version else "")
        again = "" if retry_after_s is None else f" The next one is started {_in_seconds(retry_after_s)}."
        if awaited_device:
            awaited = f"they wait for a device ({awaited_device})"
            super().__init__(f"{where} has no worker to serve inference request: {awaited}.")
            self._own_words = f"{named} has no worker: {awaited}."
            return
        self._own_words = (
            f"{named} has no worker: they ended, the last one by {death}.{again} The model's description (`lastDeath`) "
            "and the server's log say why; scaling it starts them anew."
            if death
            else f"{named} has no worker; scaling it starts some (`marserve scale {model} 1`)."
        )
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

    @property
    def own_message(self) -> str:
        """That the queue is full."""
        return f"As many requests wait for model {self.model} as may (jobQueueSize). Try again later."


class NoTicket(NoWorker):
    """The model uses job tickets and no worker is idle."""

    cause = "no_ticket"

    @property
    def own_message(self) -> str:
        """That no worker can run it at this moment."""
        return (
            f"Model {self.model} takes a request only while one of its workers can run it (useJobTicket), and all are "
            "busy. Try again later."
        )


class SequencesFull(NoWorker):
    """There is no room for another sequence, or in the line of this one. `cause` says which."""

    def __init__(self, model: str, cause: str) -> None:
        super().__init__(model)
        self.cause = cause
        self._own_words = _OF_SEQUENCES[cause].format(model=model)


class SequenceGone(NoWorker):
    """The sequence's state is gone: its worker ended, or the sequence did. `cause` says which."""

    def __init__(self, model: str, cause: str) -> None:
        super().__init__(model)
        self.cause = cause
        self._own_words = _OF_SEQUENCES[cause].format(model=model)


_OF_SEQUENCES = {
    "too_many_sequences": "Model {model} has as many sequences as it may (maxNumSequence). Try again later.",
    "sequence_queue_full": "As many requests of this sequence wait for model {model} as may "
    "(maxSequenceJobQueueSize). Try again later.",
    "no_sequence_idle_limit": "Model {model} takes no sequence until sequenceMaxIdleMSec is set in its configuration.",
    "sequence_lost": "The worker of model {model} that knew this sequence has ended: begin it anew.",
    "sequence_expired": "This sequence of model {model} has ended, since it was idle for too long or took too long: "
    "begin it anew.",
    "sequence_ended": "This sequence of model {model} has ended: begin it anew.",
}


class WaitTooLong(Unavailable):
    """The request would wait longer than its deadline allows, so it is refused at once. Times in seconds."""

    cause = "predicted_wait"

    def __init__(self, wait_s: float, left_s: float, *, retry_after_s: float | None = None) -> None:
        self.wait_s, self.left_s, self.retry_after_s = wait_s, left_s, retry_after_s
        super().__init__(
            f"The request would wait about {wait_s:.3g} seconds for its answer, but its deadline is in {left_s:.3g}."
        )


class NoDescribeWorker(NoWorker):
    """The version has no worker for a describe request."""

    def __init__(self, model: str, version: str | None = None, *, retry_after_s: float | None = None) -> None:
        super().__init__(model, version, retry_after_s=retry_after_s)
        self.args = (
            f'Model "{model}" has no worker to serve describe request. Please use scale workers API to add workers.',
        )
        self._own_words = f"Model {model} has no worker to ask; scaling it starts some (`marserve scale {model} 1`)."


class NoDescribeRoom(NoDescribeWorker):
    """A describe request was refused since all workers are busy; `cause` is that of the refusal."""

    def __init__(self, model: str, cause: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(model, retry_after_s=retry_after_s)
        self.cause = cause
        self._own_words = f"All workers of model {model} are busy, so that none can be asked. Try again later."


class CallHangs(Unavailable):
    """The server stops, and a system call that the request waits for does not return. `what` says which."""

    cause = "hangs"

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(f"The server stops, and {what} has not come back for {seconds:g} s.")


class Draining(Unavailable):
    """The server is stopping and takes no more requests."""

    cause = "draining"
    retry_after_s = 1.0

    def __init__(self) -> None:
        super().__init__("The server is shutting down and takes no more requests.")


class VersionStops(Draining):
    """A version leaves, or its server stops, and what still waits for it is refused."""

    def __init__(self, model: str, version: str) -> None:
        Unavailable.__init__(self, f"Version {version} of model {model} is stopping and takes no more requests.")


class RolloutsUnread(Unavailable):
    """The server starts, and has not read yet which roll-outs it continues."""

    cause = "rollouts_unread"
    retry_after_s = 1.0

    def __init__(self) -> None:
        super().__init__("The server is starting and has not taken up its roll-outs again yet.")


class DrainedAway(Draining):
    """The server is stopping, and has no more time for this request, which it had accepted."""

    def __init__(self) -> None:
        Unavailable.__init__(self, "The server is shutting down; the request was not answered in the time it had left.")


class FingerprintRefused(Unavailable):
    """A request with this body killed two workers lately."""

    cause = "refused_fingerprint"

    def __init__(self, model: str, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(f'This request killed workers of model "{model}" lately; it is refused for a while.')


class NoMemoryNow(Unavailable):
    """The model is not loaded, and its memory did not come free in time: the loaded models are in use."""

    cause = "no_memory"

    def __init__(self, model: str, *, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(
            f'There is no memory to load model "{model}" now: the models that are loaded are in use. Try again later.'
        )


class WorkflowBusy(Unavailable):
    """A workflow has as many unfinished requests as it may have, or one of its nodes takes no more (`node`)."""

    def __init__(
        self, workflow: str, node: str | None = None, *, cause: str = "queue_full", retry_after_s: float | None = None
    ) -> None:
        self.node, self.cause, self.retry_after_s = node, cause, retry_after_s
        what = f"Workflow {workflow}" if node is None else f"Node {node} of workflow {workflow}"
        super().__init__(f"{what} takes no more requests now. Try again later.")


class TooManyUploads(Unavailable):
    """As many archives are being uploaded as may be."""

    cause = "uploads"
    retry_after_s = 1.0

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} archives are being uploaded, which is as many as may be at once. Try again later.")


class TooManyAskLogs(Unavailable):
    """The logs are `searched` or `followed` by as many calls as may be."""

    cause = "logs"
    retry_after_s = 1.0

    def __init__(self, what: str, limit: int) -> None:
        super().__init__(f"The logs are {what} by {limit} calls, which is as many as may be at once. Try again later.")


class TooManyScrapes(Unavailable):
    """As many clients take the metrics page as may at once."""

    cause = "scrapes"
    retry_after_s = 1.0

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"{limit} clients are taking the metrics page, which is as many as may at once. Close those that do not "
            "read, or scrape less often."
        )


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
    """The worker ended while it had the request. `cause` is a name of `pool.worker_end.cause_of_death.Cause`."""

    def __init__(self, cause: str) -> None:
        self.cause = cause
        super().__init__("Worker died.")
        self._own_words = "The worker died while it had this request."


class OutOfMemory(RunFailed):
    """Host or device memory ran out. `message` is `Out of resources`, or `Worker died.` when it killed the worker."""

    cause = "out_of_memory"

    def __init__(self, message: str = "Out of resources") -> None:
        super().__init__(message)


class Thrown(NamedTuple):
    """An exception of the author's code as text: its class's name, its message, its traceback. Any may be empty."""

    type: str
    message: str
    traceback: str


class HandlerFailed(RunFailed):
    """The author's code raised, or returned something that cannot be an answer.

    `code` is the status that the author, or the server, chose for it; None: that of any failing handler. `thrown` is
    the exception behind it; None for an answer that its author meant for the client.
    """

    cause = "handler"

    def __init__(
        self, message: str = "Prediction failed", code: int | None = None, thrown: Thrown | None = None
    ) -> None:
        self.code, self.thrown = code, thrown
        super().__init__(message)


class NodeFailed(RunFailed):
    """A node of a workflow gave no answer, or one that cannot be used. `cause` is that of the node's error."""

    def __init__(self, workflow: str, node: str, cause: str | None = None, text: str | None = None) -> None:
        self.workflow, self.node, self.cause = workflow, node, cause
        super().__init__(text or f"Error executing {node}")
        self._own_words = text or f"Node {node} of workflow {workflow} gave no answer that can be used."


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
        self._own_words = f"Model {model}{f' version {version}' if version else ''} was not loaded: its workers failed."


class HandlerNotFound(LoadFailed):
    """The archive's handler cannot be found, so that no worker is started. `defect` is a clause.

    The archive's author has to mend it. TorchServe finds it when the workers of the registration fail, and says so.
    """

    def __init__(self, model: str, version: str, defect: str) -> None:
        super().__init__(model, version, reason=defect, cause="missing_module")
        self._own_words = f"Model {model} cannot be loaded: {without_stop(defect)}."


class SwapFailed(LoadFailed):
    """A version did not take another's place, which goes on answering. `why` is for the client, without paths."""

    def __init__(self, model: str, version: str, old: str, why: str, *, reason: str = "", cause: str = "") -> None:
        super().__init__(
            model, version, reason=reason, cause=cause, out_of_memory=cause in ("out_of_memory", "no_memory")
        )
        self.args = (f"Version {version} of model {model} was not taken, version {old} goes on answering: {why}",)
        self._own_words = ""


class ApplyFailed(MarserveError):
    """A desired state could not be carried out, and its first steps were undone. `failures` are sentences.

    `is_authors`: the fault is in the document or in an archive, so that another try would not help.
    """

    cause = "desired_state"

    def __init__(self, where: str, failures: list[str], *, is_authors: bool = False) -> None:
        self.failures, self.is_authors = failures, is_authors
        super().__init__(f"{where} was not applied, and nothing was changed: {'; '.join(failures)}")


class WorkflowFailed(MarserveError):
    """A workflow is not registered, because nodes of it could not be. `failures` are sentences, one a node.

    `is_authors`: the fault is in the archive or in the call, so that another try would not help. `reason` says why
    workers could not load a node, for the log and for operators.
    """

    def __init__(self, workflow: str, failures: list[str], *, is_authors: bool = False, reason: str = "") -> None:
        self.failures, self.is_authors, self.reason = failures, is_authors, reason
        super().__init__(f"Workflow {workflow} has failed to register. Failures: [{', '.join(failures)}]")
        said = "; ".join(map(without_stop, failures))
        self._own_words = f"Workflow {workflow} was not registered: {without_stop(said)}."


_NoMemory = TypeVar("_NoMemory", bound="NotEnoughMemory")  # Python 3.10, which workers may run under, has no `Self`


class NotEnoughMemory(MarserveError):
    """A version, or one more worker of it, would not fit beside what stays; nothing was started. Sizes in bytes.

    `source` says how the need is known. `holders` are the versions that stay, as `name version`, largest first, with
    what they hold; None if clients must not see them (`for_clients`).
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

    def for_clients(self: _NoMemory) -> _NoMemory:
        """The same for clients of inference: without the other models, and without advice for an operator."""
        shown = type(self).__new__(type(self))
        shown.__dict__.update(self.__dict__, holders=None)
        shown.args = (shown._text(),)
        return shown


class NotEnoughDeviceMemory(NotEnoughMemory):
    """One more worker of a version fits on none of its devices; nothing was started. Sizes in bytes.

    `devices` are those that it may use: number, how much could be had, and how much it has. `holders` are the versions
    with workers on them; None if clients must not see them.
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


class NotEnoughDevices(MarserveError):
    """The server has fewer devices than one worker of the model needs (`parallelLevel`)."""

    cause = "no_devices"

    def __init__(self, model: str, level: int, devices: int) -> None:
        self.level, self.devices = level, devices
        super().__init__(f"No enough gpu devices for model:{model} parallelLevel:{level}")
        self._own_words = (
            f"A worker of model {model} needs {level} devices (parallelLevel), and the server has {devices or 'none'}."
        )


class CleanUpTimedOut(MarserveError):
    """A worker did not end within `unregister_model_timeout`."""

    def __init__(self, model: str) -> None:
        super().__init__(f"Timed out while cleaning resources: {model}")
        self._own_words = f"A worker of model {model} did not end within unregister_model_timeout."


class BadArchive(MarserveError):
    """The archive cannot be used. The message says what is wrong with it."""


class UnsafeArchive(BadArchive):
    """The archive holds a member that must not be unpacked or opened; `member` is its name inside the archive."""

    def __init__(self, member: str, reason: str) -> None:
        self.member, self.reason = member, reason
        super().__init__(f"Refused archive member {member!r}: {reason}")


class InterpreterRefused(BadArchive):
    """The interpreter that a model's configuration names is not allowed, or workers cannot run under it."""

    cause = "interpreter_refused"


class DependencyFailed(BadArchive):
    """The archive's own requirements could not be installed. `reason` is for the log: pip's own words, as a rule."""

    cause = "requirements_not_installed"

    def __init__(self, message: str, reason: str = "") -> None:
        self.reason = reason
        super().__init__(message)


class RequirementsRefused(DependencyFailed):
    """A requirements file cannot be read, or has something that is not allowed. `sentence` is the reason alone."""

    cause = "requirements_refused"

    def __init__(self, sentence: str, reason: str = "", *, file: str = "", line: int = 0) -> None:
        self.sentence, self.file, self.line = sentence, file, line
        super().__init__(f"{file}, line {line}: {sentence}" if line else sentence, reason)


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
    """No archive can be made of the named files. The message names the file or the value."""


class CannotImport(CannotArchive):
    """A handler's file cannot be imported. `traceback` is the author's part of it, or empty."""

    def __init__(self, message: str, traceback: str = "") -> None:
        self.traceback = traceback
        super().__init__(message)


class BadSettings(MarserveError):
    """A setting is wrong. `key` is its name, `source` its place (`config.properties, line 14`, `--models`).

    `sentence` is the message without the source.
    """

    def __init__(self, message: str, key: str | None = None, source: str | None = None) -> None:
        self.sentence, self.key, self.source = message, key, source
        super().__init__(f"{message} ({source})" if source else message)


class InvalidSnapshot(BadSettings):
    """A snapshot that cannot be used, or names an archive that is not in the store."""


class BadFrame(MarserveError):
    """Bytes on the wire that break the protocol: a wrong version, a length over its bound, no message."""


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
