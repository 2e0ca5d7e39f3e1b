"""Tells the client which version answered, where a model has more than one thing to choose from."""

from __future__ import annotations

from marserve.errors import MarserveError
from marserve.messages import Answer, Receiver


class NamedReceiver:
    """Gives a request's own receiver what comes, with `header` among the answer's headers.

    A handler's header of that name does not count.
    """

    __slots__ = ("_header", "_is_streaming", "receiver")

    def __init__(self, receiver: Receiver, header: tuple[str, str]) -> None:
        self.receiver = receiver
        self._header = header
        self._is_streaming = False

    def rename(self, header: tuple[str, str]) -> None:
        """Another version will answer: the request was handed over to it."""
        self._header = header

    def on_answer(self, answer: Answer) -> None:
        """The whole answer."""
        self.receiver.on_answer(self._named(answer))

    def on_piece(self, piece: Answer, last: bool) -> None:
        """One piece; only the first one's headers count."""
        if not self._is_streaming:
            self._is_streaming = True
            piece = self._named(piece)
        self.receiver.on_piece(piece, last)

    def on_error(self, error: MarserveError) -> None:
        """No answer, or no rest of it."""
        error.version_header = self._header
        self.receiver.on_error(error)

    def _named(self, answer: Answer) -> Answer:
        header, headers = self._header, answer.headers
        if headers:
            headers = [line for line in headers if line[0].lower() != header[0]]
        return Answer(answer.body, answer.status, answer.reason, [*headers, header])
