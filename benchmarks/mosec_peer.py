"""mosec beside marserve: its environment, made once a run in the run's own folder, and its server.

mosec is what people would pick for speed: a front in Rust, workers in Python. Its environment sees the packages of
this one (torch, Pillow) by way of a `.pth` file, so that both run the same work on the same libraries.
"""

from __future__ import annotations

import sys
from pathlib import Path

from peer_environment import CannotInstall, make_environment, run_step
from plan import Plan
from servers import BESIDE, Sample, Server, free_ports

VERSION = "0.9.8"
INSTALL_LIMIT_S = 300.0
PROGRAM = Path("bin", "python")
NAME = f"mosec {VERSION}"


def install_mosec(plan: Plan) -> Path | None:
    """The interpreter of mosec's environment; None, saying why, where it cannot be installed."""
    folder = plan.folder / "mosec-environment"
    if folder.exists():
        return folder / PROGRAM if (folder / "is-complete").exists() else None
    plan.say(f"installing {NAME} into an environment of its own")
    try:
        python = make_environment(folder, [f"mosec=={VERSION}"], INSTALL_LIMIT_S)
        purelib = run_step(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], INSTALL_LIMIT_S
        )
    except CannotInstall as error:
        plan.say(error.left_out(NAME))
        return None
    ours = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    Path(purelib, "packages_of_the_benchmarks.pth").write_text("".join(f"{path}\n" for path in ours))
    (folder / "is-complete").touch()
    return python


class Mosec(Server):
    """mosec with one worker around one of the workloads."""

    def __init__(
        self,
        python: Path,
        folder: Path,
        *,
        work: str = "echo",
        files: Path | None = None,
        batch: int,
        delay_ms: int,
        sample: Sample | None = None,
    ) -> None:
        folder.mkdir(parents=True)
        (port,) = free_ports(1)
        command = [str(python), str(BESIDE / "mosec_server.py"), "--address", "127.0.0.1", "--port", str(port)]
        command += ["--timeout", "60000", "--capacity", "4096", "--log-level", "warning", "--path", str(folder / "s")]
        environment = {
            "MEASURE_WORK": work,
            "MEASURE_FOLDER": str(files or folder),
            "MEASURE_BATCH": str(batch),
            "MEASURE_DELAY_MS": str(delay_ms),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
        super().__init__(NAME, command, port, "/inference", folder, environment=environment, sample=sample)
