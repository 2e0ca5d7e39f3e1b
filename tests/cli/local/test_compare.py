"""`marserve compare` on real archives, each in a process of its own. `tests/optimise` has the planted bad builds."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from support.command_line import marserve
from support.processes import left_of
from support.server import make_archive, poll

DOUBLES = "def handle(data, context):\n    return [{'n': row['body'] * 2} for row in data or []]\n"
NEARLY = "def handle(data, context):\n    return [{'n': row['body'] * 2.0000001} for row in data or []]\n"
TRIPLES = "def handle(data, context):\n    return [{'n': row['body'] * 3} for row in data or []]\n"


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Three numbers."""
    folder = tmp_path / "inputs"
    folder.mkdir()
    for number in (1, 2, 3):
        (folder / f"{number}.json").write_text(str(number))
    return folder


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Neither a process nor a file, however the command ends."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert list(folder.iterdir()) == []
    assert not [child for child in psutil.Process().children(recursive=True) if "compared" in str(child.cmdline())]


def archives(folder: Path, *handlers: str) -> list[Path]:
    """One archive for each handler."""
    return [make_archive(folder / f"m{at}.mar", handler, name="m") for at, handler in enumerate(handlers)]


def test_answers_that_are_nearly_the_same_pass(tmp_path: Path, inputs: Path) -> None:
    """Exit 0, with what was compared and why no more was."""
    ran = marserve("compare", *archives(tmp_path, DOUBLES, NEARLY), "--inputs", inputs, "--pairs", 1)

    assert ran.status == 0, ran.out
    assert "m 1.0 beside m 1.0: 3 inputs, 3 answers compared, 0 differ by more than 0.001." in ran.out
    assert "only answers are compared: the handler holds no module of torch" in ran.out
    assert "one row at a time: " in ran.out
    assert ran.out.endswith("Within all bounds.\n")


def test_other_answers_are_beyond_the_bound_and_listed(tmp_path: Path, inputs: Path) -> None:
    """Exit 1; as JSON with each difference."""
    ran = marserve("compare", *archives(tmp_path, DOUBLES, TRIPLES), "--inputs", inputs, "--pairs", 0, "--json")

    assert ran.status == 1
    assert ran.document["passed"] is False
    assert ran.document["faults"] == ["3 of 3 answers differ (by more than 0.001)"]
    assert ran.document["answers"]["differing"][1] == {"input": 1, "path": "n", "seen": "6", "wanted": "4"}
    assert ran.document["ratios"] == []


def test_the_references_own_compare_decides_and_its_agreement_is_bounded(tmp_path: Path, inputs: Path) -> None:
    """Three inputs that agree show little."""
    judge = (
        f"{DOUBLES}\ndef compare(primary, shadow):\n    return abs(primary.value()['n'] - shadow.value()['n']) < 9\n"
    )
    both = archives(tmp_path, judge, TRIPLES)

    passed = marserve("compare", *both, "--inputs", inputs, "--pairs", 0)
    refused = marserve("compare", *both, "--inputs", inputs, "--pairs", 0, "--min-agreement", 0.9)

    assert passed.status == 0
    assert "3 of 3 agree by the handler's compare: 36.8 % is shown with 95 % certainty." in passed.out
    assert refused.status == 1
    assert "90 % takes 26 more inputs that agree" in refused.out


def test_an_input_that_only_one_answers_is_beyond_every_bound(tmp_path: Path, inputs: Path) -> None:
    """With what the other says."""
    fails = "def handle(data, context):\n    return [{'n': 2 * 6 // (3 - row['body'])} for row in data or []]\n"

    ran = marserve("compare", *archives(tmp_path, DOUBLES, fails), "--inputs", inputs, "--pairs", 0)

    assert ran.status == 1
    assert "beyond its bound: input 2 fails with" in ran.out
    assert "ZeroDivisionError" in ran.out


