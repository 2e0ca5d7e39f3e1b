"""A large body: how much memory one request of 100 MB takes on its way to the handler.

Measured: one request whose body is 100 MB and whose answer is two bytes, of one client. While it is under way the
proportional set size (PSS, from `smaps_rollup`) of the server and all its processes is read again and again; the figure
is the highest reading less what they weighed before. A page that server and worker share counts once. Not counted is
what the client holds. The sum of the peaks that the kernel keeps for each process (`VmHWM`), which counts what is
shared twice, and at moments that need not be the same, stands beside it as the bound that no reading can miss.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from figures import Figure, Goal
from load_generator import CannotMeasure
from plan import Plan
from servers import Marserve, make_archive

BODY_BYTES = 100_000_000
MB = 1_000_000
TIMES_THE_BODY = 2.2


def measure(plan: Plan) -> list[Figure]:
    """The figures of a large body."""
    config = {"minWorkers": 1, "maxWorkers": 1}
    archive = make_archive(plan.folder / "large", "brief", "brief.py", config)
    extra_mb: list[float] = []
    peaks_mb: list[float] = []
    took_ms: list[float] = []
    body = b"x" * BODY_BYTES
    for number in range(plan.rounds):
        plan.say(f"large_body: round {number + 1} of {plan.rounds}")
        # A new server each round: what an earlier body left in its heaps would make the next one look small.
        settings = {"max_request_size": str(2 * BODY_BYTES)}
        with Marserve("marserve", archive, plan.new_folder("large"), settings=settings) as server:
            server.ask()
            pids = server.pids()
            before, before_peaks = _pss_bytes(pids), _peak_bytes(pids)
            readings: list[int] = []
            is_over = threading.Event()

            def read(
                pids: Sequence[int] = pids, readings: list[int] = readings, until: threading.Event = is_over
            ) -> None:
                while not until.is_set():
                    readings.append(_pss_bytes(pids))

            reader = threading.Thread(target=read)
            reader.start()
            try:
                began = time.monotonic()
                status, answer = server.ask(body, timeout_s=120.0)
                took_ms.append((time.monotonic() - began) * 1e3)
            finally:
                is_over.set()
                reader.join()
            if (status, answer) != (200, b"ok"):
                raise CannotMeasure(f"large_body: the request was answered {status}: {answer[:200]!r}")
            extra_mb.append((max(readings) - before) / MB)
            peaks_mb.append((_peak_bytes(pids) - before_peaks) / MB)
    one = [BODY_BYTES / MB] * plan.rounds
    return [
        Figure("body of 100 MB, memory of server and worker", "MB", extra_mb, "the body", one,
               goal=Goal("at most", TIMES_THE_BODY, "compared")),
        Figure("the same, sum of each process's own peak", "MB", peaks_mb, "the body", one),
        Figure("body of 100 MB, time to its answer", "ms", took_ms),
    ]  # fmt: skip


def _pss_bytes(pids: Sequence[int]) -> int:
    return sum(_kib(Path(f"/proc/{pid}/smaps_rollup"), "Pss:") for pid in pids) * 1024


def _peak_bytes(pids: Sequence[int]) -> int:
    return sum(_kib(Path(f"/proc/{pid}/status"), "VmHWM:") for pid in pids) * 1024


def _kib(file: Path, key: str) -> int:
    return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(key))
