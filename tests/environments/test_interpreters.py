"""Claims of `marserve.environments.interpreters`: models run under interpreters that are allowed."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from marserve.environments.interpreters import Interpreters
from marserve.errors import InterpreterRefused
from marserve.model_options import ModelOptions
from marserve.pool.interpreter import Interpreter, find_change
from marserve.settings.interpreters import AllowedInterpreter
from support.other_python import make_environment, write_program
from support.processes import living, until_blocking

OLD = AllowedInterpreter(Path("/opt/old/bin/python"), "torch-1")
NEW = AllowedInterpreter(Path("/opt/new/bin/python"))


def asks(*, path: str | None = None, name: str | None = None) -> ModelOptions:
    """The options of a model that asks for this interpreter."""
    return ModelOptions("m", "1.0", interpreter_path=path, interpreter_name=name)


def find(interpreters: Interpreters, options: ModelOptions) -> Interpreter | None:
    """The interpreter that a model asks for, looked at."""
    chosen = interpreters.choose(options)
    return None if chosen is None else interpreters.look_at(chosen, options)


def refusal(allowed: tuple[AllowedInterpreter, ...], options: ModelOptions) -> str:
    """Why the model's interpreter is refused."""
    with pytest.raises(InterpreterRefused) as error:
        find(Interpreters(allowed), options)
    assert error.value.cause == "interpreter_refused"
    return str(error.value)


def test_a_model_that_names_none_runs_under_the_servers() -> None:
    """Whatever is allowed; nothing is started."""
    assert find(Interpreters([OLD, NEW]), asks()) is None


def test_without_a_list_nothing_is_allowed() -> None:
    """The refusal has the line that would allow it."""
    assert refusal((), asks(name="torch-1")) == (
        "Model m cannot be loaded: it asks for the interpreter environment: torch-1, which is none of "
        "allowed_interpreters. To allow it, write allowed_interpreters=torch-1=/path/to/bin/python into "
        "config.properties."
    )
    assert refusal((), asks(path="/opt/x/bin/python")) == (
        "Model m cannot be loaded: it asks for the interpreter python: /opt/x/bin/python, which is none of "
        "allowed_interpreters. To allow it, write allowed_interpreters=/opt/x/bin/python into config.properties."
    )


def test_the_line_keeps_what_is_allowed_and_the_nearest_is_named() -> None:
    """A typing error is seen at once."""
    said = refusal((OLD, NEW), asks(name="torch1"))

    assert "none of allowed_interpreters (did you mean torch-1?)" in said
    assert (
        "allowed_interpreters=torch-1=/opt/old/bin/python,/opt/new/bin/python,torch1=/path/to/bin/python into" in said
    )
    assert "(did you mean /opt/new/bin/python?)" in refusal((NEW,), asks(path="/opt/new/bin/python3"))


def test_an_unnamed_one_is_not_found_by_its_path_as_a_name() -> None:
    """`environment` has names alone."""
    assert "environment: /opt/new/bin/python, which is none of" in refusal((NEW,), asks(name="/opt/new/bin/python"))


@pytest.mark.parametrize("path", ["python3.10", "bin/python", "3.1", "~/e/bin/python"])
def test_a_path_must_be_absolute(path: str) -> None:
    """What PATH, or a working directory, would find is not asked."""
    said = refusal((OLD,), asks(path=path))

    assert f"python: {path}, which is no absolute path." in said
    assert "allowed_interpreters (torch-1=/opt/old/bin/python)" in said


@pytest.mark.parametrize("path", ["/opt/\0/bin/python", "/opt/\ud800/bin/python", "/opt/\x1b[31m\n/python"])
def test_a_path_that_no_file_can_have_is_refused_like_others(path: str) -> None:
    """A configuration may hold any characters; those that cannot be shown stand in escapes."""
    said = refusal((OLD,), asks(path=path))

    assert "which is none of allowed_interpreters" in said
    assert said.isprintable()


def test_a_long_name_or_path_is_cut_in_the_sentence() -> None:
    """A configuration may have 256 KiB."""
    for options in (asks(path="/" + "a" * 100_000), asks(name="a" * 100_000), asks(path="a" * 100_000)):
        said = refusal((OLD,), options)

        assert "aaa..." in said
        assert len(said) < 2000


def test_path_and_name_together_are_refused() -> None:
    """Also where they mean the same."""
    assert "They say the same in two ways; keep one." in refusal(
        (OLD,), asks(name="torch-1", path="/opt/old/bin/python")
    )


def test_an_environment_is_not_the_interpreter_that_made_it(tmp_path: Path) -> None:
    """Its `bin/python` is a link to that one; allowing either does not allow the other."""
    python = make_environment(tmp_path / "e", "msgspec")
    base = str(python.resolve())

    assert f"python: {base}, which is none of" in refusal((AllowedInterpreter(python),), asks(path=base))
    assert f"python: {python}, which is none of" in refusal((AllowedInterpreter(Path(base)),), asks(path=str(python)))


