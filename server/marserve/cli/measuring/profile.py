"""`marserve profile`: how a worker of a model spends its time while it serves, as files and in a few lines."""

from __future__ import annotations

import re
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from marserve.answers.profiles import ModelProfile, ProfileState
from marserve.cli import Tidied
from marserve.cli.options import Version
from marserve.cli.output import FAILED_STATUS, AsJson, CommandFailed, Output, Step, WrongArguments, table
from marserve.cli.progress.wait_progress import while_showing
from marserve.cli.remote import ConfigFile, Management, find_address, model_path, refused
from marserve.errors import without_stop
from marserve.profiling.flame import draw
from marserve.profiling.report import PARTS, got_of, write_report

if TYPE_CHECKING:
    from rich.table import Table

# Beyond the time of the profile: its worker's batch, and the reading of its traces.
READS_WITHIN_S = 300.0
LISTED = 5


def profile(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests", metavar="N", min=1, help="End after so many requests, or a minute without --seconds."
        ),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", metavar="S", help="End after so long; 5 without --requests.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FOLDER", help="Where the files go, a new folder; profile-MODEL-TIME if not given."
        ),
    ] = None,
    operators: Annotated[bool, typer.Option(help="Record the operators of torch.")] = True,
    shapes: Annotated[bool, typer.Option(help="With the shapes of their inputs.")] = True,
    memory: Annotated[bool, typer.Option("--memory", help="With the memory that they allocate.")] = False,
    stacks: Annotated[bool, typer.Option("--stacks", help="With the Python that called them; much slower.")] = False,
    max_bytes: Annotated[
        int | None,
        typer.Option("--max-bytes", metavar="BYTES", help="Most memory of the worker that holds operators; 64 MiB."),
    ] = None,
    version: Version = None,
    management: Annotated[
        list[str] | None,
        typer.Option("--management", metavar="URL", help="The server's management address; several make one report."),
    ] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure how a worker spends its time while it serves: operators, Python, waiting, and the stacks of each."""
    with Output(as_json) as output:
        folder = _folder(out, model)
        asked: dict[str, str | int | float | bool] = {
            "operators": operators,
            "shapes": shapes,
            "memory": memory,
            "stacks": stacks,
        }
        given = {"requests": requests, "seconds": seconds, "max_bytes": max_bytes}
        asked |= {name: value for name, value in given.items() if value is not None}
        wish = {name: str(value).lower() for name, value in asked.items()}
        limit_s = READS_WITHIN_S + (seconds or 60)
        given_addresses: Sequence[str | None] = management or [None]
        addresses = [find_address("management", each, config) for each in given_addresses]
        if len(set(addresses)) < len(addresses):
            raise WrongArguments("An address is given twice.", "Name each server once with --management.")
        making = [_Making(address, model, version, wish, limit_s, len(addresses) > 1) for address in addresses]
        for each in making:
            each.start()

        def finish() -> None:
            for each in making:
                each.finish()

        title = f"Profiling {model}"
        while_showing(finish, lambda: [each.step(title) for each in making], output, title)
        made = [(each.address if len(making) > 1 else "", each.profile, each.trace) for each in making]
        files = _write(folder, made)
        output.result(
            {"folder": str(folder), "files": files, "profiles": [msgspec.to_builtins(each) for _, each, _ in made]},
            *(line for address, each, _ in made for line in _described(address, each)),
            f"{folder}/: {', '.join(files)}",
        )
        if not any(each.requests for _, each, _ in made):
            output.note(f"  `marserve bench {model} --inputs FOLDER`, run beside this command, sends requests.")
            raise typer.Exit(FAILED_STATUS)


class _Making:
    """One server's profile, made in a thread of its own: Ctrl-C ends the command, and with it the profile."""

    def __init__(
        self,
        address: str,
        model: str,
        version: str | None,
        wish: dict[str, str],
        limit_s: float,
        is_one_of_several: bool,
    ) -> None:
        self.address = address
        self._is_one_of_several = is_one_of_several
        self.profile = ModelProfile(ms=0, requests=0, batches=0, parts=[], recordedBatches=0, operators=[])
        self.trace = b""
        self._path = f"{model_path(model, version)}/profile"
        self._wish, self._limit_s = wish, limit_s
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def step(self, title: str) -> Step:
        """How far it is, as a line of progress. Raises CommandFailed where the server does not say."""
        name = f"{title} at {self.address}" if self._is_one_of_several else title
        if not self._thread.is_alive():
            return Step(f"{name}: done")
        with Management(self.address) as server:
            said = server.order("GET", self._path, {}, timeout_s=5.0)
        try:
            state = msgspec.convert(said, ProfileState)
        except msgspec.ValidationError:
            return Step(name)
        if state.readingSeconds is not None:
            measured = f"{name}: measured ({state.requests or 0} requests)"
            return Step(f"{measured}; a process of low priority reads what was recorded", waits_for="reading")
        if state.seconds is None:
            return Step(name)
        got, wanted = state.requests or 0, self._wish.get("requests")
        of = f"{got} of {wanted} requests" if wanted else f"{got} requests"
        text = f"{name}: {of}, {state.seconds:.0f} s"
        waits_for = "" if got else "requests"
        if not got:
            text += "; send the model requests, as many as it gets in service"
        return Step(text, got, int(wanted) if wanted else None, waits_for)

    def finish(self) -> None:
        """Wait for it. Raises CommandFailed as the server says, and whatever else ended it."""
        while self._thread.is_alive():
            self._thread.join(0.1)
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            with Management(self.address) as server:
                said = server.order("POST", self._path, self._wish, timeout_s=self._limit_s)
                try:
                    self.profile = msgspec.convert(said, ModelProfile)
                except msgspec.ValidationError as error:
                    raise CommandFailed(
                        f"The answer of {self.address} is no profile: {without_stop(str(error))}.",
                        "Is it a marserve of this version?",
                    ) from error
                if self.profile.hasTrace:
                    answer = server.ask("GET", f"{self._path}/trace", timeout_s=60.0)
                    if answer.status_code >= 400:
                        raise refused(answer)
                    self.trace = answer.content
        except Exception as failure:
            self._failure = failure


