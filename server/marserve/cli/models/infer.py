"""`marserve infer`: sends one file to a model and prints the answer."""

from __future__ import annotations

import base64
import json
import mimetypes
import sys
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from marserve.cli.options import Version
from marserve.cli.output import AsJson, Output, WrongArguments
from marserve.cli.remote import ConfigFile, Inference, InferenceAddress, asked_there, find_address, refused, shown_by


def infer(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="What to send; - reads standard input.")],
    version: Version = None,
    content_type: Annotated[
        str | None, typer.Option("--content-type", help="The body's type; guessed from the file's name if not given.")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", min=0.001, help="How long to wait, in s.")] = 120.0,
    inference: InferenceAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Send a file to a model and print its answer: JSON laid out, anything else as it came."""
    with Output(as_json) as output:
        body = _read(file)
        content_type = content_type or (None if file == "-" else mimetypes.guess_type(file)[0])
        address = find_address("inference", inference, config)
        with Inference(address) as server:
            answer = server.predict(model, version, body, content_type, timeout)
        if answer.is_error:
            raise refused(answer, _next_step(answer, model, address))
        if as_json:
            output.result(
                {
                    "status": answer.status_code,
                    "request_id": answer.headers.get("x-request-id"),
                    "seconds": round(answer.elapsed.total_seconds(), 6),
                    "answer": _plain(answer),
                }
            )
        else:
            _print_body(answer)


def _read(file: str) -> bytes:
    if file == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise WrongArguments(
            f"Cannot read {file}: {error.strerror}.", "Name a file, or - for standard input."
        ) from error


def _next_step(answer: httpx.Response, model: str, address: str) -> str | None:
    if answer.status_code == 404:
        return asked_there(address)
    if answer.status_code not in (500, 503, 507):
        return None
    cause, request_id = answer.headers.get("x-marserve-cause"), answer.headers.get("x-request-id")
    if cause in OF_THE_HANDLER:
        return f"{shown_by(request_id)} why."
    return f"`marserve models {model}` tells how its workers are, and why one ended; so does `marserve logs {model}`."


# Causes of errors that are in the model log, mostly with a traceback: the handler raised, and its worker lives.
OF_THE_HANDLER = ("handler", "out_of_memory")


def _plain(answer: httpx.Response) -> Any:
    """The body for JSON: itself if it is JSON, else text, else base64 in an object."""
    try:
        return answer.json()
    except ValueError:
        pass
    try:
        return answer.content.decode("utf-8")
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(answer.content).decode("ascii")}


def _print_body(answer: httpx.Response) -> None:
    try:
        text = json.dumps(answer.json(), indent=2, ensure_ascii=False)
    except ValueError:
        sys.stdout.buffer.write(answer.content)
        if sys.stdout.isatty() and not answer.content.endswith(b"\n"):
            sys.stdout.buffer.write(b"\n")
        sys.stdout.buffer.flush()
        return
    typer.echo(text)