def test_that_nothing_was_answered_by_both_is_a_sentence(tmp_path: Path, inputs: Path) -> None:
    """And no count of answers that differ."""
    fails = "def handle(data, context):\n    return [1 // 0 for row in data or []]\n"

    ran = marserve("compare", *archives(tmp_path, DOUBLES, fails), "--inputs", inputs, "--pairs", 0)

    assert ran.status == 1
    assert "m 1.0 beside m 1.0: 3 inputs, none answered by both." in ran.out
    assert ran.out.count("beyond its bound: input 0 fails with") == 1
    assert "(and 2 more)" in ran.out  # one cause, one line


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        pytest.param("import os\nos._exit(7)\n", "its process ended with status 7", marks=pytest.mark.system),
        ("def handle(data, context):\n    if data: import os; os._exit(7)\n", "its process ended with status 7"),
        pytest.param(
            "raise ValueError('no weights')\n", "it does not load: ValueError('no weights')", marks=pytest.mark.system
        ),
        pytest.param(
            "from marserve_handlers.errors import ModelNotLoadable\nraise ModelNotLoadable('Two classes are in it.')\n",
            "it does not load: Two classes are in it.\n",
            marks=pytest.mark.system,
        ),
        ("print('a last word')\nimport sys\nsys.exit('stop')\n", "It printed:\na last word"),
    ],
)
def test_an_archive_that_ends_its_process_or_does_not_load_is_told_in_words(
    handler: str, words: str, tmp_path: Path, inputs: Path
) -> None:
    """Exit 1, whichever of the two it is."""
    for both in (archives(tmp_path, DOUBLES, handler), archives(tmp_path, handler, DOUBLES)):
        ran = marserve("compare", *both, "--inputs", inputs, "--pairs", 0)

        assert ran.status == 1
        assert words in ran.err


def test_what_is_not_there_is_said_before_anything_runs(tmp_path: Path, inputs: Path) -> None:
    """Exit 2."""
    (archive,) = archives(tmp_path, DOUBLES)
    empty = tmp_path / "empty"
    empty.mkdir()

    missing = marserve("compare", archive, tmp_path / "none.mar", "--inputs", inputs)
    nowhere = marserve("compare", archive, archive, "--inputs", tmp_path / "nowhere")
    nothing = marserve("compare", archive, archive, "--inputs", empty)

    assert [ran.status for ran in (missing, nowhere, nothing)] == [2, 2, 2]
    assert "There is no archive" in missing.err
    assert "cannot be read" in nowhere.err
    assert "holds no files" in nothing.err


def test_a_file_that_is_no_archive_and_an_unsafe_one_are_refused(tmp_path: Path, inputs: Path) -> None:
    """As a registration would be."""
    (good,) = archives(tmp_path, DOUBLES)
    bad = tmp_path / "bad.mar"
    bad.write_bytes(b"text")

    ran = marserve("compare", good, bad, "--inputs", inputs)

    assert ran.status == 1
    assert "bad.mar is no model archive" in ran.err


NET = """
import torch

class Handler:
    def initialize(self, context):
        torch.manual_seed(1)
        self.model = torch.nn.Linear(1, 3)

    def handle(self, data, context):
        with torch.inference_mode():
            return self.model(torch.tensor([[float(row["body"])] for row in data])).tolist()
"""


SCORES = 'self.model(torch.tensor([[float(row["body"])] for row in data])).tolist()'
NAMED = "[dict(zip({names!r}, each)) for each in " + SCORES + "]"
BEST = "[{{'best': {names!r}[each.index(max(each))]}} for each in " + SCORES + "]"
ERROR = "torch.nn.Linear(1, 3)\n        self.model.weight.data += 1e-3"


@pytest.mark.system
@pytest.mark.torch
def test_answers_that_differ_where_the_models_do_not_are_beyond_the_bound(tmp_path: Path, inputs: Path) -> None:
    """Labels in another order, in numbers; in texts, which the errors of a model that is a little off do not make."""
    pytest.importorskip("torch")
    words = ["--inputs", inputs, "--pairs", 0, "--json"]

    def run(right: str, other: str) -> list[str]:
        ran = marserve("compare", *archives(tmp_path, right, other), *words)
        assert ran.status == bool(ran.document["faults"])
        return list(ran.document["faults"])

    def net(answer: str, names: str = "abc", model: str = "torch.nn.Linear(1, 3)") -> str:
        given = NET.replace(SCORES, answer.format(names=names)).replace("torch.nn.Linear(1, 3)", model)
        assert given != NET
        return given

    permuted = run(net(NAMED), net(NAMED, "bca"))
    inexact = run(net(BEST), net(BEST, "bca", ERROR))

    assert permuted[0].startswith("3 of 3 answers differ where the models give the same: input 0 at a is ")
    assert permuted[0].endswith("; if they may, let the handler say so in compare(primary, shadow)")
    assert inexact[0].startswith("3 of 3 answers differ in more than numbers: input 0 at best is ")