def _folder(out: Path | None, model: str) -> Path:
    """The folder for the files, which is not there yet. Raises WrongArguments if it cannot be made."""
    name = re.sub(r"[^\w.-]", "_", model)
    folder = out if out is not None else Path(f"profile-{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    if folder.exists():
        raise WrongArguments(f"{folder} is there already.", "Name a new folder with --out.")
    if not folder.absolute().parent.is_dir():
        raise WrongArguments(f"There is no folder {folder.absolute().parent}.", "Make it, or name another with --out.")
    return folder


def _write(folder: Path, made: Sequence[tuple[str, ModelProfile, bytes]]) -> list[str]:
    """Write the files into a new folder, which appears when it is whole; returns their names."""
    files: dict[str, bytes] = {"report.html": write_report([(each[0], each[1]) for each in made]).encode()}
    for number, (_, profile, trace) in enumerate(made, 1):
        mark = f"-{number}" if len(made) > 1 else ""
        if profile.operatorStacks:
            title = f"{profile.modelName} {profile.modelVersion}: operators, by the time they took"
            files[f"operators{mark}.svg"] = draw(profile.operatorStacks, title, "ms").encode()
        if profile.pythonStacks:
            title = f"{profile.modelName} {profile.modelVersion}: Python, by samples"
            files[f"python{mark}.svg"] = draw(profile.pythonStacks, title, "samples").encode()
        if trace:
            files[f"trace{mark}.json.gz"] = trace
        files[f"profile{mark}.json"] = msgspec.json.format(msgspec.json.encode(profile), indent=2)
    try:
        with Tidied(), tempfile.TemporaryDirectory(prefix=".profile-", dir=folder.absolute().parent) as staging:
            whole = Path(staging, "whole")
            whole.mkdir()
            for name, content in files.items():
                (whole / name).write_bytes(content)
            whole.rename(folder)
    except OSError as error:
        raise CommandFailed(
            f"The profile was made, but {folder} cannot be written: {error.strerror}.",
            "Name another folder with --out.",
        ) from error
    return list(files)


def _described(address: str, profile: ModelProfile) -> list[str | Table]:
    name = f"{profile.modelName} {profile.modelVersion}" + (f" at {address}" if address else "")
    lines: list[str | Table] = [f"{name}: {got_of(profile)}"]
    remarks = [f"note: {remark}" for remark in profile.remarks or ()]
    if not profile.requests:
        return [*lines, *remarks]
    lines.append(
        table(
            ["part", "ms", "share"],
            [[PARTS[each.name][0], f"{each.ms:.1f}", f"{each.share:.1%}"] for each in profile.parts],
        )
    )
    if profile.operators:
        rows = [
            [each.name, str(each.calls), f"{each.selfMs:.1f}", each.shapes[0].shapes if each.shapes else ""]
            for each in profile.operators[:LISTED]
        ]
        lines.append(table(["operator", "calls", "own ms", "most of it with shapes"], rows))
    if profile.noOperators:
        lines.append(f"No operators: {profile.noOperators}.")
    if profile.noPython:
        lines.append(f"No samples of Python: {profile.noPython}.")
    return [*lines, *remarks]
