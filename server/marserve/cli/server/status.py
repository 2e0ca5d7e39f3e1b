"""`marserve status`: whether a server runs and is ready, and the state of its models."""

from __future__ import annotations

from typing import Any

import typer

from marserve.cli.output import AsJson, CommandFailed, Output, table
from marserve.cli.remote import (
    ConfigFile,
    Inference,
    InferenceAddress,
    Management,
    ManagementAddress,
    Probe,
    find_address,
)
from marserve.cli.server.pid_file import marserve_pid_file
from marserve.cli.versions import deaths, versions_table

NOT_READY = 503


def status(
    management: ManagementAddress = None,
    inference: InferenceAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Show how the server is. Ends with status 0 when it is ready, 1 when it is not or does not answer."""
    with Output(as_json) as output:
        if inference is not None and management is None:
            # The settings' management address may be another server's.
            with Inference(find_address("inference", inference, config)) as front:
                _show_readiness(output, front)
            return
        with Management(find_address("management", management, config)) as back:
            readiness = back.readiness()
            versions = _describe_all(back, readiness)
        front_address = None
        if inference is not None or management is None:
            front_address = find_address("inference", inference, config)
        pid = marserve_pid_file(back.address).running_pid()
        facts = [
            ("state", "ready" if readiness.is_well else "not ready"),
            *(("because", reason) for reason in readiness.reasons),
            *([("inference", front_address)] if front_address else []),
            ("management", back.address),
            ("process", str(pid) if pid else "not started by `marserve start` here"),
        ]
        document = {
            "ready": readiness.is_well,
            "reasons": readiness.reasons,
            "inference": front_address,
            "management": back.address,
            "pid": pid,
            "models": versions,
        }
        output.result(
            document,
            table(("server", ""), facts),
            "",
            versions_table(versions) if versions else "No model is registered.",
            *deaths(versions),
        )
        if not readiness.is_well:
            raise typer.Exit(1)


def _describe_all(back: Management, readiness: Probe) -> list[dict[str, Any]]:
    """Every version; empty while a server answers only probes (`app/early_probes.py`)."""
    try:
        return back.describe_all()
    except CommandFailed as failure:
        if readiness.is_well or failure.detail.get("code") != NOT_READY:
            raise
        return []


def _show_readiness(output: Output, front: Inference) -> None:
    """Show the status by the inference address alone, without models."""
    readiness = front.readiness()
    facts = [
        ("state", "ready" if readiness.is_well else "not ready"),
        *(("because", reason) for reason in readiness.reasons),
        ("inference", front.address),
    ]
    document = {"ready": readiness.is_well, "reasons": readiness.reasons, "inference": front.address}
    output.result(document, table(("server", ""), facts), "", "Its models are shown at --management URL.")
    if not readiness.is_well:
        raise typer.Exit(1)
