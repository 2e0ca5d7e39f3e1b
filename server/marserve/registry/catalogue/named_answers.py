"""Names the version in the answer's headers, for models that have versions to choose from."""

from __future__ import annotations

from marserve.errors import MarserveError
from marserve.messages import Answer, Receiver


class NamedReceiver:
    """Passes answers on to a request's own receiver, with `header` among their headers.

    It replaces a header of that name by the handler.
    """

    __slots__ = ("_header", "_is_streaming", "receiver")

    def __init__(self, receiver: Receiver, header: tuple[str, str]) -> None:
        self.receiver = receiver
        self._header = header
        self._is_streaming = False

    def rename(self, header: tuple[str, str]) -> None:
        """Name another version, to which the request was handed over."""
        self._header = header

    def on_answer(self, answer: Answer) -> None:
        """Pass on the whole answer."""
        self.receiver.on_answer(self._named(answer))

    def on_piece(self, piece: Answer, last: bool) -> None:
        """Pass on a piece; only the first one's headers are sent."""
        if not self._is_streaming:
            self._is_streaming = True
            piece = self._named(piece)
        self.receiver.on_piece(piece, last)

    def on_error(self, error: MarserveError) -> None:
        """Pass on the error that ends the request or its stream."""
        error.version_header = self._header
        self.receiver.on_error(error)

    def _named(self, answer: Answer) -> Answer:
        header, headers = self._header, answer.headers
        if headers:
            headers = [line for line in headers if line[0].lower() != header[0]]
        return Answer(answer.body, answer.status, answer.reason, [*headers, header], answer.thrown)
