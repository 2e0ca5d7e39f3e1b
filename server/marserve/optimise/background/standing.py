"""How far the search for a version is, as describe and the dashboard show it, and why the parent stays. Pure."""

from __future__ import annotations

from typing import Any, Final

from marserve.answers.management import BuildRatio, Optimising
from marserve.answers.optimising import OptimisingReport
from marserve.errors import without_stop
from marserve.registry.catalogue.describe import Facts
from marserve.registry.catalogue.versions import Version

MOST_REASON: Final = 600
_SHOWN_REFUSALS: Final = 3


def why_not(facts: Facts, *, share: float) -> str:
    """Why no build is looked for, though the key asks for one; empty where one is."""
    options = facts.options
    if share <= 0:
        return "optimise_share is 0: nothing is built beside what serves"
    if options.ray is not None or options.ranks or options.gpu_ids:
        return "builds are for workers of one process on this machine's processors"
    if options.program or options.interpreter is not None or options.python:
        return "its workers run under another interpreter than the server's"
    if options.sequences is not None or options.continuous_batching or options.is_concurrent:
        return "builds are for workers that are called batch by batch, and answer each batch at once"
    if options.on_crash == "fail":
        return "with onCrash: fail a build that crashes would end the server"
    return ""


def parent_stays(why: str) -> Optimising:
    """The parent serves, for this reason."""
    return Optimising("parent", why=without_stop(why.strip())[:MOST_REASON])


def serving(row: dict[str, Any], *, is_cached: bool) -> Optimising:
    """The build of this row of a report serves."""
    return Optimising(
        "serves",
        build=row["name"],
        ratios=[
            BuildRatio(each["rows"], each["threads"], each["middle"], each["low"], each["high"])
            for each in row["ratios"]
        ],
        meanError=max((each["meanError"] for each in row["outputs"] if each["meanError"] is not None), default=None),
        agreement=None if row["agreement"] is None else row["agreement"]["shown"],
        isCached=is_cached or None,
    )


def why_none(report: dict[str, Any]) -> str:
    """Why a search found no build that is better than its parent: what was equal, and what was refused."""
    rows = report["builds"]
    equal = [row["name"] for row in rows if row["passed"]]
    refused = [(row["name"], row["whyNot"] or "; ".join(row["faults"][:1])) for row in rows if not row["passed"]]
    words = [f"{', '.join(equal)} {'is' if len(equal) == 1 else 'are'} equal and not surely faster"] if equal else []
    words += [f"{name}: {without_stop(why)}" for name, why in refused[:_SHOWN_REFUSALS]]
    if len(refused) > _SHOWN_REFUSALS:
        words.append(f"{len(refused) - _SHOWN_REFUSALS} more are refused")
    return "no build is equal and surely faster" + (f": {'; '.join(words)}" if words else "")


def sentence_of(standing: Optimising) -> str:
    """What the log says of it."""
    if standing.state in ("waits", "builds"):
        return standing.step or "the search for a faster build waits for its turn"
    if standing.state in ("none", "parent"):
        return f"{'the parent serves' if standing.state == 'parent' else 'no build is looked for'}: {standing.why}"
    # Those that decided: with a worker's share of threads, which come first.
    measured = [each for each in standing.ratios or () if each.threads == (standing.ratios or [each])[0].threads]
    ratios = ", ".join(f"{each.ratio:.2f} times as fast at {each.rows}" for each in measured)
    error = "" if standing.meanError is None else f", mean error {standing.meanError:.2g}"
    agreement = "" if standing.agreement is None else f", {100 * standing.agreement:.1f} % agreement shown"
    return f"{standing.build} serves, {ratios or 'not measured'}{error}{agreement}"


def with_report(standing: Optimising, version: Version, report: dict[str, Any] | None) -> OptimisingReport:
    """The same with the report, and what each ready worker of the version serves, for the route."""
    more = {name: getattr(standing, name) for name in standing.__struct_fields__}
    ready = [worker.computes_on or "parent" for worker in version.pool.workers() if worker.status == "READY"]
    workers = {build: ready.count(build) for build in sorted(set(ready))}
    return OptimisingReport(
        **more, modelName=version.model, modelVersion=version.name, workers=workers or None, report=report
    )