def test_links_of_folders_are_followed(tmp_path: Path) -> None:
    """A path may lead to the allowed one over a linked folder, and over `..`; the operator's path is the one run."""
    python = make_environment(tmp_path / "e", "msgspec")
    (tmp_path / "current").symlink_to(tmp_path / "e")
    interpreters = Interpreters([AllowedInterpreter(python)], folder=tmp_path / "packages")

    for path in (tmp_path / "current" / "bin" / "python", tmp_path / "e" / "bin" / ".." / "bin" / "python"):
        found = find(interpreters, asks(path=str(path)))

        assert found is not None
        assert found.path == str(python)


def test_the_one_that_is_found_has_our_packages_alone(tmp_path: Path) -> None:
    """By links in a folder, which is made once."""
    python = make_environment(tmp_path / "e", "msgspec")
    interpreters = Interpreters([AllowedInterpreter(python, "old")], folder=tmp_path / "deep" / "packages")

    found, again = (find(interpreters, asks(name="old")) for _ in range(2))

    assert found is not None
    assert found == again
    assert (found.name, found.packages) == ("old", str(tmp_path / "deep" / "packages"))
    assert sys.version.startswith(found.version)
    assert sorted(path.name for path in (tmp_path / "deep" / "packages").iterdir()) == ["marserve", "marserve_handlers"]


def test_an_unfit_one_is_refused_for_its_model(tmp_path: Path) -> None:
    """With the sentence of the look at it."""
    python = make_environment(tmp_path / "e")

    said = refusal((AllowedInterpreter(python, "old"),), asks(name="old"))

    assert said.startswith(f"Model m cannot be loaded: its interpreter {python} cannot import msgspec (")
    assert said.endswith(f'Install it: {python} -m pip install "msgspec>=0.21"')


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found by /proc")
@pytest.mark.parametrize("start", ["", "setsid "])
def test_what_an_interpreter_leaves_behind_is_ended(tmp_path: Path, start: str) -> None:
    """A script around it may start a process that goes on, also outside of its group."""
    python = make_environment(tmp_path / "e", "msgspec")
    pid = tmp_path / "pid"
    text = f'{start}sleep 300 >/dev/null 2>&1 </dev/null & echo $! > {pid}\nexec {python} "$@"'
    script = write_program(tmp_path / "shim", text)

    assert find(Interpreters([AllowedInterpreter(script)], folder=tmp_path / "p"), asks(path=str(script))) is not None

    assert not living([int(pid.read_text())])


def test_the_interpreter_behind_a_script_is_watched_too(tmp_path: Path) -> None:
    """A script stays the same while what it starts is replaced."""
    python = make_environment(tmp_path / "e", "msgspec")
    script = write_program(tmp_path / "shim", f'exec {python} "$@"')
    found = find(Interpreters([AllowedInterpreter(script)], folder=tmp_path / "p"), asks(path=str(script)))
    assert found is not None
    assert find_change(found) == ""

    python.unlink()
    python.symlink_to("/bin/sh")

    assert f"{python} was replaced" in find_change(found)


def counting(path: Path, end: str) -> Path:
    """A script that notes each start in the file `starts` beside it, and ends so."""
    return write_program(path, f"echo x >> {path.parent}/starts\n{end}")


def test_calls_at_the_same_time_share_a_look(tmp_path: Path) -> None:
    """And a later one looks again."""
    python = make_environment(tmp_path / "e", "msgspec")
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script = counting(tmp_path / "shim", f'read go < {gate}\nexec {python} "$@"')
    interpreters = Interpreters([AllowedInterpreter(script)], folder=tmp_path / "p")

    with ThreadPoolExecutor(5) as threads:
        looks = [threads.submit(find, interpreters, asks(path=str(script))) for _ in range(5)]
        until_blocking(lambda: (tmp_path / "starts").exists(), "the start of the look")
        gate.write_text("go\n")
        found = {look.result() for look in looks}
    assert len(found) == 1
    assert (tmp_path / "starts").read_text() == "x\n"

    with ThreadPoolExecutor(1) as threads:
        again = threads.submit(find, interpreters, asks(path=str(script)))
        gate.write_text("go\n")
        assert {again.result()} == found
    assert (tmp_path / "starts").read_text() == "x\nx\n"


def test_one_that_hung_is_not_started_again_at_once(tmp_path: Path) -> None:
    """Each registration would hold a thread for all of the time, in which workers of other models could start."""
    script = counting(tmp_path / "shim", "sleep 100")
    allowed = [AllowedInterpreter(script, "slow")]
    interpreters = Interpreters(allowed, folder=tmp_path / "p", limit_s=0.5)

    for _ in range(3):
        with pytest.raises(InterpreterRefused, match=r"did not answer within 0\.5 s"):
            find(interpreters, asks(name="slow"))

    assert (tmp_path / "starts").read_text() == "x\n"


def test_one_that_was_refused_is_looked_at_again_at_once(tmp_path: Path) -> None:
    """The operator may have mended it."""
    script = counting(tmp_path / "shim", "exit 3")
    interpreters = Interpreters([AllowedInterpreter(script, "odd")], folder=tmp_path / "p")

    for _ in range(2):
        with pytest.raises(InterpreterRefused, match="ended with status 3"):
            find(interpreters, asks(name="odd"))

    assert (tmp_path / "starts").read_text() == "x\nx\n"
