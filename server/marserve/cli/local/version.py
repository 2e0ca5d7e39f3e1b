"""`marserve version`: the versions of this program and of the runtimes."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

import marserve
from marserve.cli.output import AsJson, Output, table

RUNTIMES = ("torch", "onnxruntime")


def version(as_json: AsJson = False) -> None:
    """Show the versions of marserve, Python and the runtimes that are installed."""
    with Output(as_json) as output:
        versions: dict[str, str | None] = {
            "marserve": marserve.__version__,
            "python": platform.python_version(),
            **{runtime: _installed(runtime) for runtime in RUNTIMES},
        }
        rows = [(name, found or "not installed") for name, found in versions.items()]
        output.result(versions, table(("", "version"), rows))


def _installed(distribution: str) -> str | None:
    """The version in its metadata; importing torch to ask would take seconds."""
    try:
        return installed_version(distribution)
    except PackageNotFoundError:
        return None
