"""Downloads from a source that answers by a script: what is asked for, what counts as broken, and what is told."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from marserve.settings.table import Settings
from marserve.store.fetching import download as module
from marserve.store.fetching.download import Attempts, Downloaded, DownloadOptions, Pace, await_object, download
from marserve.store.sources.source import Broken, Cancel, Entry, Failed, Missing, Replaced, SourceError

DATA = bytes(range(256)) * 40
ENTRY = Entry("m.mar", len(DATA), '"1"', 5.0)
QUICK = DownloadOptions(connections=1, attempts=3, first_pause_s=0.001, first_part_bytes=1 << 20)


@dataclass
class Answer:
    """One answer: the bytes from where it begins, up to `end`, then an error."""

    entry: Entry = ENTRY
    begin: int | None = None  # None: where it was asked for
    end: int | None = None
    error: Exception | None = None
    chunk: int = 1000
    refuses: SourceError | None = None
    asked: tuple[int, int | None, Entry | None] = (0, None, None)

    def __iter__(self) -> Iterator[bytes]:
        assert self.begin is not None
        for at in range(self.begin, len(DATA) if self.end is None else self.end, self.chunk):
            yield DATA[at : min(at + self.chunk, len(DATA) if self.end is None else self.end)]
        if self.error is not None:
            raise self.error


@dataclass
class Scripted:
    """A source that gives these answers, one after the other; the last one again and again."""

    answers: list[Answer]
    asked: list[tuple[int, int | None, Entry | None]] = field(default_factory=list)
    open_readings: int = 0
    most_open: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_closed: bool = False
    threads: list[threading.Thread] = field(default_factory=list)
    """Those that asked, but for the caller's."""
    shown: str = "http://shown/m.mar"
    identity: str = "m.mar"
    file_name: str = "m.mar"

    @contextlib.contextmanager
    def read(self, begin: int, end: int | None, of: Entry | None = None) -> Iterator[Answer]:
        """See `Source.read`."""
        self.asked.append((begin, end, of))
        if threading.current_thread().name == "download":
            self.threads.append(threading.current_thread())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer.refuses is not None:
            raise answer.refuses
        with self.lock:
            self.open_readings += 1
            self.most_open = max(self.most_open, self.open_readings)
        try:
            yield replace(answer, begin=begin if answer.begin is None else answer.begin)
        finally:
            with self.lock:
                self.open_readings -= 1

    def stat(self) -> Entry:
        """See `Source.stat`."""
        return ENTRY

    def close(self) -> None:
        """See `Source.close`."""
        self.is_closed = True


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """An empty file."""
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def whole(found: Downloaded, file: int, entry: Entry = ENTRY) -> bool:
    """Whether all of it is in the file, and said to be."""
    data = os.pread(file, 1 << 20, 0)
    return (data, found.entry, found.sha256) == (DATA, entry, hashlib.sha256(DATA).hexdigest())


def test_a_small_object_is_asked_for_once(file: int) -> None:
    """Its first part is all of it; nothing stays open, and nothing is closed."""
    source = Scripted([Answer()])
    told: list[tuple[int, int | None]] = []

    found = download(source, file, QUICK, on_progress=lambda have, size: told.append((have, size)))

    assert whole(found, file)
    assert source.asked == [(0, 1 << 20, None)]
    assert (source.open_readings, source.is_closed) == (0, False)
    assert told[0] == (0, None)
    assert told[1:] == [(min(at, len(DATA)), len(DATA)) for at in range(1000, len(DATA) + 1000, 1000)]


def test_what_broke_goes_on_where_it_ended_of_the_same_object(file: int) -> None:
    """The entry says of which; where the answer begins elsewhere what is there is thrown away."""
    source = Scripted(
        [Answer(end=3000, error=Broken("cut")), Answer(end=5000, error=Broken("cut")), Answer(begin=0, chunk=7)]
    )

    found = download(source, file, QUICK)

    assert whole(found, file)
    assert source.asked == [(0, 1 << 20, None), (3000, None, ENTRY), (5000, None, ENTRY)]
    assert source.most_open == 1, "an origin may allow one connection"


