"""Registers an archive and shows how its workers load. Used by every command that registers one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from marserve.answers.management import UploadedArchive
from marserve.cli.output import CommandFailed, Interrupted, Output
from marserve.cli.progress.downloads import AwaitedDownload
from marserve.cli.progress.uploads import send_archive
from marserve.cli.progress.wait_progress import while_showing
from marserve.cli.remote import Management
from marserve.cli.versions import Description, label, progress_of, ready_workers


def register_and_show(
    server: Management, output: Output, parameters: Mapping[str, str | int], download: AwaitedDownload | None = None
) -> dict[str, Any]:
    """Register by these parameters, and wait until it is loaded; returns `status` and what was `registered`.

    Raises CommandFailed in the server's words, and Interrupted.
    """
    url = parameters["url"]
    before = {label(version) for version in server.describe_all()}

    def appeared() -> list[Description]:
        return [version for version in server.describe_all() if label(version) not in before]

    try:
        answer = while_showing(
            lambda: server.order("POST", "/models", {**parameters, "synchronous": "true"}, timeout_s=None),
            lambda: (download.steps() if download else []) or [progress_of(version) for version in appeared()],
            output,
            f"Registering {url}",
        )
    except KeyboardInterrupt:
        if download is not None and download.cancel():
            raise Interrupted(f"The download of {url} is cancelled; nothing is registered.") from None
        raise Interrupted(
            f"The registration of {url} goes on in the server; `marserve models` shows how far it is."
        ) from None
    registered = [
        {
            "model": version["modelName"],
            "version": version["modelVersion"],
            "isDefault": version.get("isDefault"),
            "readyWorkers": ready_workers(version),
        }
        for version in appeared()
    ]
    return {"status": answer["status"], "registered": registered}


def send_made(server: Management, output: Output, path: Path, *, replaces: bool) -> UploadedArchive:
    """Send an archive that a command has made. Raises CommandFailed; the archive stays where it is."""
    here = path if path.parent != Path(".") else f"./{path}"
    sending = f"`marserve register {here} --as NAME`"
    sent = send_archive(server, output, path, replaces=replaces, other_name=sending, replacing="--force")
    if sent is None:
        raise CommandFailed(
            f"{path} is made, and the server at {server.address} takes no uploads.",
            "Copy it into the server's model store and register it there, or set allow_uploads in its settings.",
        )
    return sent


def send_and_register(
    server: Management, output: Output, path: Path, workers: int, *, replaces: bool
) -> dict[str, Any]:
    """Send an archive that a command has made, and register it; what is said of that. Raises as `send_made`."""
    sent = send_made(server, output, path, replaces=replaces)
    parameters: dict[str, str | int] = {"url": sent.archive, "initial_workers": workers}
    return {**register_and_show(server, output, parameters), "upload": msgspec.to_builtins(sent)}
