"""`marserve apply` asks before it unloads what no document named; a script has to say; adopting writes the file."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from marserve.cli.changes.unnamed import AdoptingFile, added_to, with_consent
from marserve.cli.output import CommandFailed, Interrupted, Output
from marserve.desired_state.document import read
from support.command_line import marserve
from support.fake_apis import FakeApis, fake_apis

UNNAMED = [{"model": "m", "version": "1.0"}]
STEPS = [{"step": "unload", "phase": "retire", "model": "m", "version": "1.0"}]
PLAN = {"isEmpty": False, "steps": STEPS, "kept": [], "unnamed": UNNAMED}
REFUSAL = {"code": 409, "type": "ConflictStatusException", "message": "No document has named m 1.0 so far."}
DONE: dict[str, Any] = {"applied": 2, "digest": "d" * 64, "steps": STEPS, "seconds": 0.1}
TEXT = """\
# what we serve
models:
  o:   # the good one
    versions: {"1.0": o.mar}

# the end
"""
ADOPTED = """\
models:
  m:
    versions: {"1.0": {url: m.mar, workers: 1}}
  o:
    versions: {"1.0": o.mar}
"""


@pytest.fixture
def server() -> Iterator[FakeApis]:
    """A server that will not unload m 1.0 unasked."""
    with fake_apis() as apis:
        apis.answer("POST /desired-state/plan", PLAN)
        apis.answer("PUT /desired-state", REFUSAL, 409)
        yield apis


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A document with comments."""
    path = tmp_path / "models.yaml"
    path.write_text(TEXT)
    return path


def test_a_script_gets_exit_status_1_and_both_answers(server: FakeApis, file: Path) -> None:
    """Nothing is sent that could unload anything."""
    ran = marserve("apply", file, "--management", server.url)

    assert ran.status == 1
    assert "would unload m 1.0, which came by calls and which no document names. Nothing was changed." in ran.err
    assert "Say --prune to unload them, or --adopt-existing to add them to it." in ran.err
    assert [asked.parameters for asked in server.orders("PUT")] == [{}]


@pytest.mark.parametrize(("flag", "sent"), [("--prune", {"prune": "true"}), ("--adopt-existing", {"adopt": "true"})])
def test_a_flag_is_the_answer(file: Path, flag: str, sent: dict[str, str]) -> None:
    """It is sent with the first call, and with a dry run."""
    with fake_apis() as apis:
        apis.answer("PUT /desired-state", DONE)
        apis.answer("POST /desired-state/plan", {**PLAN, "unnamed": [], "adopted": UNNAMED})

        ran = marserve("apply", file, flag, "--management", apis.url)
        dry = marserve("apply", file, flag, "--dry-run", "--management", apis.url)

        assert (ran.status, dry.status) == (0, 0)
        assert [asked.parameters for asked in apis.asked] == [sent, sent]
        assert "Added to the document, and unchanged: m 1.0." in dry.out


def test_both_flags_are_wrong_arguments(file: Path) -> None:
    """Status 2, and no server is asked."""
    ran = marserve("apply", file, "--prune", "--adopt-existing", "--management", "http://127.0.0.1:9")

    assert ran.status == 2
    assert "contradict each other" in ran.err


def test_a_dry_run_says_what_will_be_asked(server: FakeApis, file: Path) -> None:
    """And is no failure: it is how to find out."""
    ran = marserve("apply", file, "--dry-run", "--management", server.url)

    assert ran.status == 0
    assert "Calls brought m 1.0, and no document names them: `marserve apply` asks before it unloads" in ran.out


def test_a_file_that_was_edited_meanwhile_is_not_written_over(file: Path) -> None:
    """A person may have changed it while the question stood there: no server is asked to adopt anything then."""
    AdoptingFile(file, TEXT.encode())
    file.write_text(TEXT.replace("good", "best"))

    with pytest.raises(CommandFailed, match=r"models.yaml was changed meanwhile. Nothing was changed on the server."):
        AdoptingFile(file, TEXT.encode())


def test_undo_asks_too(file: Path) -> None:
    """It may unload what a call brought since."""
    with fake_apis() as apis:
        apis.answer("POST /desired-state/undo", REFUSAL, 409)
        apis.answer("POST /desired-state/undo", PLAN)

        ran = marserve("undo", "--management", apis.url)

        assert (ran.status, [asked.parameters for asked in apis.asked]) == (1, [{}, {"dry_run": "true"}])
        assert "Going back would unload m 1.0" in ran.err


def test_another_conflict_is_told_as_it_is(file: Path) -> None:
    """Somebody else's change, say: there is nothing to ask."""
    with fake_apis() as apis:
        apis.answer("PUT /desired-state", {**REFUSAL, "message": "Busy."}, 409)
        apis.answer("POST /desired-state/plan", {**PLAN, "unnamed": []})

        ran = marserve("apply", file, "--management", apis.url)

        assert (ran.status, "Busy." in ran.err) == (1, True)


