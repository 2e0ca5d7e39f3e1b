"""What can go wrong inside a worker, and the word under which the server hears of it.

    PredictionException     the author's own answer: a message and a status for the client
      BadInput              the request's value does not fit: 400, with the name of the field
        BadPicture          a built-in handler was sent what is no picture
    ModelNotLoadable        the archive's model cannot be loaded; names the file and what was expected
    BadResponse             the handler set a status or header that no response can carry
    NobodyWaits             every client of the batch has gone; raised where the next piece would be sent

Knows no HTTP beyond the numbers an author writes himself, and nothing of the wire. `describe_failure` is the one place
that turns an exception into kind, message and code; across the process border an error travels as these, never pickled.
"""

from __future__ import annotations

from typing import NamedTuple

from marserve_handlers.support.devices.device_errors import is_out_of_memory
from marserve_handlers.support.shown import short

HANDLER = "handler"
PREDICTION = "prediction"
BAD_INPUT = "bad_input"
MEMORY = "memory"
EXPIRED = "expired"
CANCELLED = "cancelled"
TOO_LARGE = "too_large"
BAD_HEADER = "bad_header"


class PredictionException(Exception):
    """Raised by a handler to answer with a status and a message of its own.

    The message goes to the client as it is, so it must say nothing of paths or modules. All items of the batch that
    were in the call get it, unless the server isolates them.
    """

    def __init__(self, message: str, error_code: int = 500) -> None:
        self.message = message
        self.error_code = error_code
        super().__init__(message)

    def __str__(self) -> str:
        return f"{self.message} : {self.error_code}"


class NobodyWaits(Exception):
    """Every client of the running batch has gone, or is past its deadline: there is no client to stream to.

    Raised by `send_intermediate_predict_response`, so that a handler that streams ends by itself; one that has to tidy
    up may catch it.
    """

    def __init__(self) -> None:
        super().__init__("every client of this batch has gone")


class BadInput(PredictionException):
    """The request's value does not fit: the client gets 400 and `field: message`, or the message alone without a field.

    The message says what was expected and what came: `BadInput("expected float32 [28, 28], got [28, 27]", "pixels")`.
    The field may be a client's word, and is cut there.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        self.field = field
        super().__init__(message if field is None else f"{short(str(field))}: {message}", 400)


class BadPicture(BadInput):
    """The request's value is no picture that the handler can use. The client's fault, so its code is 400."""


class ModelNotLoadable(RuntimeError):
    """The model of the archive cannot be loaded; the message names the file and what would be right."""


class BadResponse(Exception):
    """The handler set a status, reason or header that is of the wrong type; only its own item fails."""


class Failure(NamedTuple):
    """A handler's exception as data: the kind above, the sentence for the client, the status."""

    kind: str
    message: str
    code: int


def describe_failure(error: BaseException) -> Failure:
    """Classify what a handler raised.

    BadInput is the client's fault: 400. Any other PredictionException keeps its message and code; running out of host
    or device memory is 507, recognised by type, and by the runtimes' own words where only those are left, also of a
    cause (`device_errors`); everything else is `Prediction failed`, with TorchServe's 503 unless the server's settings
    give it another status.
    """
    if isinstance(error, BadInput):
        return Failure(BAD_INPUT, str(error.message), 400)
    if isinstance(error, PredictionException):
        return Failure(PREDICTION, str(error.message), _as_status(error.error_code))
    if is_out_of_memory(error):
        return Failure(MEMORY, "Out of resources", 507)
    if isinstance(error, BadResponse):
        return Failure(BAD_HEADER, str(error), 503)
    return Failure(HANDLER, "Prediction failed", 503)


def _as_status(code: object) -> int:
    """The author's status as a number from 100 to 999; anything else is 500, the default of PredictionException."""
    if isinstance(code, int) and 100 <= code <= 999:
        return int(code)
    return 500


def add_note(error: BaseException, note: str) -> None:
    """As `error.add_note(note)`, which Python 3.10 lacks."""
    error.__dict__.setdefault("__notes__", []).append(note)
