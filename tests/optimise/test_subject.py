"""Orders to the process of an archive, and which answer belongs to which. The process is a stand-in without torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from marserve.optimise import subject
from marserve.optimise.subject import Subject, SubjectFailed
from optimise.test_candidates_that_fail import HANDLER, stand_in
from support.server import make_archive

# Answers its first order when it has read the second one, which is late.
LATE = """
late, order = order, read()
answer(late, seconds=900.0, calls=1, of="the first")
answer(order, seconds=4.0, calls=2, of="the second")
order = read()
answer(order, of="the third")
"""


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """One that is taken in, and that the stand-in does not load."""
    return make_archive(tmp_path / "m.mar", HANDLER)


def test_an_answer_that_comes_too_late_is_not_that_of_the_next_order(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measurement that took too long is left out, and the next one goes on: its seconds are its own."""
    stand_in(LATE, tmp_path, monkeypatch)
    with Subject(archive) as process:
        process.loaded()
        monkeypatch.setattr(subject, "GRACE_S", 0.0)
        with pytest.raises(SubjectFailed, match=r"m 1\.0 did not answer within 0\.01 s\."):
            process.time(8, 0.01)
        monkeypatch.setattr(subject, "GRACE_S", 60.0)

        assert process.time(1, 0.01) == 2.0
        assert process.ask({"do": "flops"}, 1.0) == {"of": "the third"}


@pytest.mark.parametrize(
    "does",
    [
        "print('hello', flush=True); time.sleep(60)",
        "print('{}', flush=True); time.sleep(60)",
        'answer({"number": "1"}); time.sleep(60)',
        'answer({"number": 2}); time.sleep(60)',
    ],
)
def test_a_line_that_answers_no_order_is_no_answer(
    does: str, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The author's code found the pipe."""
    stand_in(does, tmp_path, monkeypatch)
    with Subject(archive) as process:
        process.loaded()
        with pytest.raises(SubjectFailed, match="its process wrote what is no answer"):
            process.facts()


def test_after_a_line_that_is_no_answer_the_next_order_gets_its_own(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to the first order is there as well by then."""
    stand_in("print('hello'); answer(order, of='the first'); answer(read(), of='the second')", tmp_path, monkeypatch)
    with Subject(archive) as process:
        process.loaded()
        with pytest.raises(SubjectFailed):
            process.ask({"do": "facts"}, 1.0)

        assert process.ask({"do": "facts"}, 1.0) == {"of": "the second"}


def test_what_fails_late_is_no_failure_of_the_next_order(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own failure is."""
    does = (
        "second = read(); answer(order, fault='late'); answer(second, seconds=1.0, calls=1); "
        "answer(read(), fault='own')"
    )
    stand_in(does, tmp_path, monkeypatch)
    with Subject(archive) as process:
        process.loaded()
        monkeypatch.setattr(subject, "GRACE_S", 0.0)
        with pytest.raises(SubjectFailed, match="did not answer"):
            process.time(8, 0.01)
        monkeypatch.setattr(subject, "GRACE_S", 60.0)

        assert process.time(1, 0.01) == 1.0
        with pytest.raises(SubjectFailed, match=r"m 1\.0: own\."):
            process.time(1, 0.01)


def test_threads_whose_change_was_not_confirmed_are_set_again(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a parent that took one thread too late would be measured with it beside builds with all of theirs."""
    does = (
        "answer(order, fault='out of memory'); order = read(); answer(order); "
        "answer(read(), seconds=1.0, calls=order['threads'])"
    )
    stand_in(does, tmp_path, monkeypatch)
    with Subject(archive, threads=4) as process:
        process.loaded()
        with pytest.raises(SubjectFailed, match="out of memory"):
            process.use_threads(1, 1.0)
        process.use_threads(4, 1.0)
        process.use_threads(4, 1.0)

        assert process.time(1, 0.01) == 0.25
