"""Model versions for a person: rows of a table and lines of progress, made of describe's answers. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.table import Table

from marserve.cli.output import Step, table

Description = dict[str, Any]
"""One element of a describe answer."""


def label(version: Description) -> str:
    """Model and version as the commands write them: `digits/1.0`."""
    return f"{version['modelName']}/{version['modelVersion']}"


def ready_workers(version: Description) -> int:
    """How many workers have loaded the model."""
    return sum(worker["status"] == "READY" for worker in version["workers"])


def is_ready(version: Description) -> bool:
    """Whether all workers that the version must have are loaded."""
    return ready_workers(version) >= int(version["minWorkers"])


def has_failed(version: Description) -> bool:
    """Whether waiting is useless: the server gave the version up, or its workers died and none has loaded it.

    In the second case the server tries again for a while, but a model rarely loads at the second try.
    """
    return version.get("state") == "failed" or (ready_workers(version) == 0 and "lastDeath" in version)


def progress_of(version: Description) -> Step:
    """`digits/1.0: 1 of 2 workers ready`; while workers are missing, also the last death and what they wait for."""
    ready, wanted = ready_workers(version), int(version["minWorkers"])
    text = f"{label(version)}: {ready} of {wanted} workers ready"
    death = last_death(version)
    if death and not is_ready(version):
        text += f" (last worker died: {death})"
    waits_for = "" if is_ready(version) else next((each for each in map(_waits_for, version["workers"]) if each), "")
    if waits_for:
        text += f" (one waits: {waits_for})"
    return Step(text, min(ready, wanted), wanted, waits_for)


def _waits_for(worker: dict[str, Any]) -> str:
    return str(worker.get("waitsFor") or "")


def arrivals(described: Iterable[Description]) -> list[str]:
    """A line for each archive that is being fetched for these versions."""
    return [arriving_line(each) for version in described for each in version.get("arriving", ())]


def arriving_line(arriving: dict[str, Any]) -> str:
    """`http://host/m.mar is downloading: 12.5 of 50.0 MB`, without unknown parts."""
    words = f"{arriving['url']} is {arriving['state']}"
    if arriving["state"] == "downloading":
        size = arriving.get("size")
        words += f": {arriving.get('bytes', 0) / 1e6:.1f} {'' if size is None else f'of {size / 1e6:.1f} '}MB"
    return words


def last_death(version: Description) -> str:
    """Why a worker of the version last died, in one line; empty if none died."""
    death = version.get("lastDeath")
    if not death:
        return ""
    detail = str(death.get("detail") or "").strip().splitlines()
    remedy = ""
    if death["cause"] == "missing_module" and version.get("requirements", {}).get("status") == "not installed":
        remedy = " (what the archive requires is not installed, for install_py_dep_per_model is false)"
    return f"{death['cause']}: {detail[-1].strip()}{remedy}" if detail else f"{death['cause']}{remedy}"


def last_words(versions: Iterable[Description]) -> list[str]:
    """All that is known of each version's last death, with the traceback and the last printed lines."""
    lines: list[str] = []
    for version in versions:
        death = version.get("lastDeath")
        if not death:
            continue
        lines += ["", f"{label(version)}: last death at {death['at']}: {death['cause']}: {death['detail']}"]
        if death.get("traceback"):
            lines += [f"  {line}" for line in str(death["traceback"]).rstrip().splitlines()]
        if death.get("lastLines"):
            lines += ["  it said last:", *(f"    {line}" for line in death["lastLines"])]
    return lines


def versions_table(versions: Iterable[Description]) -> Table:
    """One row a version; a star marks the default version."""
    versions = list(versions)
    counts_memory = any("memory" in version for version in versions)
    has_figures = any("lastMinute" in version for version in versions)
    has_traffic = any("trafficShare" in version or "labels" in version for version in versions)
    rows = [
        (
            version["modelName"],
            f"{version['modelVersion']}{' *' if version.get('isDefault') else ''}",
            str(version.get("state", "ready" if is_ready(version) else "loading")),
            *([_traffic(version)] if has_traffic else []),
            _worker_counts(version),
            *([_memory(version)] if counts_memory else []),
            _batch(version),
            *(_last_minute(version) if has_figures else []),
            str(version["jobQueueStatus"]["pendingRequests"]),
            version["modelUrl"],
        )
        for version in versions
    ]
    memory = ["memory"] if counts_memory else []
    figures = ["req/s", "p95"] if has_figures else []
    traffic = ["traffic"] if has_traffic else []
    return table(
        ("model", "version", "state", *traffic, "workers", *memory, "batch", *figures, "queued", "archive"), rows
    )


def _traffic(version: Description) -> str:
    """The version's labels, and its share if its model has weights."""
    share = [f"{100 * version['trafficShare']:.4g} %"] if "trafficShare" in version else []
    return ", ".join([*share, *version.get("labels", [])])


def _batch(version: Description) -> str:
    """The most requests in a batch, and how many there were on average in the last minute: `8 (3.2)`."""
    mean = (version.get("lastMinute") or {}).get("meanBatch")
    return str(version["batchSize"]) if mean is None else f"{version['batchSize']} ({rounded(mean)})"


