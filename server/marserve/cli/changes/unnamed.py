"""Asks whether to unload or adopt versions that no document has named, when a document would unload them.

`--prune` and `--adopt-existing` are the two answers. A person is shown the plan and asked; a script must give one of
them. Adopting writes the document's file, and keeps its comments if possible.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from marserve.cli.changes.plan import named, plan_lines
from marserve.cli.output import CommandFailed, Interrupted, Output, WrongArguments
from marserve.desired_state.document import DesiredState, read
from marserve.desired_state.document_place import FilePlace, Found
from marserve.errors import BadDesiredState, BadSettings, MarserveError

Prune = Annotated[
    bool, typer.Option("--prune", help="Unload versions that came by calls and that the document does not name.")
]
AdoptExisting = Annotated[
    bool, typer.Option("--adopt-existing", help="Keep versions that came by calls: add them to the document.")
]
Plan = Callable[[Mapping[str, str]], dict[str, Any]]
"""Gets the plan from the server, with these parameters."""

CONFLICT = 409


def read_answer(prune: bool, adopt: bool) -> dict[str, str]:
    """The two flags as parameters of the call. Raises BadSettings for both at once."""
    if prune and adopt:
        raise BadSettings("--prune and --adopt-existing contradict each other; give one of them", source="--prune")
    return {"prune": "true"} if prune else {"adopt": "true"} if adopt else {}


def with_consent(
    send: Callable[[Mapping[str, str]], Any], plan: Plan, output: Output, answer: dict[str, str], what: str
) -> Any:
    """Send an order. If the server refuses to unload versions that no document names, ask and send it with the answer.

    `what` begins the sentence about the versions: the document's file, or `Going back`. Raises CommandFailed if no
    person can be asked.
    """
    try:
        return send(answer)
    except CommandFailed as failure:
        if failure.detail.get("code") != CONFLICT or answer:
            raise
        shown = plan({})
        if not shown.get("unnamed"):
            raise
    while True:
        unnamed = shown["unnamed"]
        said = f"{what} would unload {named(unnamed)}, which came by calls and which no document names."
        if not output.can_ask:
            raise CommandFailed(
                f"{said} Nothing was changed.", "Say --prune to unload them, or --adopt-existing to add them to it."
            )
        lines = [line for line in plan_lines({**shown, "unnamed": []}) if line]
        try:
            word = output.ask("Unload them, or add them to the document?", ANSWERS, "cancel", *lines, said)
        except KeyboardInterrupt:
            raise Interrupted("Nothing was changed.") from None
        if word == "cancel":
            raise CommandFailed("Nothing was changed.")
        again = plan({})
        if again.get("unnamed") == unnamed:
            return send({word: "true"})
        # Other calls have changed the plan while the question was open.
        shown = again
        if not shown.get("unnamed"):
            return send({})


ANSWERS = ("prune", "adopt", "cancel")


class AdoptingFile:
    """The document's file before versions are added to it."""

    def __init__(self, file: Path, data: bytes) -> None:
        """`data` is what was read of it. Raises CommandFailed if its content has changed since, and for a pipe."""
        if not file.is_file():
            raise WrongArguments(
                f"{file} is not a regular file, so what the server has cannot be added to it.",
                "Save the document in a file, and apply that.",
            )
        self._file = file
        self._place = FilePlace(file)
        try:
            self._found: Found = self._place.read()
        except MarserveError as error:
            raise CommandFailed(error.message) from error
        if self._found.data != data:
            raise CommandFailed(f"{file} was changed meanwhile. Nothing was changed on the server.", "Apply it again.")

    def write(self, document: str) -> None:
        """Write the applied document to the file. Raises CommandFailed, with the document."""
        try:
            self._place.write(added_to(self._found.data, read(document.encode())), self._found.tag)
        except MarserveError as error:
            raise CommandFailed(
                f"The document is applied, and {error.message.rstrip('.')}. This is what the file has to say:\n"
                + document.rstrip(),
                document=document,
            ) from error


def added_to(text: bytes, wanted: DesiredState) -> bytes:
    """The text of a document with what `wanted` has besides; its lines and comments are kept if possible.

    New models are added below the last one. If that does not give `wanted`, all is written anew, in canonical form.
    """
    if text.lstrip().startswith(b"{"):
        return (json.dumps(wanted.document(), indent=2, ensure_ascii=False) + "\n").encode()
    try:
        added = _with_models_below(text.decode(), wanted)
        if added is not None and read(added).digest == wanted.digest:
            return added
    except (UnicodeError, yaml.YAMLError, BadDesiredState):
        pass
    return wanted.write()


def _with_models_below(text: str, wanted: DesiredState) -> bytes | None:
    """The text with further models below the last one; None if its models are not written as a block."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        return None
    models = next((value for key, value in root.value if key.value == "models"), None)
    if not isinstance(models, yaml.MappingNode) or models.flow_style or not models.value:
        return None
    names = {key.value for key, _ in models.value}
    document = wanted.document()["models"]
    new = {name: document[name] for name in document if name not in names}
    if not new:
        return None
    lines = text.splitlines(keepends=True)
    at = models.end_mark.line if models.end_mark.column == 0 else len(lines)
    # Comments and blank lines after the last model belong to what follows them.
    while at and (not lines[at - 1].strip() or lines[at - 1].lstrip().startswith("#")):
        at -= 1
    if at and not lines[at - 1].endswith("\n"):
        lines[at - 1] += "\n"
    indent = " " * models.start_mark.column
    block = yaml.safe_dump(new, sort_keys=False, allow_unicode=True, width=120).splitlines(keepends=True)
    return "".join([*lines[:at], *(indent + line for line in block), *lines[at:]]).encode()
