"""`marserve debug`: one request to an archive's model, in one process on this terminal."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from marserve.cli import Tidied
from marserve.cli.local.compared_words import check_archive
from marserve.cli.options import Trust
from marserve.cli.output import FAILED_STATUS, AsJson, CommandFailed, Output, WrongArguments
from marserve.errors import MarserveError
from marserve.lineage import VARIABLE, end_families

# Longer answers are shown to a person by their beginning.
_MOST_SHOWN = 10_000


def debug(
    archive: Annotated[Path, typer.Argument(help="The archive.")],
    file: Annotated[Path, typer.Argument(help="The request's body.")],
    content_type: Annotated[
        str | None, typer.Option("--content-type", help="The body's type, where the file's ending does not say it.")
    ] = None,
    threads: Annotated[int, typer.Option(min=0, max=1024, help="Threads of the model; 0 for all cores.")] = 0,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Answer one request in one process on this terminal: breakpoint() works, tracebacks are whole."""
    with Output(as_json) as output, Tidied():
        archive = check_archive(archive)
        if not file.is_file():
            raise WrongArguments(f"There is no file {file}.", "Name a file with the request's body.")
        # Here, for the time of other commands: numpy.
        import msgspec

        # Here, as above.
        from marserve.optimise.inputs import content_type_of
        from marserve.optimise.subject import take_in

        with tempfile.TemporaryDirectory(prefix="marserve-debug-") as scratch:
            folder = Path(scratch)
            try:
                plan = take_in(archive, folder, threads, [archive.name] if trust else [])
            except MarserveError as error:
                raise CommandFailed(error.message) from error
            name = f"{plan.load.model} {plan.load.version}"
            if plan.facts.options.program:
                raise CommandFailed(f"{name} is run by {plan.facts.options.program[0]}, and debug runs Python alone.")
            # One call that waits for its end, whatever the archive asks for.
            load = msgspec.structs.replace(plan.load, is_concurrent=False, is_continuous=False)
            (folder / "load").write_bytes(msgspec.msgpack.encode(load))
            kind = content_type_of(file) if content_type is None else content_type
            status = _run(folder, file, kind, prints_aside=as_json)
            result, answer = _read(folder, name, status)
        if "fault" in result:
            raise CommandFailed(f"{name}: {result['fault']}.")
        document = {"modelName": plan.load.model, "modelVersion": plan.load.version, **result}
        document["answer"] = answer.decode("utf-8", "replace")
        output.result(document, *_lines(result, answer))
        if result["message"]:
            raise typer.Exit(FAILED_STATUS)


def _run(folder: Path, file: Path, content_type: str, *, prints_aside: bool) -> int:
    """Run it on this terminal, in this process group, so that Control-C is its own; its status.

    What it started ends with it, also a daemon, which would keep the terminal and the folder.
    """
    program = "marserve.worker.without_server.debugged"
    body = str(file.absolute())
    words = [str(folder / "load"), body, content_type, str(folder), str(os.getpid())]
    lineage = secrets.token_hex(8)
    try:
        with _interrupts_left_to_it():
            return subprocess.call(
                [sys.executable, "-P", "-m", program, *words],
                stdout=2 if prints_aside else None,
                env={**os.environ, VARIABLE: lineage},
            )
    finally:
        end_families({lineage: 0})


@contextlib.contextmanager
def _interrupts_left_to_it() -> Iterator[None]:
    """What is typed to end or to stop the call reaches both; this process waits for the other to say how it ends."""
    former = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def _read(folder: Path, name: str, status: int) -> tuple[dict[str, Any], bytes]:
    """What was left. Raises CommandFailed where the process ended before it had an answer."""
    try:
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return result, (folder / "answer").read_bytes()
    except (OSError, ValueError):
        how = f"signal {-status}" if status < 0 else f"status {status}"
        raise CommandFailed(f"{name}: its process ended with {how}, before there was an answer.") from None


def _lines(result: dict[str, Any], answer: bytes) -> list[str]:
    kind = next((value for name, value in result["headers"].items() if name.lower() == "content-type"), "")
    size = f"{len(answer)} bytes" + (f" in {result['pieces']} pieces" if result["pieces"] > 1 else "")
    lines = [", ".join(word for word in (str(result["status"]), kind, size) if word)]
    if result["message"]:
        lines.append(result["message"])
    elif b"\0" in answer[:_MOST_SHOWN]:
        lines.append("(no text; --json has it)")
    else:
        text = answer[:_MOST_SHOWN].decode("utf-8", "replace")
        lines.append(text + ("…" if len(answer) > _MOST_SHOWN else ""))
    times = [("loaded in", result["loadSeconds"]), ("body read", result["readSeconds"])]
    times += [("handler", result["handlerSeconds"])]
    times += [(f"  {span['name']}", span["seconds"]) for span in result["spans"]]
    times += [("answer written", result["writeSeconds"])]
    held = [("waited for a processor", result["waitedSeconds"]), ("garbage collections", result["collectedSeconds"])]
    times += [each for each in held if each[1] >= 1e-4]
    width = max(len(name) for name, _ in times) + 2
    lines += [f"{name:<{width}} {_shown(seconds)}" for name, seconds in times]
    lines += [f"warning: {warning}" for warning in result["warnings"]]
    return lines


def _shown(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