class Person:
    """A terminal with a person: what is typed, and what was shown."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, typed: str) -> None:
        self.output = Output(False)
        self.shown = io.StringIO()
        self.output._notes = Console(file=self.shown, force_terminal=True, width=200, color_system=None)
        keyboard = io.StringIO(typed)
        keyboard.isatty = lambda: True  # type: ignore[method-assign]
        monkeypatch.setattr("sys.stdin", keyboard)
        self.sent: list[dict[str, str]] = []

    def apply(self, *plans: dict[str, Any]) -> Any:
        """Apply a document; each question to the server for its plan gets the next one."""
        waiting = list(plans)

        def send(parameters: Any) -> Any:
            self.sent.append(dict(parameters))
            if not parameters and waiting[:1] != [{}]:
                raise CommandFailed("No document has named m 1.0 so far.", code=409)
            return DONE

        return with_consent(send, lambda more: waiting.pop(0), self.output, {}, "models.yaml")


@pytest.mark.parametrize(("typed", "sent"), [("p\n", "prune"), ("x\nadopt\n", "adopt"), ("PRUNE\n", "prune")])
def test_a_person_sees_the_plan_and_answers(monkeypatch: pytest.MonkeyPatch, typed: str, sent: str) -> None:
    """A word or its beginning; anything else is asked again."""
    person = Person(monkeypatch, typed)

    assert person.apply(PLAN, PLAN) == DONE

    assert person.sent == [{}, {sent: "true"}]
    assert "unload  m      1.0" in person.shown.getvalue()
    assert "Unload them, or add them to the document? [prune/adopt/cancel] (cancel)" in person.shown.getvalue()


@pytest.mark.parametrize("typed", ["\n", "c\n", ""])
def test_no_answer_changes_nothing(monkeypatch: pytest.MonkeyPatch, typed: str) -> None:
    """Enter, the word, and the end of the input."""
    person = Person(monkeypatch, typed)

    with pytest.raises(CommandFailed, match=r"^Nothing was changed\.$"):
        person.apply(PLAN, PLAN)

    assert person.sent == [{}]


def test_a_plan_that_moved_under_the_question_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer was for what was shown, and not for what calls have brought since."""
    person = Person(monkeypatch, "prune\ncancel\n")
    more = {**PLAN, "unnamed": [*UNNAMED, {"model": "n", "version": "1.0"}]}

    with pytest.raises(CommandFailed):
        person.apply(PLAN, more)

    assert person.sent == [{}]
    assert "m 1.0, n 1.0, which came by calls" in person.shown.getvalue()


def test_ctrl_c_at_the_question_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what became of it."""
    person = Person(monkeypatch, "")

    def interrupted() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin.readline", interrupted)
    with pytest.raises(Interrupted, match="Nothing was changed") as raised:
        person.apply(PLAN)

    assert raised.value.status == 130


def test_adopting_writes_the_file_with_its_comments(file: Path) -> None:
    """The models go below its last one."""
    with fake_apis() as apis:
        apis.answer("PUT /desired-state", {**DONE, "adopted": UNNAMED, "document": ADOPTED})

        ran = marserve("apply", file, "--adopt-existing", "--management", apis.url)

    assert ran.status == 0, ran.err
    assert "models.yaml names m 1.0 now, too." in ran.err
    written = file.read_text()
    assert written.startswith(TEXT.partition("\n\n")[0])
    assert written.endswith("\n\n# the end\n")
    assert read(file.read_bytes()) == read(ADOPTED.encode())


@pytest.mark.parametrize(
    "text",
    [
        '{"models": {"o": {"versions": {"1.0": "o.mar"}}}}',
        "models: {o: {versions: {'1.0': o.mar}}}  # in one line\n",
        "models:\n  o:\n    versions: {'1.0': o.mar}\n  m:\n    versions: {'2.0': m2.mar}\n",
        "models: {}\n",
        "models:\n",
        "models:\n  o:\n    versions: {'1.0': o.mar}",
        "newVersions: []\nmodels:\n  o:\n    versions: {'1.0': o.mar}\nformat: 1\n",
    ],
)
def test_whatever_the_file_looks_like_it_says_what_was_adopted(text: str) -> None:
    """JSON stays JSON."""
    wanted = read(ADOPTED.encode())

    written = added_to(text.encode(), wanted)

    assert read(written) == wanted
    assert written.startswith(b"{") == text.startswith("{")
    assert written.startswith(b"newVersions") == text.startswith("newVersions")


def test_a_pipe_cannot_be_added_to() -> None:
    """That is said before anything is sent."""
    with pytest.raises(CommandFailed, match="is not a regular file"):
        AdoptingFile(Path("/dev/null"), b"")


def test_a_file_that_changed_meanwhile_is_left_and_its_new_text_shown(file: Path) -> None:
    """The server has the models; the sentence has the document."""
    with fake_apis() as apis:
        apis.answer("PUT /desired-state", {**DONE, "adopted": UNNAMED, "document": ADOPTED})
        take = apis.take

        def edit(asked: Any) -> Any:
            file.write_text("models: {}\n")
            return take(asked)

        apis.take = edit  # type: ignore[method-assign]
        ran = marserve("apply", file, "--adopt-existing", "--management", apis.url)

    assert ran.status == 1
    assert "url: m.mar" in ran.err
    assert file.read_text() == "models: {}\n"


@pytest.mark.parametrize("arguments", [("plan",), ("apply", "--dry-run")])
def test_a_plan_that_would_fail_has_status_1(arguments: tuple[str, ...], file: Path) -> None:
    """The archive is missing: applying it would end so, and a pipeline that plans first has to see it."""
    problem = "o 1.0: Model not found at: o.mar"
    with fake_apis() as apis:
        apis.answer("POST /desired-state/plan", {**PLAN, "unnamed": [], "problems": [problem]})
        command, *more = arguments

        ran = marserve(command, file, *more, "--management", apis.url)
        script = marserve(command, file, *more, "--json", "--management", apis.url)

    assert (ran.status, script.status) == (1, 1)
    assert f"Applying it would fail:\n  {problem}\n" in ran.out
    assert script.document["problems"] == [problem]
