"""Optimised: how many times as fast the build is that `marserve optimise` chooses, through the server.

    python benchmarks/run.py --only optimised [--rounds 9]

The networks of `handlers/optimised_nets.py`: ResNet-18, an encoder of four layers, an MLP, each trained shortly, as an
eager archive. Builds whose packages are missing are left out, and said. For each network:

    through the server   one request at a time to a server with the chosen build, and to one with the parent, in short
                         turns; one worker of one torch thread each
    in one process       the two models alone, one row at a time, in the same round
    the choice           beside an exhaustive measuring: every build that passed, or was only looked at since another
                         one is surely faster, is made anew, and timed in more turns
    the check            what a load spends on comparing samples with what was recorded, of the load of a new process
    a package            an archive of native code (`marserve export --to aoti`): from the server's start to the first
                         answer, beside the same with the parent, a plain worker of torch

The table of models by runtime, which the documentation has, is printed as well.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import zipfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from figures import Figure, Goal
from load_generator import CannotMeasure
from plan import Plan
from servers import BESIDE, HANDLERS, Marserve, Sample
from turns import in_turns

from marserve.archive.writing.writer import ArchiveSpec, write_archive
from marserve.errors import MarserveError
from marserve.optimise.candidates import split
from marserve.optimise.compare import measure_both
from marserve.optimise.comparison import Bounds
from marserve.optimise.export import export
from marserve.optimise.inputs import Input, find_inputs
from marserve.optimise.optimise import Report, Wish, optimise
from marserve.optimise.subject import Subject

# What is wanted through the server; None: only shown.
NETS: Mapping[str, tuple[str, str, float | None]] = {
    "resnet": ("ResNet-18", "ResNet", 4.0),
    "encoder": ("encoder", "Encoder", 3.5),
    "mlp": ("MLP", "Mlp", None),
}
BATCH = 8
OF_ONE_PROCESS, OF_EXHAUSTIVE, CHECK_SHARE = 0.8, 0.9, 0.1
CHOICE_S, PACKAGE_S = 300.0, 1.5
# 64 calibrate; 248 show more than 98 %, also where one of them differs. A quick run shows that it runs.
INPUTS, QUICK_INPUTS = 312, 40
PAIRS, QUICK_PAIRS = 27, 3
PIECES, PIECE_S, ALONE_S = 4, 1.0, 0.5
QUICK_NETS, QUICK_BUILDS = ("mlp",), ("onnx", "onnx-int8")


@dataclass(frozen=True, slots=True)
class Chosen:
    """A network, what the search said of it, and how long that took; `archive` has the build that won."""

    net: str
    parent: Path
    inputs: Sequence[Input]
    report: Report
    seconds: float

    @property
    def title(self) -> str:
        """As figures name it."""
        return f"{NETS[self.net][0]}, {self.report.winner}"


def measure(plan: Plan) -> list[Figure]:
    """The figures of each network, and of a package."""
    for package in ("torch", "onnxruntime", "onnxscript", "sklearn", "safetensors"):
        if find_spec(package) is None:
            raise CannotMeasure(f"optimised: {package} is not installed; install marserve's extras torch and optimise")
    figures: list[Figure] = []
    for net in QUICK_NETS if plan.is_quick else NETS:
        try:
            figures += _figures_of(plan, net)
        except MarserveError as error:
            raise CannotMeasure(f"optimised: {net}: {error.message}") from error
    return figures


def _figures_of(plan: Plan, net: str) -> list[Figure]:
    chosen = _choose(plan, net)
    plan.say(_table(chosen))
    if not chosen.report.winner:
        raise CannotMeasure(f"optimised: no build of {net} is equal and surely faster than its parent")
    figures = [*_through_the_server(plan, chosen), *_choice(plan, chosen), *_check(plan, chosen)]
    if net == "resnet" or plan.is_quick:
        figures += _package(plan, chosen)
    return figures


def _choose(plan: Plan, net: str) -> Chosen:
    folder = plan.new_folder(f"optimised-{net}")
    plan.say(f"optimised: making {net}")
    count = QUICK_INPUTS if plan.is_quick else INPUTS
    _run(HANDLERS / "optimised_nets.py", net, folder, count)
    (folder / "net.py").write_text(f"import optimised_nets\n\n\nclass Net(optimised_nets.{NETS[net][1]}):\n    pass\n")
    (folder / "model-config.yaml").write_text(f"minWorkers: 1\nmaxWorkers: 1\nbatchSize: {BATCH}\n")
    spec = ArchiveSpec(
        net,
        "1.0",
        str(HANDLERS / "array_scores.py"),
        serialized_file=folder / "weights.safetensors",
        model_file=folder / "net.py",
        extra_files=(str(HANDLERS / "optimised_nets.py"),),
        config_file=folder / "model-config.yaml",
    )
    parent = write_archive(spec, folder)
    inputs = find_inputs(folder / "inputs")
    names = QUICK_BUILDS if plan.is_quick else ()
    wish = Wish(bounds=Bounds(min_agreement=0.5 if plan.is_quick else 0.98), candidates=names, threads=1)
    (folder / "made").mkdir()
    began = time.monotonic()
    report = optimise(parent, inputs, wish, folder / "made", on_step=lambda step: plan.say(f"optimised: {net}: {step}"))
    return Chosen(net, parent, inputs, report, time.monotonic() - began)


def _table(chosen: Chosen) -> str:
    head = f"times as fast at 1 row, at {BATCH} rows, mean error, agreement shown, MB, seconds to build"
    lines = [f"{chosen.net}: {head}"]
    for row in chosen.report.rows:
        said = row.why_not or ("" if row.has_passed or row.verdict is None else row.verdict.faults[0])
        ratios = [str(row.ratios.get(size, "-")) for size in (1, BATCH)]
        errors = max((each.mean_error for each in row.worst.values()), default=0.0)
        shown = f"{row.agreement.shown:.3f}" if row.agreement is not None else "-"
        figures = [*ratios, f"{errors:.1e}", shown, f"{row.size / 1e6:.1f}", f"{row.seconds:.1f}"]
        lines.append("  ".join([f"{row.name:14}", *figures, said]))
    return "\n".join(lines)


def _through_the_server(plan: Plan, chosen: Chosen) -> list[Figure]:
    """The ratio of requests a second, beside that of the models alone in the same round."""
    title, _, least = NETS[chosen.net]
    body = chosen.inputs[0].path
    sample = Sample(body.read_bytes())
    build = _served(plan, chosen)
    rates: dict[str, list[float]] = defaultdict(list)
    alone = []
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                Marserve(name, archive, plan.new_folder(name), settings=_settings(chosen), sample=sample)
            )
            for name, archive in (("parent", chosen.parent), ("build", build))
        }
        _must_serve(servers["build"], chosen.report.winner)
        subjects = [stack.enter_context(Subject(archive, trusted=[archive.name])) for archive in (chosen.parent, build)]
        for subject in subjects:
            subject.loaded()
            subject.record(chosen.inputs[:2], _made(plan, "recorded"), 1, 60.0)
        for number in range(plan.rounds):
            plan.say(f"optimised: {title}, round {number + 1} of {plan.rounds}")
            seen = in_turns(
                list(servers),
                number,
                1 if plan.is_quick else PIECES,
                lambda name: plan.generator.run(
                    servers[name].port,
                    servers[name].path,
                    body_file=body,
                    connections=1,
                    seconds=PIECE_S,
                ).must_be_clean(name),
            )
            for name, loads in seen.items():
                rates[name].append(median(load.per_second for load in loads))
                servers[name].forget_output()
            seconds = in_turns([0, 1], number, PIECES, lambda at: subjects[at].time(1, ALONE_S))
            alone.append(median(seconds[0]) / median(seconds[1]))
    served = [build / parent for build, parent in zip(rates["build"], rates["parent"], strict=True)]
    return [
        Figure(f"{chosen.title}, through the server, one at a time", "/s", rates["build"], "the parent",
               rates["parent"], goal=None if least is None else Goal("at least", least, "compared"), digits=1),
        Figure(f"{chosen.title}, times as fast through the server", "x", served, "in one process", alone,
               goal=None if least is None else Goal("at least", OF_ONE_PROCESS, "compared"), digits=2),
    ]  # fmt: skip


def _must_serve(server: Marserve, build: str) -> None:
    """Raises CannotMeasure where the workers compute on something else: the parent would be measured twice."""
    described = server.describe()
    on = {worker.get("computesOn", "") for worker in described["workers"]}
    if on != {build}:
        why = "; ".join(map(str, described.get("warnings", []))) or "describe does not say why"
        raise CannotMeasure(f"optimised: the server computes on {', '.join(sorted(on))} and not on {build}: {why}")


def _served(plan: Plan, chosen: Chosen) -> Path:
    """The build's archive under the model's name, as the server's path has it."""
    assert chosen.report.archive is not None
    folder = _made(plan, f"{chosen.net}-build")
    return _copy(chosen.report.archive, folder / chosen.parent.name)