@pytest.mark.parametrize(
    ("entry", "is_vouched", "goes_on"),
    [
        (ENTRY, False, True),
        (replace(ENTRY, etag=None), True, True),
        (replace(ENTRY, etag=None), False, False),
        (replace(ENTRY, etag=None, has_ranges=False), True, False),
    ],
)
def test_what_nothing_vouches_for_is_begun_anew(file: int, entry: Entry, is_vouched: bool, goes_on: bool) -> None:
    """An ETag does, or a digest that the caller compares, where there are ranges."""
    source = Scripted([Answer(entry, end=3000, error=Broken("cut")), Answer(entry)])

    found = download(source, file, QUICK, is_vouched=is_vouched)

    assert whole(found, file, entry)
    assert source.asked[1] == ((3000, None, entry) if goes_on else (0, None, None))


def test_a_stream_of_unknown_length_is_as_long_as_it_is(file: int) -> None:
    """Its end in good order is its end; one that broke is not."""
    unknown = replace(ENTRY, size=None)
    source = Scripted([Answer(unknown, end=3000, error=Broken("cut")), Answer(unknown)])

    assert whole(download(source, file, QUICK), file)
    assert source.asked[1] == (3000, None, unknown)


def test_more_bytes_than_were_announced_are_an_error(file: int) -> None:
    """They are no object that anybody meant."""
    with pytest.raises(Failed, match=f"{len(DATA)} bytes came of 5000"):
        download(Scripted([Answer(replace(ENTRY, size=5000))]), file, QUICK)


@pytest.mark.parametrize("size", [None, len(DATA)])
def test_an_object_of_exactly_the_bound_is_fetched_and_a_larger_one_is_not(file: int, size: int | None) -> None:
    """By what is announced, or by what comes."""
    source = Scripted([Answer(replace(ENTRY, size=size))])

    assert whole(download(source, file, replace(QUICK, max_bytes=len(DATA))), file)
    words = f"it has {len(DATA)} bytes, more than {len(DATA) - 1}" if size else f"more than {len(DATA) - 1} bytes"
    with pytest.raises(Failed, match=words):
        download(source, file, replace(QUICK, max_bytes=len(DATA) - 1))


def test_a_second_answer_over_the_bound_is_refused_too(file: int) -> None:
    """Without an ETag the object is asked for once more, as a whole."""
    options = replace(QUICK, first_part_bytes=100, connections=4, max_bytes=len(DATA))
    plain = replace(ENTRY, etag=None)
    source = Scripted([Answer(plain), Answer(replace(plain, size=len(DATA) + 1))])

    with pytest.raises(Failed, match="more than"):
        download(source, file, options)
    source = Scripted([Answer(plain), Answer(plain)])
    assert whole(download(source, file, options), file, plain)
    assert source.asked == [(0, 100, None), (0, None, None)]
    assert (source.open_readings, source.most_open) == (0, 1)
    source = Scripted([Answer(plain)])
    assert whole(download(source, file, replace(options, first_part_bytes=len(DATA))), file, plain)
    assert source.asked == [(0, len(DATA), None)], "its first part is all of it"


def test_an_object_that_is_replaced_is_begun_anew_once(file: int, caplog: pytest.LogCaptureFixture) -> None:
    """And is an error the second time."""
    caplog.set_level(logging.INFO)
    cut, replaced = Answer(end=3000, error=Broken("cut")), Answer(refuses=Replaced("it is another one"))

    assert whole(download(Scripted([cut, replaced, Answer()]), file, QUICK), file)
    assert "http://shown/m.mar: it is another one; it is fetched anew" in caplog.text
    with pytest.raises(Failed, match="it is another one, twice"):
        download(Scripted([cut, replaced, cut, replaced]), file, QUICK)


