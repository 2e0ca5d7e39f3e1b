"""Registers an archive and shows how its workers load. Used by every command that registers one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marserve.cli.output import Interrupted, Output
from marserve.cli.progress.downloads import AwaitedDownload
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