def _made(plan: Plan, name: str) -> Path:
    folder = plan.new_folder(name)
    folder.mkdir()
    return folder


def _copy(archive: Path, to: Path) -> Path:
    to.write_bytes(archive.read_bytes())
    return to


def _settings(chosen: Chosen) -> dict[str, str]:
    return {"worker_threads": "1", **({"trusted_models": chosen.report.trust} if chosen.report.trust else {})}


def _choice(plan: Plan, chosen: Chosen) -> list[Figure]:
    """What the chosen build brings, of the best there is by a longer measuring of all that passed."""
    calibrating = [chosen.inputs[at] for at in split(len(chosen.inputs))[0]]
    measured = {}
    for row in chosen.report.rows:
        if not row.has_passed and not row.ratios:
            continue
        plan.say(f"optimised: {chosen.net}, measuring all builds: {row.name}")
        with Subject(chosen.parent) as parent, Subject(chosen.parent) as other:
            for subject in (parent, other):
                subject.loaded()
            built = other.build(row.name, _made(plan, row.name), calibrating, BATCH, 600.0)
            if built.refused:
                raise CannotMeasure(f"optimised: {row.name} cannot be built a second time: {built.refused}")
            for subject in (parent, other):
                subject.record(chosen.inputs[:2], _made(plan, "recorded"), 1, 60.0)
            ratios, failed = measure_both(parent, other, [1], QUICK_PAIRS if plan.is_quick else PAIRS)
            if failed:
                raise CannotMeasure(f"optimised: {failed[0]}")
            measured[row.name] = ratios[1].middle
    plan.say(f"optimised: {chosen.net}, one row at a time, all measured at length: {measured}")
    return [
        Figure(f"{chosen.title}: the choice, times as fast", "x", [measured[chosen.report.winner]],
               "the best of an exhaustive measuring", [max(measured.values())],
               goal=Goal("at least", OF_EXHAUSTIVE, "compared"), digits=2),
        Figure(f"{chosen.title}: the choice takes", "s", [chosen.seconds], goal=Goal("at most", CHOICE_S, "own")),
    ]  # fmt: skip


