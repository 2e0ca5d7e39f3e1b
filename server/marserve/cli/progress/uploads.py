"""Sends an archive of this machine to a server, with a bar. Decides which words name a file here."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import msgspec
from rich.filesize import decimal

from marserve.answers.management import UploadedArchive
from marserve.cli.output import CommandFailed, Interrupted, Output, Step, WrongArguments
from marserve.cli.progress.wait_progress import while_showing
from marserve.cli.remote import Management
from marserve.store.addresses.fetch_guard import is_address
from marserve.store.addresses.pinned_digest import split_digest

_PIECE_BYTES = 1 << 18
# A server without uploads: its path is not there, or its method is not.
_NO_UPLOADS = (404, 405)
_OTHER_CONTENT = 409
# The begin of the answer where a name leads to no archive; TorchServe's is the same.
_NOT_IN_STORE = "Model not found at: "
# Files that `marserve archive` makes an archive of.
_SOURCES = (".py", ".onnx", ".pt2")


def local_archive(url: str, is_meant: bool | None, roots: Sequence[Path] = ()) -> Path | None:
    """The file of this machine that `url` names, None for a name that the server is to resolve.

    `is_meant` is what `--upload` and `--no-upload` say. Without them, what has a slash and is no address names a file
    here; so an absolute path does only if there is a file, and not below one of the server's `roots`.

    Raises WrongArguments for what can only be meant to be a file here, and is not there.
    """
    plain = split_digest(url)[0]
    path = Path(plain)
    if is_meant is None:
        if "/" not in plain or is_address(plain):
            return None
        if path.is_absolute() and (not path.is_file() or any(path.is_relative_to(root) for root in roots)):
            return None
    elif not is_meant:
        return None
    if path.is_file():
        return path
    if path.is_dir():
        raise WrongArguments(
            f"{plain} is a folder, and what is sent to a server is one file.",
            "Make an archive of it with `marserve archive`, or put it below a folder of the server's model_roots.",
        )
    raise WrongArguments(
        f"There is no file {plain} here.",
        "What has a slash names a file of this machine; a name without one names an entry of the server's model store.",
    )


@contextmanager
def hinting_at_files(url: str, command: str) -> Iterator[None]:
    """Say with a refusal of `url` that a file of this name is in this folder, and how `command` sends it."""
    try:
        yield
    except CommandFailed as failure:
        plain = split_digest(url)[0]
        if not plain or is_address(plain) or not Path(plain).is_file():
            raise
        if plain.endswith(_SOURCES) and 400 <= int(failure.detail.get("code", 0)) < 500:
            failure.next_step = f"{plain} is no archive: `marserve archive {plain} --register` makes one and sends it."
        elif "/" not in plain and failure.message.startswith(_NOT_IN_STORE):
            failure.next_step = f"{plain} is in this folder: `{command} ./{plain}` sends it."
        raise


def send_archive(
    server: Management,
    output: Output,
    file: Path,
    *,
    replaces: bool = False,
    is_dry_run: bool = False,
    name: str | None = None,
    other_name: str = "--as NAME",
    replacing: str = "--replace",
) -> UploadedArchive | None:
    """Send a file into the server's model store as `name`, by default its own; None if the server takes no uploads.

    `other_name` and `replacing` are the command's options for a name that the store has with other content.
    Raises CommandFailed in the server's words, and Interrupted.
    """
    sending = _Sending(server, file, name or file.name, replaces=replaces, is_dry_run=is_dry_run)
    sending.advice = f"{other_name} gives it another name; {replacing} replaces that one, if no version uses it."
    try:
        return while_showing(sending.run, sending.steps, output, f"Sending {file.name}")
    except KeyboardInterrupt:
        raise Interrupted(f"The upload of {file.name} is broken off; the server keeps nothing of it.") from None


def send_named(
    server: Management,
    output: Output,
    url: str,
    file: Path | None,
    *,
    replaces: bool = False,
    is_dry_run: bool = False,
    name: str | None = None,
) -> tuple[str, UploadedArchive | None]:
    """By which word the server finds the archive `url`, and what was sent of it.

    `file` is what `local_archive` found: it is sent, as `name` if given; without one nothing is.
    Raises as `send_archive`, and WrongArguments for a `name` without a file.
    """
    if file is None:
        if name is not None:
            raise WrongArguments(f"--as names a file that is sent, and {url} is not: it is a name of the server's.")
        return url, None
    sent = send_archive(server, output, file, replaces=replaces, is_dry_run=is_dry_run, name=name)
    name = name or file.name
    if sent is None:
        output.note(f"This server takes no uploads, so {name} is looked for in its own model store.")
    pin = split_digest(url)[1]
    return name if pin is None else f"{name}#sha256={pin}", sent


class _Sending:
    advice = ""
    """What may help where the store has other content of this name."""

    def __init__(self, server: Management, file: Path, name: str, *, replaces: bool, is_dry_run: bool) -> None:
        self._server, self._file, self._name = server, file, name
        flags = {"replace": replaces, "dry_run": is_dry_run}
        self._query = {name: "true" for name, is_set in flags.items() if is_set}
        self._sent, self._size, self._what = 0, file.stat().st_size, "reading"

    def steps(self) -> list[Step]:
        """The line of progress."""
        done = f"{decimal(self._sent)} of {decimal(self._size)}"
        checked = ", checked by the server" if self._what == "sending" and self._sent == self._size else ""
        return [Step(f"{self._file.name}: {self._what} {done}{checked}", self._sent, self._size)]

    def run(self) -> UploadedArchive | None:
        """Compute the digest, and send: what the server has already is not sent again."""
        digest = hashlib.sha256()
        try:
            for piece in self._pieces():
                digest.update(piece)
            self._what = "sending"
            headers = {
                "content-length": str(self._size),
                "content-type": "application/octet-stream",
                "digest": f"sha-256={base64.b64encode(digest.digest()).decode()}",
            }
            path = f"/archives/{quote(self._name, safe='')}"
            answer = self._server.order(
                "PUT", path, self._query, timeout_s=None, content=self._pieces(), headers=headers
            )
        except OSError as error:
            raise CommandFailed(f"{self._file} cannot be read ({error.strerror or error}).") from error
        except CommandFailed as failure:
            if failure.detail.get("code") in _NO_UPLOADS:
                return None
            if failure.detail.get("code") == _OTHER_CONTENT and not self._query.get("replace"):
                # What follows in the server's sentence says the same in words of its API.
                failure.message = failure.message.partition(" Upload the file under another name")[0]
                failure.next_step = self.advice
            raise
        return msgspec.convert(answer, UploadedArchive)

    def _pieces(self) -> Iterator[bytes]:
        """The file's bytes, counted; as many as its length said."""
        self._sent = 0
        with self._file.open("rb") as file:
            while piece := file.read(min(_PIECE_BYTES, self._size - self._sent)):
                yield piece
                self._sent += len(piece)