@pytest.mark.system
@pytest.mark.torch
def test_a_wrong_name_for_scores_is_told_with_the_names_that_there_are(tmp_path: Path, inputs: Path) -> None:
    """Exit 2, for the words are wrong; `optimise` says the same."""
    pytest.importorskip("torch")
    words = ["--inputs", inputs, "--scores", "outputs"]

    ran = marserve("compare", *archives(tmp_path, NET, NET), *words, "--pairs", 0)

    assert ran.status == 2
    assert "there is no output outputs; there are output; did you mean output?" in ran.err
    assert "Name one of them with --scores." in ran.err


DAEMON = """
import os, subprocess
def handle(data, context):
    program = subprocess.Popen(['sleep', '600'], start_new_session=True, env={})
    return [{'n': program.pid} for row in data or []]
"""
FORKS_TWICE = DAEMON.replace(
    "program = subprocess.Popen(['sleep', '600'], start_new_session=True, env={})",
    "command = 'sleep 600 >&- 2>&- & echo $!'\n"
    "    bare = {'PATH': os.environ['PATH']}\n"
    "    program = subprocess.run(['setsid', 'sh', '-c', command], env=bare, capture_output=True)",
).replace("program.pid", "int(program.stdout)")
PRINTS = """
import os
def handle(data, context):
    print('x' * 8_000_000, flush=True)
    return [{'n': os.fstat(2).st_size} for row in data or []]
"""
WRITES_ANSWERS = """
import os
def handle(data, context):
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, b'rubbish\\n')
        except OSError:
            pass
    return [{'n': 1} for row in data or []]
"""


@pytest.mark.parametrize("source", [DAEMON, FORKS_TWICE], ids=["in a session of its own", "a daemon"])
@pytest.mark.skipif(sys.platform != "linux", reason="what has left its parent is found on Linux")
def test_what_a_handler_started_ends_with_the_command(source: str, tmp_path: Path, inputs: Path) -> None:
    """Also what left its session and its parent, and took no environment along."""
    ran = marserve("compare", *archives(tmp_path, DOUBLES, source), "--inputs", inputs, "--pairs", 0, "--json")

    assert ran.status == 1
    started = [int(each["seen"]) for each in ran.document["answers"]["differing"]]
    assert len(started) == 3
    assert [pid for pid in started if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"] == []


def test_gigabytes_that_a_handler_prints_take_no_disk(tmp_path: Path, inputs: Path) -> None:
    """Only the last lines are kept, for the message of a failure."""
    silent = "def handle(data, context):\n    return [{'n': 0} for row in data or []]\n"

    ran = marserve("compare", *archives(tmp_path, silent, PRINTS), "--inputs", inputs, "--pairs", 0)

    assert ran.status == 0, ran.out


def test_what_a_handler_writes_among_the_answers_is_told_in_a_sentence(tmp_path: Path, inputs: Path) -> None:
    """It may find the descriptor."""
    ran = marserve("compare", *archives(tmp_path, DOUBLES, WRITES_ANSWERS), "--inputs", inputs, "--pairs", 0)

    assert ran.status == 1
    assert "m 1.0: its process wrote what is no answer" in ran.err


KILLED = """
import os, signal, sys, tempfile
def handle(data, context):
    sys.stderr.write(f'in {tempfile.mkdtemp()} ')
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_temporary_files_of_a_process_that_is_killed_go_with_it(tmp_path: Path, inputs: Path) -> None:
    """As those of a build that runs out of memory."""
    ran = marserve("compare", *archives(tmp_path, DOUBLES, KILLED), "--inputs", inputs, "--pairs", 0)

    assert ran.status == 1
    made = Path(ran.err.partition("in /")[2].split()[0])
    assert "temporary" in made.parts  # the fixture looks that it is empty


HANGS = "import sys, time\nsys.stderr.write('hangs')\ntime.sleep(600)\n"


@pytest.mark.system
def test_a_command_that_is_ended_from_outside_leaves_nothing(tmp_path: Path, inputs: Path) -> None:
    """As by Ctrl-C: neither what was unpacked nor a process."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    both = archives(tmp_path, HANGS, HANGS)
    command = [sys.executable, "-m", "marserve.cli", "compare", *both, "--inputs", inputs]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(scratch)}) as process:
        below = []
        for _ in poll(60, "both are loading"):
            below = psutil.Process(process.pid).children(recursive=True)
            if len(below) == 2:
                break
        process.terminate()
        assert process.wait(30) == 143

    assert left_of(below, 10) == []
    assert list(scratch.iterdir()) == []