def test_attempts_are_counted_over_the_whole_download_and_begin_anew_with_progress(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three in a row that bring nothing to speak of are too many."""
    broken = Answer(refuses=Broken("busy"))

    source = Scripted([broken, broken, Answer()])
    assert whole(download(source, file, QUICK), file)
    with pytest.raises(Failed, match="busy, 3 times"):
        download(Scripted([broken]), file, QUICK)
    monkeypatch.setattr(module, "PROGRESS_BYTES", 1000)
    steps = [Answer(end=end, error=Broken("cut")) for end in range(1000, 10_000, 1000)]
    assert whole(download(Scripted([broken, *steps, Answer()]), file, QUICK), file)


def test_a_cancelled_download_says_why_and_not_what_broke(file: int) -> None:
    """Its source is closed from whatever thread cancels."""
    cancel = Cancel()
    source = Scripted([Answer()])

    def stop(have: int, size: int | None) -> None:
        if have:
            cancel.set("the model was removed")

    with pytest.raises(Failed, match="the model was removed"):
        download(source, file, QUICK, cancel=cancel, on_progress=stop)
    assert source.is_closed
    broken, cancel = Scripted([Answer(end=1000, error=Broken("closed"))]), Cancel()
    with pytest.raises(Failed, match="it was given up"):
        download(
            broken,
            file,
            replace(QUICK, first_pause_s=60.0),
            cancel=cancel,
            on_progress=lambda have, _: have and cancel.set(),
        )


def test_a_cancel_keeps_its_first_reason_and_calls_what_is_under_way_once() -> None:
    """What has ended is not called; what begins afterwards is, at once."""
    cancel, called = Cancel(), []
    assert not cancel.wait(0.001)
    with cancel.calling(lambda: called.append("over")):
        pass
    with cancel.calling(lambda: called.append("during")):
        cancel.set("one")
        cancel.set("two")
    with cancel.calling(lambda: called.append("after")):
        pass

    assert called == ["during", "after"]
    assert (cancel.reason, cancel.is_set, cancel.wait(60)) == ("one", True, True)
    with pytest.raises(Failed, match="one"):
        cancel.check()
    silent = Cancel()
    silent.check()
    silent.set()
    assert silent.reason == "it was given up"


def test_pace_asks_for_a_kilobyte_a_second_over_each_window() -> None:
    """Judged when the window is over, and then anew."""
    pace = Pace(100.0, 10.0)
    pace.check(109.9, 0)
    pace.check(110.0, 10 * 1024)
    pace.check(119.9, 0)
    with pytest.raises(Broken, match="slower than 1024 bytes a second"):
        pace.check(120.0, 10 * 1024 - 1)
    exact = Pace(100.0, 10.0)
    for end in (110.0, 120.0, 130.0):
        exact.check(end, 10 * 1024)


def test_what_is_not_said_otherwise_is_as_the_servers_settings_are() -> None:
    """An archive that a node fetches comes as one that a server fetches: one table of defaults for both."""
    settings, options = Settings(entry="", working_directory=Path()), DownloadOptions()

    assert (options.connections, options.max_bytes) == (settings.download_connections, settings.max_archive_bytes)


def test_pauses_before_further_attempts_begin_at_half_a_second() -> None:
    """Four attempts without progress wait 0.5, 1 and 2 s between them."""
    attempts = Attempts(DownloadOptions())

    assert [(attempts.note(0), attempts.pause_s) for _ in range(4)][:3] == [(True, 0.5), (True, 1.0), (True, 2.0)]


def test_an_answer_that_ends_early_without_an_error_is_gone_on_with(file: int) -> None:
    """As often as it takes: each one brought something, so none is an attempt in vain."""
    source = Scripted([Answer(end=end) for end in range(1000, len(DATA), 1000)] + [Answer()])

    assert whole(download(source, file, QUICK), file)
    assert [begin for begin, _, _ in source.asked] == list(range(0, len(DATA), 1000))


def test_pauses_double_from_the_second_failure_on_and_progress_forgets_them() -> None:
    """A mebibyte is progress; a byte less is none."""
    attempts = Attempts(DownloadOptions(attempts=4, first_pause_s=1.0))

    seen = [(attempts.note(brought), attempts.pause_s) for brought in (0, 0, (1 << 20) - 1, 1 << 20, 0, 0, 0)]

    assert seen == [(True, 1.0), (True, 2.0), (True, 4.0), (True, 1.0), (True, 2.0), (True, 4.0), (False, 8.0)]


class Late:
    """Time that goes on with each wait."""

    def __init__(self) -> None:
        self.now, self.waits = 50.0, []  # type: tuple[float, list[float]]

    def monotonic(self) -> float:
        """Seconds."""
        return self.now

    def wait(self, seconds: float) -> bool:
        """A wait of a `Cancel`."""
        self.waits.append(seconds)
        self.now += seconds
        return False


def test_a_late_object_is_asked_for_less_and_less_often_up_to_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses double up to five seconds, and the last ends with the time; then it is missing."""
    late = Late()
    monkeypatch.setattr(module, "time", late)
    cancel = Cancel()
    monkeypatch.setattr(cancel, "wait", late.wait)

    def find() -> Downloaded:
        raise Missing("there is none")

    with pytest.raises(Missing):
        await_object(Scripted([Answer()]), 20.0, cancel, find)

    assert late.waits == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 2.25]
    with pytest.raises(Missing):
        await_object(Scripted([Answer()]), 0.0, cancel, find)
    assert len(late.waits) == 8