def _last_minute(version: Description) -> list[str]:
    """Requests a second, and the time that 95 % of the answers took at most, of the last minute."""
    figures = version.get("lastMinute")
    if not figures:
        return ["-", "-"]
    p95 = figures.get("p95Milliseconds")
    return [rounded(figures["requestsPerSecond"]), "-" if p95 is None else duration(p95)]


def rounded(number: float) -> str:
    """Three digits that say something: `0.343`, `41.3`, `12,346`."""
    return f"{number:.3g}" if number < 999.5 else f"{number:,.0f}"


def duration(milliseconds: float) -> str:
    """In milliseconds, from a second on in seconds."""
    is_long = milliseconds >= 999.5
    return f"{rounded(milliseconds / 1000)} s" if is_long else f"{rounded(milliseconds)} ms"


def _memory(version: Description) -> str:
    """The memory that it holds, or in brackets the memory that it would take: `412 MiB`, `(412 MiB)`."""
    memory = version.get("memory") or {}
    held, needed = int(memory.get("residentBytes", 0)), int(memory.get("neededBytes", 0))
    if held:
        return f"{held / (1 << 20):,.0f} MiB"
    return f"({needed / (1 << 20):,.0f} MiB)" if needed else "-"


def deaths(versions: Iterable[Description]) -> list[str]:
    """A line for each version that lost a worker; a cell is too short for it."""
    lines = [
        f"{label(version)}: a worker died {_time(version)}: {death}"
        for version in versions
        if (death := last_death(version))
    ]
    return ["", *lines] if lines else []


def remarks(versions: Iterable[Description]) -> list[str]:
    """A line for each of describe's warnings, such as a failed warm-up or a missing sample."""
    lines = [f"{label(version)}: {warning}" for version in versions for warning in version.get("warnings", ())]
    return ["", *lines] if lines else []


def failed_certificates(versions: Iterable[Description]) -> list[str]:
    """A line for each version whose batches were not answered as single requests."""
    lines = []
    for version in versions:
        batching = version.get("batching") or {}
        if batching.get("certificate") == "failed":
            lines.append(f"{label(version)}: batches of up to {batching['largestBatch']}: {batching.get('reason', '')}")
    return ["", *lines] if lines else []


def workers_table(versions: Iterable[Description]) -> Table:
    """One row a worker of these versions."""
    shown = list(versions)
    has_nodes = any(
        worker.get("node") or (worker.get("waitsFor") and not _waits_for_device(version, worker))
        for version in shown
        for worker in version["workers"]
    )
    rows = [
        (
            label(version),
            str(worker["id"]),
            _status(worker),
            *((str(worker.get("node") or worker.get("waitsFor") or "-"),) if has_nodes else ()),
            str(worker["pid"]) if worker.get("pid", -1) > 0 else "-",
            f"{worker['memoryUsage'] / 2**20:.0f} MiB" if worker["memoryUsage"] else "-",
            str(worker["gpuId"]) if worker.get("gpu") and "gpuId" in worker else "-",
            str(worker.get("restarts", 0)),
        )
        for version in shown
        for worker in version["workers"]
    ]
    nodes = ("node",) if has_nodes else ()
    return table(("version", "worker", "status", *nodes, "pid", "memory", "gpu", "restarts"), rows)


def waiting_workers(versions: Iterable[Description]) -> list[str]:
    """A line for each version with workers that wait for a lost device."""
    lines = []
    for version in versions:
        reasons = {str(worker["waitsFor"]) for worker in version["workers"] if _waits_for_device(version, worker)}
        lines += [f"{label(version)}: workers wait for a device: {reason}" for reason in sorted(reasons)]
    return ["", *lines] if lines else []


def _waits_for_device(version: Description, worker: Description) -> bool:
    """Whether it waits for a device of this machine, not on a cluster."""
    return bool(worker.get("waitsFor") and version.get("lostDevices"))


def worker_deaths(versions: Iterable[Description]) -> list[str]:
    """A line for each worker that has died and was started again."""
    lines = [
        f"{label(version)}, worker {worker['id']}: died {_time(worker)}: {death}{_next_start(worker)}"
        for version in versions
        for worker in version["workers"]
        if (death := last_death(worker))
    ]
    return ["", *lines] if lines else []


def _time(dead: Description) -> str:
    return str(dead["lastDeath"]["at"])


def _next_start(worker: Description) -> str:
    """When a waiting worker is started again; empty for other workers."""
    at = worker.get("nextStart")
    if not at:
        return ""
    return "; not started again before the model is scaled" if at == "when scaled" else f"; started again {at}"


def _status(worker: Description) -> str:
    """The status for a person: TorchServe has no word for a worker that waits or is given up."""
    if not worker.get("nextStart"):
        return "waiting" if worker.get("waitsFor") and worker["status"] == "LOADING" else str(worker["status"])
    return "given up" if worker["status"] == "UNLOADING" else "waiting"


def _worker_counts(version: Description) -> str:
    low, high = version["minWorkers"], version["maxWorkers"]
    return f"{ready_workers(version)} of {low}" + (f" to {high}" if high > low else "")