def _check(plan: Plan, chosen: Chosen) -> list[Figure]:
    """The part of a load, in a new process, that is the check."""
    folder = _made(plan, f"{chosen.net}-unpacked")
    assert chosen.report.archive is not None
    with zipfile.ZipFile(chosen.report.archive) as file:
        file.extractall(folder)
    shares = []
    for _ in range(plan.rounds):
        seen = json.loads(_run(BESIDE / "load_build.py", folder))
        shares.append(100 * seen["check_s"] / seen["load_s"])
    return [
        Figure(f"{chosen.title}: the check at a load, of the load", "%", shares,
               goal=Goal("at most", 100 * CHECK_SHARE, "own"), digits=1),
    ]  # fmt: skip


def _package(plan: Plan, chosen: Chosen) -> list[Figure]:
    """From a start to the first answer of a package of native code, beside the parent's."""
    plan.say(f"optimised: {chosen.net} as a package of native code")
    made = export(chosen.parent, chosen.inputs[:8], "aoti", _made(plan, "packages"), threads=1)
    package = _copy(made.archive, _made(plan, "package") / chosen.parent.name)
    sample = Sample(chosen.inputs[0].path.read_bytes())
    seconds: dict[Path, list[float]] = defaultdict(list)
    for number in range(plan.rounds):
        plan.say(f"optimised: starts, round {number + 1} of {plan.rounds}")
        for archive in (chosen.parent, package) if number % 2 else (package, chosen.parent):
            settings = {"worker_threads": "1", "trusted_models": made.trust}
            with Marserve(archive.name, archive, plan.new_folder("start"), settings=settings, sample=sample) as server:
                seconds[archive].append(server.start_s)
    return [
        Figure(f"{NETS[chosen.net][0]} as a package: start to first answer", "s", seconds[package], "the parent",
               seconds[chosen.parent], "difference", Goal("at most", PACKAGE_S, "compared"), digits=2),
    ]  # fmt: skip


def _run(program: Path, *words: object) -> str:
    done = subprocess.run([sys.executable, str(program), *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotMeasure(f"optimised: {program.name} failed:\n{done.stderr.strip()}")
    return done.stdout