@pytest.mark.parametrize(("error", "is_raised"), [(28, True), (122, True), (27, True), (95, False), (22, False)])
def test_a_full_disk_is_told_before_the_first_byte(
    file: int, monkeypatch: pytest.MonkeyPatch, error: int, is_raised: bool
) -> None:
    """No space, no quota, too large; a file system that cannot reserve is given the length alone."""

    def reserve(*_: int) -> None:
        raise OSError(error, "refused")

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    if is_raised:
        with pytest.raises(OSError, match="refused"):
            module._reserve(file, 5000)
    else:
        module._reserve(file, 5000)
    assert os.fstat(file).st_size == (0 if is_raised else 5000)


def test_a_write_that_takes_only_a_part_goes_on(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As full pipes of network file systems do."""
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: write(descriptor, bytes(data)[:7], at))

    assert whole(download(Scripted([Answer()]), file, QUICK), file)


@pytest.mark.parametrize("connections", [2, 5])
def test_parts_are_each_asked_for_once_and_by_as_many_as_there_are_connections(
    file: int, monkeypatch: pytest.MonkeyPatch, connections: int
) -> None:
    """Of the same object, up to its end, and no thread is left."""
    monkeypatch.setattr("marserve.store.fetching.byte_ranges.LEAST_PART_BYTES", 500)
    before = threading.active_count()
    source = Scripted([Answer()])
    told: list[int] = []
    sizes: list[int | None] = []
    options = replace(QUICK, connections=connections, first_part_bytes=1000)

    def note(have: int, size: int | None) -> None:
        told.append(have)
        sizes.append(size)

    found = download(source, file, options, on_progress=note)

    assert whole(found, file)
    assert source.asked[0] == (0, 1000, None)
    rest = sorted(source.asked[1:], key=lambda asked: asked[0])
    assert [asked[2] for asked in rest] == [ENTRY] * len(rest)
    assert [asked[0] for asked in rest] == [1000, *[asked[1] for asked in rest[:-1]]]
    assert rest[-1][1] == len(DATA)
    assert told[-1] == len(DATA)
    assert told == sorted(told)
    assert sizes == [None, *[len(DATA)] * (len(sizes) - 1)]
    assert threading.active_count() == before
    assert source.most_open <= connections, "the first part's connection is another's when it has ended"
    assert {thread.daemon for thread in source.threads} == {True}, "a process that ends would wait for the origin"


def test_a_part_that_begins_elsewhere_or_is_empty_counts_as_broken(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The origin is asked again, and given up after as many times as are allowed."""
    monkeypatch.setattr("marserve.store.fetching.byte_ranges.LEAST_PART_BYTES", 500)
    options = replace(QUICK, connections=2, first_part_bytes=1000)

    for answer, words in (
        (Answer(begin=7), "the answer was not the part that was asked for"),
        (Answer(end=0), "the answer was empty"),
        (Answer(refuses=Broken("busy")), "busy"),
    ):
        with pytest.raises(Failed, match=f"{words}, 3 times"):
            download(Scripted([Answer(), answer]), file, options)
        assert whole(download(Scripted([Answer(), answer, Answer()]), file, options), file)


def test_the_first_answer_counts_as_progress_by_what_it_brought(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As every other: a byte less than enough is an attempt in vain."""
    monkeypatch.setattr(module, "PROGRESS_BYTES", 1000)
    broken = Answer(refuses=Broken("busy"))

    def answers(end: int) -> list[Answer]:
        return [broken, Answer(end=end, error=Broken("cut")), broken, Answer()]

    assert whole(download(Scripted(answers(1000)), file, QUICK), file)
    with pytest.raises(Failed, match="busy, 3 times"):
        download(Scripted(answers(999)), file, QUICK)


@pytest.mark.parametrize(
    ("entry", "empty"),
    [(replace(ENTRY, etag=None), Answer(replace(ENTRY, etag=None), end=0)), (ENTRY, Answer(begin=0, end=0))],
    ids=["without an ETag", "from the beginning"],
)
def test_an_object_that_is_begun_anew_and_does_not_come_is_given_up(file: int, entry: Entry, empty: Answer) -> None:
    """An origin that answers with nothing in good order is not asked for ever, and the last reason is told."""
    with pytest.raises(Failed, match="the answer was empty, 3 times"):
        download(Scripted([Answer(entry, end=3000, error=Broken("cut")), empty]), file, QUICK)
    silent = replace(empty, error=Broken("reset by peer"))
    with pytest.raises(Failed, match="reset by peer, 3 times"):
        download(Scripted([Answer(entry, end=3000, error=Broken("cut")), silent]), file, QUICK)


# ------------------------------------------------------------------------------------------- several connections


PARTS = replace(QUICK, connections=2, first_part_bytes=1000)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of some kilobytes have parts, too."""
    monkeypatch.setattr("marserve.store.fetching.byte_ranges.LEAST_PART_BYTES", 500)


class Staged(Scripted):
    """A source whose first answer, and whose others, go through these before each of their pieces."""

    def __init__(self, first: Callable[[int], None], other: Callable[[int], None]) -> None:
        super().__init__([Answer(chunk=100)])
        self.stages = first, other

    @contextlib.contextmanager
    def read(self, begin: int, end: int | None, of: Entry | None = None) -> Iterator[Answer]:
        """See `Source.read`."""
        stage = self.stages[begin > 0]

        class Through(Answer):
            def __iter__(self) -> Iterator[bytes]:
                for number, piece in enumerate(super().__iter__()):
                    stage(number)
                    yield piece

        with super().read(begin, end, of):
            yield Through(ENTRY, begin, end, chunk=100)


@pytest.mark.usefixtures("small_parts")
def test_other_connections_begin_while_the_first_part_still_comes(file: int) -> None:
    """The first says what the object is; the rest need not wait for its end."""
    others = threading.Event()
    waited: list[bool] = []
    source = Staged(lambda number: waited.append(number == 0 or others.wait(5)), lambda number: others.set())

    assert whole(download(source, file, PARTS), file)
    assert all(waited)


@pytest.mark.usefixtures("small_parts")
def test_an_error_of_the_first_part_ends_the_others_at_once(file: int) -> None:
    """They are not fetched to their end only to be thrown away."""
    others = threading.Event()
    pieces: list[int] = []

    def fail(number: int) -> None:
        if number and others.wait(5):
            raise Failed("it cannot be")

    def dribble(number: int) -> None:
        pieces.append(number)
        others.set()
        time.sleep(0.005)

    source = Staged(fail, dribble)
    with pytest.raises(Failed, match="it cannot be"):
        download(source, file, PARTS)

    assert len(pieces) < 50
    assert len(source.asked) == 2, "nothing is asked for any more"


@pytest.mark.usefixtures("small_parts")
def test_a_cancel_ends_all_connections_though_their_origin_sends_on(file: int) -> None:
    """Between two pieces, and in the pause before an attempt: nothing is asked for any more, and the reason is told."""
    cancel = Cancel()
    source = Staged(lambda number: None, lambda number: cancel.set("the model was removed") if number else None)
    with pytest.raises(Failed, match="the model was removed"):
        download(source, file, PARTS, cancel=cancel)
    assert len(source.asked) <= 3

    cancel = Cancel()
    pausing = Scripted([Answer(), Answer(refuses=Broken("busy"))])
    timer = threading.Timer(0.05, cancel.set, args=("the server stops",))
    timer.start()
    with pytest.raises(Failed, match=r"^the server stops$"):
        download(pausing, file, replace(PARTS, first_pause_s=60.0), cancel=cancel)
    timer.join()
    assert len(pausing.asked) == 3


@pytest.mark.usefixtures("small_parts")
def test_the_error_that_came_first_is_told_whichever_thread_leaves_last(file: int) -> None:
    """Threads that leave in good order afterwards do not make it forgotten."""
    failed, second, threads = threading.Event(), threading.Event(), itertools.count()

    def fail_or_wait(number: int) -> None:
        if number:
            return
        if next(threads) == 0 and second.wait(5):
            failed.set()
            raise Failed("the disk is gone")
        second.set()
        failed.wait(5)
        time.sleep(0.05)

    with pytest.raises(Failed, match="the disk is gone"):
        download(Staged(lambda number: None, fail_or_wait), file, replace(PARTS, connections=3))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("is_first", [True, False])
def test_a_connection_that_dribbles_is_given_up_among_others_too(
    file: int, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    """Each has a pace of its own: a hundred bytes in forty seconds are too few."""
    now = 100.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))

    def dribble(number: int) -> None:
        nonlocal now
        now += 40.0

    source = Staged(dribble, lambda number: None) if is_first else Staged(lambda number: None, dribble)

    if is_first:  # another connection fetches the rest of its part
        assert whole(download(source, file, PARTS), file)
        assert source.asked[0][0] == 0
        assert len(source.asked) > 2
    else:
        with pytest.raises(Failed, match="it comes slower than 1024 bytes a second, 3 times"):
            download(source, file, PARTS)


@pytest.mark.usefixtures("small_parts")
def test_the_last_connection_has_its_attempts_once_more(file: int) -> None:
    """Those that it had it shared with others that gave up; then it gives up as well."""
    busy = Answer(refuses=Broken("busy"))

    assert whole(download(Scripted([Answer(), *[busy] * 8, Answer()]), file, PARTS), file)
    source = Scripted([Answer(), busy])
    with pytest.raises(Failed, match="busy, 3 times"):
        download(source, file, PARTS)
    assert len(source.asked) == 1 + 9


@pytest.mark.usefixtures("small_parts")
def test_a_connection_that_another_takes_over_counts_all_the_time(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one has used up its attempts before the thread begins: it was not the last."""
    made: list[threading.Thread] = []
    make = threading.Thread.__init__

    def make_when_others_have_left(thread: threading.Thread, **options: Any) -> None:
        for other in made:
            other.join()
        made.append(thread)
        make(thread, **options)

    monkeypatch.setattr(threading.Thread, "__init__", make_when_others_have_left)

    assert whole(download(Scripted([Answer(), *[Answer(refuses=Broken("busy"))] * 8, Answer()]), file, PARTS), file)
    assert len(made) == 2


@pytest.mark.usefixtures("small_parts")
def test_a_file_that_is_read_in_small_pieces_has_the_same_digest(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system may give less than was asked for; one that gives nothing has lost the file."""
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, at: read(descriptor, [buffers[0][:7]], at))
    assert whole(download(Scripted([Answer()]), file, PARTS), file)

    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(OSError, match="became shorter"):
        download(Scripted([Answer()]), file, PARTS)
