"""Looking through log files: the newest lines, rolled files, and what is not there."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from marserve.telemetry.logs import search
from marserve.telemetry.logs.records import Wanted
from marserve.telemetry.logs.search import Found, search_bytes, search_files

NEVER = float("inf")


def line(second: int, text: str, request: str = "r") -> str:
    """A line of the model log."""
    return f"2026-01-31T12:00:{second:02},000 [INFO ] W-9000-m_1-stdout MODEL_LOG [{request}] - {text}"


def texts(found: Found) -> list[str]:
    """What stands behind the heads."""
    return [record.text.rpartition(" - ")[2] for record in found.records]


def pack(folder: Path, name: str, content: str, at: int) -> None:
    """A rolled file of that age."""
    path = folder / name
    path.write_bytes(gzip.compress(content.encode()))
    os.utime(path, (at, at))


def test_a_folder_without_logs_has_no_lines(tmp_path: Path) -> None:
    """Nor has one that is not there."""
    for folder in (tmp_path, tmp_path / "missing"):
        assert search_files(folder, Wanted(), 10, NEVER) == Found([], True)


def test_the_newest_lines_of_all_logs_are_in_order(tmp_path: Path) -> None:
    """By their time; at most as many as asked for."""
    (tmp_path / "model_log.log").write_text("".join(f"{line(second, f'm{second}')}\n" for second in range(0, 10, 2)))
    (tmp_path / "ts_log.log").write_text(
        "".join(f"2026-01-31T12:00:0{second},500 [INFO ] main x - s{second}\n" for second in (1, 7))
    )

    assert texts(search_files(tmp_path, Wanted(), 4, NEVER)) == ["m4", "m6", "s7", "m8"]
    assert len(texts(search_files(tmp_path, Wanted(), 100, NEVER))) == 7


def test_rolled_files_are_read_after_the_present_one(tmp_path: Path) -> None:
    """The newest first, and only as far as is needed. A damaged one is passed over."""
    (tmp_path / "model_log.log").write_text(line(50, "now") + "\n")
    pack(tmp_path, "model_log.30-Jan.log.gz", f"{line(10, 'old')}\n{line(11, 'old too')}\n", 100)
    pack(tmp_path, "model_log.30-Jan.2.log.gz", f"{line(20, 'newer')}\n", 200)
    (tmp_path / "model_log.31-Jan.log.gz").write_bytes(b"no gzip")

    assert texts(search_files(tmp_path, Wanted(), 3, NEVER)) == ["old too", "newer", "now"]
    assert texts(search_files(tmp_path, Wanted(request="r"), 100, NEVER)) == ["old", "old too", "newer", "now"]


def test_a_file_that_is_rolled_meanwhile_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The open file has all that the packed one gets."""
    path = tmp_path / "model_log.log"
    path.write_text(line(1, "once") + "\n")
    rolled = search._rolled

    def roll(current: Path) -> list[tuple[int, Path]]:
        if current == path and path.exists():
            (tmp_path / "model_log.31-Jan.log.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
        return rolled(current)

    monkeypatch.setattr(search, "_rolled", roll)

    assert texts(search_files(tmp_path, Wanted(), 10, NEVER)) == ["once"]


@pytest.mark.parametrize("block", [64, 100, 1000])
def test_records_are_whole_however_the_file_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Also those with tracebacks, in the present file and in rolled ones."""
    monkeypatch.setattr(search, "BLOCK_BYTES", block)
    content = "".join(
        f"2026-01-31T12:00:{second:02},000 [ERROR] main x [r{second}] - s{second}\n    Traceback\n    line\n"
        for second in range(30)
    )
    (tmp_path / "ts_log.log").write_text(content)
    pack(tmp_path, "ts_log.30-Jan.log.gz", content, 100)

    found = search_files(tmp_path, Wanted(), 100, NEVER)

    assert len(found.records) == 60
    assert all(record.lines == 3 for record in found.records)
    assert len(search_files(tmp_path, Wanted(request="r7"), 100, NEVER).records) == 2


def test_a_search_that_takes_too_long_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what was found by then, and how far it came."""
    monkeypatch.setattr(search, "BLOCK_BYTES", 200)
    (tmp_path / "model_log.log").write_text("".join(f"{line(second, f'm{second}')}\n" for second in range(20)))

    found = search_files(tmp_path, Wanted(logs=["model"]), 100, 5.0, clock=lambda: 6.0)

    assert not found.is_complete
    assert texts(found)[-1] == "m19"
    assert found.since == found.records[0].at > line(0, "")[:23]


def test_an_answer_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest lines are left out."""
    monkeypatch.setattr(search, "MAX_FOUND_BYTES", 300)
    (tmp_path / "model_log.log").write_text("".join(f"{line(second, 'x' * 50)}\n" for second in range(10)))

    found = search_files(tmp_path, Wanted(), 10, NEVER)

    assert (len(found.records), found.is_complete) == (2, False)


def test_what_standard_output_got_can_be_searched(tmp_path: Path) -> None:
    """Where no file has it; older lines may have been forgotten."""
    data = "".join(f"{line(second, f'm{second}')}\n" for second in range(5)).encode()

    assert texts(search_bytes(data, True, Wanted(), 2)) == ["m3", "m4"]
    assert search_bytes(data, True, Wanted(), 10).is_complete
    assert not search_bytes(data, False, Wanted(), 10).is_complete
    assert search_bytes(data, False, Wanted(request="q"), 10).since == line(0, "")[:23]


@pytest.mark.parametrize("is_rolled", [False, True])
def test_what_is_held_is_bounded_by_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_rolled: bool
) -> None:
    """The newest records that fit stay, however many are asked for, and the answer says that it is not complete."""
    monkeypatch.setattr(search, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(search, "MAX_FOUND_BYTES", 4096)
    content = "".join(f"{line(second, f'{second}' + 'x' * 500)}\n" for second in range(60))
    held: list[int] = []
    length = search._length
    monkeypatch.setattr(search, "_length", lambda records: held.append(length(records)) or held[-1])
    if is_rolled:
        pack(tmp_path, "model_log.30-Jan.log.gz", content, 100)
    else:
        (tmp_path / "model_log.log").write_text(content)

    found = search_files(tmp_path, Wanted(), 10_000, NEVER)

    assert not found.is_complete
    assert found.records[-1].text.endswith("59" + "x" * 500)
    assert max(held) < 4 * 4096
