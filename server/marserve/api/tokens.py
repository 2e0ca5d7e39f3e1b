"""The keys of `key_file.json`, and the check of a request's key (contract §2.9).

`Tokens` knows the keys, their lifetime and their file, and of HTTP only a header's value: every surface calls
`Tokens.check(kind, header_value)`. `api/rest/guard.py` knows which route needs which key. Keys are in the file and in
memory only: never in a message, a log line or an answer.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

from marserve.errors import ExpiredKey, InvalidToken, MissingKey, Unavailable, WrongKey
from marserve.files.atomic import replace_file

log = logging.getLogger("marserve.api")

Kind = Literal["inference", "management"]
# `unprotected`: a setting has opened routes that would need a key, so the rules for browsers apply.
Access = Literal["open", "unprotected", "inference", "management", "either"]

API_KEY: Final = "API"
KINDS: Final[tuple[Kind, ...]] = ("management", "inference")
KEY_BYTES: Final = 32
# The last instant whose year has four digits in ISO 8601: no key's end is later.
LAST_INSTANT: Final = datetime(9999, 12, 31, tzinfo=UTC).timestamp()


class CannotKeepTokens(Exception):
    """The key file cannot be written; the message says why and what to change, `why` the system's words alone."""

    def __init__(self, message: str, why: str) -> None:
        self.why = why
        super().__init__(message)


class KeyNotReplaced(Unavailable):
    """A key cannot be replaced now, because its file cannot be written (the disk may be full)."""

    cause = "key_not_replaced"

    def __init__(self, why: str) -> None:
        super().__init__(f"The key was not replaced, the old one stays in force: its file cannot be written ({why})")


@dataclass(frozen=True, slots=True)
class Token:
    """A key and its end, in seconds of the wall clock; None: it never ends."""

    key: bytes
    expires_at: float | None = None

    def is_expired(self, now: float) -> bool:
        """Whether its end has passed."""
        return self.expires_at is not None and now >= self.expires_at


class Tokens:
    """The three keys of a running server, new with every start, and the file from which clients read them.

    `lifetime_s` is how long the management and the inference key are good; the API key, which renews them, is good as
    long as the server runs. `clock` gives wall-clock time, as the file has the keys' ends. `takes_any_case`: the word
    before a key may be written `bearer`, as in RFC 9110 (TorchServe takes only `Bearer`). `tells_apart`: a refusal says
    whether the key was missing, wrong or expired.
    """

    def __init__(
        self,
        file: Path,
        lifetime_s: float,
        clock: Callable[[], float] = time.time,
        *,
        takes_any_case: bool = False,
        tells_apart: bool = False,
    ) -> None:
        self._takes_any_case = takes_any_case
        self._tells_apart = tells_apart
        self._file = file
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._tokens: dict[str, Token] = {kind: self._fresh() for kind in KINDS}
        self._tokens[API_KEY] = Token(_new_key())
        self._written: tuple[int, ...] | None = None

    def check(self, kind: Kind, header_value: str | bytes | None) -> None:
        """Check that a request has the key of this kind. `header_value` is that of `Authorization`.

        Raises InvalidToken otherwise, in the same time whatever was wrong.
        """
        if not self._holds(self._tokens[kind], header_value):
            raise self._refusal("Authorization", header_value, kind)

    def check_either(self, header_value: str | bytes | None) -> None:
        """Check that a request has the inference or the management key. Raises InvalidToken."""
        if not any(self._holds(self._tokens[kind], header_value) for kind in KINDS):
            raise self._refusal("Authorization", header_value, *KINDS)

    def has_expired(self, kind: Kind) -> bool:
        """Whether the key of this kind has ended; no request passes with it until it is renewed."""
        return self._tokens[kind].is_expired(self._clock())

    def key_of(self, kind: Kind) -> bytes:
        """The present key, to see whether it is still the same. Never to be shown."""
        return self._tokens[kind].key

    def renew(self, kind: str, header_value: str | bytes | None) -> str:
        """Replace a key for a client with the API key; returns the end of the new one, as ISO 8601.

        The file is written first: if that fails (CannotKeepTokens) the old key stays in force. Raises InvalidToken.
        """
        if not self._holds(self._tokens[API_KEY], header_value) or kind not in KINDS:
            raise self._refusal("Authentication", header_value, API_KEY)
        tokens = {**self._tokens, kind: self._fresh()}
        self._write(tokens)
        self._tokens = tokens
        return _instant(tokens[kind])

    def write(self) -> None:
        """Write the file, for its owner alone. Raises CannotKeepTokens."""
        self._write(self._tokens)

    def remove(self) -> None:
        """Remove the file, unless another server has replaced it."""
        with contextlib.suppress(OSError):
            if self._written == _identity(self._file.lstat()):
                self._file.unlink()

    def _fresh(self) -> Token:
        return Token(_new_key(), min(self._clock() + self._lifetime_s, LAST_INSTANT))

    def _holds(self, token: Token, header_value: str | bytes | None) -> bool:
        return self._is(token, header_value) and not token.is_expired(self._clock())

    def _is(self, token: Token, header_value: str | bytes | None) -> bool:
        scheme, key = _split(header_value)
        is_right = hmac.compare_digest(key, token.key)
        return is_right and (scheme == b"Bearer" or (self._takes_any_case and scheme.lower() == b"bearer"))

    def _refusal(self, what: str, header_value: str | bytes | None, *names: str) -> InvalidToken:
        """The error for a request that has none of the keys of these names."""
        if not self._tells_apart:
            return InvalidToken(what)
        which = f"the {' or the '.join(sorted(names))} key"
        if not _split(header_value)[1]:
            return MissingKey(which)
        for name in names:
            if self._is(self._tokens[name], header_value):
                return ExpiredKey(name)
        return WrongKey(which)

    def _write(self, tokens: dict[str, Token]) -> None:
        """Write the file so that it appears whole, and only its owner can ever read it."""
        document: dict[str, dict[str, str]] = {}
        for name, token in tokens.items():
            document[name] = {"key": token.key.decode()}
            if token.expires_at is not None:
                document[name]["expiration time"] = _instant(token)
        data = f"{json.dumps(document, indent=2)}\n".encode("ascii")
        try:
            self._written = _identity(replace_file(self._file, data, mode=0o600))
        except OSError as error:
            why = error.strerror or str(error)
            raise CannotKeepTokens(
                f"the key file {self._file} cannot be written ({why}): tokens are on, and clients find "
                "theirs there; name another place with token_file, or switch tokens off with "
                "disable_token_authorization=true",
                why,
            ) from error


def authorization_of(lines: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The value of the first `Authorization` among a request's headers."""
    for name, value in lines:
        if len(name) == 13 and name.lower() == b"authorization":
            return value
    return None


def _split(header_value: str | bytes | None) -> tuple[bytes, bytes]:
    """The word before a key, and the key; both empty without a header."""
    value = header_value.encode("utf-8", "replace") if isinstance(header_value, str) else header_value or b""
    scheme, _, key = value.partition(b" ")
    return scheme, key.strip(b" ")


def _new_key() -> bytes:
    return secrets.token_urlsafe(KEY_BYTES).encode()


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """Distinguishes a file from one that replaces it later, even under the same inode number."""
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _instant(token: Token) -> str:
    assert token.expires_at is not None
    text = datetime.fromtimestamp(token.expires_at, UTC).isoformat(timespec="microseconds")
    return text.replace("+00:00", "Z")
