"""Runs what a page tells to type, with bash, in a folder and with the programs of one environment."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

LIMIT_S = 300.0


def type_in(
    text: str, folder: Path, programs: Path, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run these lines until one fails. `programs` is the folder that goes first on the path.

    Variables of marserve's, TorchServe's and of an active environment are not passed on; `variables` are.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MARSERVE_", "TS_", "PYTHON")) and name not in ("VIRTUAL_ENV", "TEMP")
    }
    environment = {**inherited, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", **(variables or {})}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def addresses(inference: int, management: int, metrics: int, grpc: int, grpc_management: int) -> dict[str, str]:
    """Variables under which `marserve start`, and every other command, uses these ports."""
    return {
        "MARSERVE_INFERENCE_ADDRESS": f"http://127.0.0.1:{inference}",
        "MARSERVE_MANAGEMENT_ADDRESS": f"http://127.0.0.1:{management}",
        "MARSERVE_METRICS_ADDRESS": f"http://127.0.0.1:{metrics}",
        "MARSERVE_GRPC_INFERENCE_PORT": str(grpc),
        "MARSERVE_GRPC_MANAGEMENT_PORT": str(grpc_management),
    }
