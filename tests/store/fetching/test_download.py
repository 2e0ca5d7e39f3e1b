"""Downloads in parallel ranges: the right bytes and their digest whatever breaks, or an error and no more attempts."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import ipaddress
import itertools
import os
import random
import re
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
import trustme

from marserve.store.addresses.fetch_guard import AllowedUrls, parse_target
from marserve.store.fetching.byte_ranges import MIB
from marserve.store.fetching.download import (
    LEAST_BYTES_PER_S,
    PROGRESS_BYTES,
    Attempts,
    Downloaded,
    DownloadOptions,
    Pace,
    await_object,
    download,
)
from marserve.store.sources.http import HttpOrigins, HttpSource, _tls
from marserve.store.sources.source import Broken, Cancel, Entry, Failed, Missing
from support.fault_proxy import Fault, FaultProxy, fault_proxy
from support.file_server import file_server
from support.range_origin import RangeOrigin, range_origin

FIRST = MIB
DATA = random.Random(7).randbytes(FIRST + 5 * MIB + 12_345)
QUICK = DownloadOptions(first_part_bytes=FIRST, first_pause_s=0.01)
# The last part is asked for after another has come.
BY_TWO = DownloadOptions(connections=2, first_part_bytes=FIRST, first_pause_s=0.01)


@pytest.fixture
def origin() -> Iterator[RangeOrigin]:
    """A store with one object."""
    with range_origin() as running:
        running.put("/m.mar", DATA)
        yield running


@pytest.fixture
def proxy(origin: RangeOrigin) -> Iterator[FaultProxy]:
    """What breaks the way to it."""
    with fault_proxy(origin.url) as running:
        yield running


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """The file that is fetched into."""
    descriptor = os.open(tmp_path / "m.mar", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


OPENED: list[HttpSource] = []


@pytest.fixture(autouse=True)
def _close_sources() -> Iterator[None]:
    """Close what a test opened."""
    yield
    while OPENED:
        OPENED.pop().close()


def source_of(where: RangeOrigin | FaultProxy, path: str = "/m.mar", silence_s: float = 5.0) -> HttpSource:
    """The object, through what stands before it."""
    OPENED.append(HttpOrigins(AllowedUrls([where.pattern]), silence_s=silence_s)(parse_target(where.url + path)))
    return OPENED[-1]


def content(file: int) -> bytes:
    """What the file holds."""
    return os.pread(file, os.fstat(file).st_size, 0)


def check_whole(downloaded: Downloaded, file: int, data: bytes = DATA) -> None:
    """The file is the object, and the digest is its own."""
    assert content(file) == data
    assert downloaded.sha256 == hashlib.sha256(data).hexdigest()
    assert downloaded.entry.size == len(data)


def threads() -> list[str]:
    """Those that downloads started."""
    return [thread.name for thread in threading.enumerate() if thread.name == "download"]


def test_an_object_comes_in_parts_over_several_connections(origin: RangeOrigin, file: int) -> None:
    """Each byte is asked for once; connections are kept, and none is left."""
    source = source_of(origin)

    downloaded = download(source, file, QUICK)
    source.close()

    check_whole(downloaded, file)
    asked = sorted(map(int, re.findall(r"\d+", " ".join(each for _, _, each in origin.asked))))
    ends = [end + 1 for end in asked[1::2]]
    assert asked[0] == 0
    assert asked[2::2] == ends[:-1]
    assert ends[-1] == len(DATA)
    assert 2 <= origin.connections <= QUICK.connections
    assert not threads()


@pytest.mark.parametrize("size", [0, 1, FIRST - 1, FIRST, FIRST + 1])
def test_objects_at_the_border_come_whole(origin: RangeOrigin, file: int, size: int) -> None:
    """An empty one has no first byte; one of the first part's size needs no second request."""
    origin.put("/m.mar", DATA[:size])

    check_whole(download(source_of(origin), file, QUICK), file, DATA[:size])

    assert len(origin.asked) == (1 if 0 < size <= FIRST else 2)


def test_small_parts_by_many_connections_come_whole(origin: RangeOrigin, file: int) -> None:
    """Whatever the number of connections."""
    for connections in (1, 2, 3, 32):
        options = DownloadOptions(connections=connections, first_part_bytes=64 * 1024, first_pause_s=0.01)
        check_whole(download(source_of(origin), file, options), file)


@pytest.mark.parametrize("reset", [False, True])
def test_a_part_that_is_cut_goes_on_where_it_ended(proxy: FaultProxy, file: int, reset: bool) -> None:
    """Nothing is fetched twice but the rest of that part."""
    proxy.on(Fault(cut_at=700_001, reset=reset), begin=FIRST)

    check_whole(download(source_of(proxy), file, QUICK), file)

    assert proxy.faults == 1
    begins = [int(match[1]) for _, _, each in proxy.asked if (match := re.match(r"bytes=(\d+)", each))]
    resumed = [begin for begin in begins if FIRST < begin <= FIRST + 700_001]
    assert len(resumed) == 1
    if not reset:  # RST throws away what was not read
        assert resumed == [FIRST + 700_001]


def test_a_first_part_that_is_cut_goes_on(proxy: FaultProxy, file: int) -> None:
    """Its connection was the one that told what the object is."""
    proxy.on(Fault(cut_at=1_000_001), begin=0)

    check_whole(download(source_of(proxy), file, QUICK), file)

    assert any(each.startswith("bytes=1000001-") for _, _, each in proxy.asked)


def test_every_part_may_break(proxy: FaultProxy, file: int) -> None:
    """Each connection has attempts of its own, and those that bring something do not count."""
    proxy.on(Fault(cut_at=PROGRESS_BYTES), times=100)
    options = DownloadOptions(connections=2, first_part_bytes=FIRST, attempts=2, first_pause_s=0.01)

    check_whole(download(source_of(proxy), file, options), file)

    assert proxy.faults == 7  # the first part, and two parts of two and a half such pieces


def test_three_times_503_is_survived_midway_and_at_the_beginning(proxy: FaultProxy, file: int) -> None:
    """Busy origins are asked again, with a pause."""
    for begin in (0, FIRST):
        proxy.on(Fault(status=503), begin=begin, times=3)

    check_whole(download(source_of(proxy), file, QUICK), file)

    assert proxy.faults == 6


def test_an_origin_that_allows_two_connections_is_served_by_two(proxy: FaultProxy, file: int) -> None:
    """The others give up, and those that get on go on."""
    proxy.most_allowed = 2

    check_whole(download(source_of(proxy), file, QUICK), file)

    assert proxy.most_busy == 2
    assert not threads()


def test_an_origin_that_forgets_its_ranges_now_and_then_is_asked_again(proxy: FaultProxy, file: int) -> None:
    """Some answer with the whole while they fetch it themselves."""
    plain = proxy.take

    def forget(method: str, path: str, asked_range: str) -> Fault:
        fault = plain(method, path, asked_range)
        return Fault(without_range=True) if len(proxy.asked) in (3, 5) else fault

    proxy.take = forget  # type: ignore[method-assign]

    check_whole(download(source_of(proxy), file, QUICK), file)


def test_an_origin_that_breaks_for_good_is_given_up(proxy: FaultProxy, file: int) -> None:
    """After a bounded number of requests, with the reason, and no thread left."""
    proxy.on(Fault(), times=1)
    proxy.on(Fault(status=503), times=float("inf"))

    with pytest.raises(Failed, match=r"the answer was 503, 4 times"):
        download(source_of(proxy), file, QUICK)

    assert proxy.faults <= 1 + QUICK.attempts * (QUICK.connections + 1)
    assert not threads()


def test_an_object_that_is_replaced_midway_is_begun_anew(origin: RangeOrigin, proxy: FaultProxy, file: int) -> None:
    """Never a mixed file: the new one as a whole."""
    other = DATA[::-1]
    replaced = threading.Event()

    def replace(have: int, size: int | None) -> None:
        if have >= MIB and not replaced.is_set():
            origin.put("/m.mar", other)
            replaced.set()

    proxy.on(Fault(bytes_per_s=20e6), begin=FIRST, times=1)

    check_whole(download(source_of(proxy), file, BY_TWO, on_progress=replace), file, other)


def test_one_that_is_replaced_again_and_again_is_an_error(origin: RangeOrigin, file: int) -> None:
    """It says so. Here there is another after each range behind its beginning."""
    versions = itertools.count()
    two_parts = DATA[: FIRST + 2 * MIB]
    origin.put("/m.mar", two_parts)

    def replace(begin: int) -> None:
        if begin:
            origin.put("/m.mar", two_parts[:-8] + next(versions).to_bytes(8))

    origin.on_range = replace

    with pytest.raises(Failed, match="it was replaced while it was fetched, twice"):
        download(source_of(origin), file, QUICK)

    assert not threads()


def test_one_that_is_replaced_when_all_of_it_was_asked_for_comes_whole_as_it_was(
    origin: RangeOrigin, file: int
) -> None:
    """Every answer is of the object that there was when it was asked for, so the replacement is not noticed."""
    asked, two_parts = [], DATA[: FIRST + 2 * MIB]
    origin.put("/m.mar", two_parts)

    def replace(begin: int) -> None:
        asked.append(begin)
        if len(asked) == 3:
            origin.put("/m.mar", DATA[::-1])

    origin.on_range = replace

    check_whole(download(source_of(origin), file, QUICK), file, two_parts)

    assert len(asked) == 3


def test_another_etag_midway_is_a_replaced_object(proxy: FaultProxy, file: int) -> None:
    """Though its length is the same."""
    proxy.on(Fault(etag='"another"'), begin=FIRST, times=1)

    check_whole(download(source_of(proxy), file, QUICK), file)

    assert len([each for _, _, each in proxy.asked if each.startswith("bytes=0-")]) == 2


def test_another_length_is_a_replaced_object(origin: RangeOrigin, file: int) -> None:
    """Also where the new one is so short that a part is beyond its end."""

    def replace(have: int, size: int | None) -> None:
        if size is not None and have >= MIB and len(origin.objects["/m.mar"]) == len(DATA):
            origin.put("/m.mar", b"short")

    check_whole(download(source_of(origin), file, BY_TWO, on_progress=replace), file, b"short")


def test_without_etags_there_is_one_stream(origin: RangeOrigin, file: int) -> None:
    """Nothing would tell that its parts are of the same thing."""
    origin.has_etags = False

    check_whole(download(source_of(origin), file, QUICK), file)

    assert origin.asked[1:] == [("GET", "/m.mar", "")]


def test_without_etags_but_with_a_digest_there_are_parts(origin: RangeOrigin, file: int) -> None:
    """The caller compares the whole."""
    origin.has_etags = False

    check_whole(download(source_of(origin), file, QUICK, is_vouched=True), file)

    assert len(origin.asked) > 2


def test_without_ranges_there_is_one_stream(origin: RangeOrigin, file: int) -> None:
    """Its first answer is all of it."""
    origin.has_ranges = False

    check_whole(download(source_of(origin), file, QUICK), file)

    assert len(origin.asked) == 1


def test_a_stream_without_ranges_that_is_cut_begins_anew(origin: RangeOrigin, proxy: FaultProxy, file: int) -> None:
    """What is behind the cut cannot be had alone."""
    origin.has_ranges = False
    proxy.on(Fault(cut_at=3_000_000), times=2)

    check_whole(download(source_of(proxy), file, QUICK), file)

    assert len(proxy.asked) >= 3


def test_a_connection_that_its_origin_closed_meanwhile_is_no_failure(proxy: FaultProxy, file: int) -> None:
    """It was kept without a word against it; the next request goes out anew, and counts as no attempt."""
    proxy.on(Fault(cut_at=len(DATA)), times=float("inf"))
    options = DownloadOptions(connections=2, first_part_bytes=FIRST, attempts=1)

    check_whole(download(source_of(proxy), file, options), file)

    assert proxy.faults >= 3


def test_a_redirect_is_asked_once_and_again_when_its_link_has_ended(
    origin: RangeOrigin, proxy: FaultProxy, file: int
) -> None:
    """Links that are signed for a while end in the middle of long downloads."""
    origin.put("/signed/m.mar", DATA)
    origin.redirects["/link.mar"] = "/signed/m.mar"
    proxy.on(Fault(status=403), path="/signed/", begin=FIRST)

    options = DownloadOptions(connections=2, first_part_bytes=FIRST, first_pause_s=0.01, attempts=1)

    check_whole(download(source_of(proxy, "/link.mar"), file, options), file)

    # Twice, and once more where the other connection began a part meanwhile.
    assert 2 <= len([path for _, path, _ in proxy.asked if path == "/link.mar"]) <= 3
    assert len([path for _, path, _ in proxy.asked if path == "/signed/m.mar"]) >= 4


def test_https_is_spoken_with_who_proves_the_name(tmp_path: Path, file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate must be of the address's host, by an authority that is trusted; else there is no request."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("models.example").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    here = [ipaddress.ip_address("127.0.0.1")]
    with range_origin(context) as origin:
        origin.put("/m.mar", DATA)
        port = origin.url.rpartition(":")[2]

        def source(host: str) -> HttpSource:
            allowed = AllowedUrls([rf"https://{host}:{port}/.*"])
            OPENED.append(HttpOrigins(allowed, resolve=lambda _: here)(parse_target(f"https://{host}:{port}/m.mar")))
            return OPENED[-1]

        _tls.cache_clear()
        with pytest.raises(Failed, match=r"self-signed|unable to get local issuer") as refused:
            download(source("models.example"), file, QUICK)
        assert str(refused.value).startswith("the certificate of models.example is not trusted: ")
        assert str(refused.value).endswith("in the variable SSL_CERT_FILE, and restart")  # and nothing of four times
        _tls.cache_clear()
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        with pytest.raises(Failed, match=r"certificate of other\.example is not trusted: Hostname mismatch"):
            download(source("other.example"), file, QUICK)
        check_whole(download(source("models.example"), file, QUICK), file)
        _tls.cache_clear()

    assert len(origin.asked) > 5


@pytest.mark.parametrize("answered", ["bytes 0-99/1000", "bytes 4194304-4194303/1", "bytes 5-9/*", "nonsense"])
def test_a_part_that_was_not_asked_for_is_refused(origin: RangeOrigin, file: int, answered: str) -> None:
    """An origin that confuses ranges would make a mixed file."""
    with file_server() as files:

        def confused(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(206)
            for name, value in (("content-range", answered), ("content-length", "100"), ("etag", '"1"')):
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(bytes(100))

        begin = 5 if answered.startswith("bytes 0") else 0
        OPENED.append(
            HttpOrigins(AllowedUrls([re.escape(files.url) + "/.*"]))(parse_target(files.on("/m.mar", confused)))
        )

        with pytest.raises(Failed, match="was not asked for"), OPENED[-1].read(begin, begin + 100):
            raise AssertionError


def test_head_is_never_asked(origin: RangeOrigin, file: int) -> None:
    """Presigned addresses refuse it; what an object is, a GET of its first byte tells."""
    source = source_of(origin)

    entry = source.stat()
    download(source, file, QUICK)

    assert (entry.size, entry.etag, entry.has_ranges) == (len(DATA), origin.etag("/m.mar"), True)
    assert {method for method, _, _ in origin.asked} == {"GET"}


def test_what_is_missing_is_missing(origin: RangeOrigin, file: int) -> None:
    """At once: nobody waits unless asked to."""
    with pytest.raises(Missing, match="404"):
        download(source_of(origin, "/gone.mar"), file, QUICK)

    assert len(origin.asked) == 1


def test_an_object_that_appears_late_is_waited_for(proxy: FaultProxy, file: int) -> None:
    """For the time given, and no longer."""
    proxy.on(Fault(status=404), times=2)
    source, cancel = source_of(proxy), Cancel()

    check_whole(await_object(source, 30.0, cancel, lambda: download(source, file, QUICK, cancel=cancel)), file)

    proxy.on(Fault(status=404), times=float("inf"))
    began = time.monotonic()
    with pytest.raises(Missing):
        await_object(source, 0.4, cancel, lambda: download(source, file, QUICK, cancel=cancel))
    assert time.monotonic() - began >= 0.4


def test_waiting_for_an_object_ends_with_its_cancel(proxy: FaultProxy, file: int) -> None:
    """At once, not at the next look."""
    proxy.on(Fault(status=404), times=float("inf"))
    source, cancel = source_of(proxy), Cancel()
    timer = threading.Timer(0.1, cancel.set, args=("enough",))
    timer.start()

    with pytest.raises(Failed, match="enough"):
        await_object(source, 600.0, cancel, lambda: download(source, file, QUICK, cancel=cancel))

    timer.join()


def test_cancel_ends_a_download_whose_origin_is_silent(proxy: FaultProxy, file: int) -> None:
    """All connections are cut; the threads end before the call does."""
    proxy.on(Fault(stall_at=100), times=float("inf"))
    cancel, came = Cancel(), threading.Event()
    source = source_of(proxy, silence_s=60.0)
    ended: list[BaseException] = []

    def note(have: int, size: int | None) -> None:
        if have:
            came.set()

    def fetch() -> None:
        try:
            download(source, file, QUICK, cancel=cancel, on_progress=note)
        except Failed as error:
            ended.append(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    assert came.wait(10)
    cancel.set("the server stops")
    thread.join(10)

    assert [str(error) for error in ended] == ["the server stops"]
    assert not threads()


def test_what_was_cancelled_before_is_never_begun(origin: RangeOrigin, file: int) -> None:
    """No request goes out."""
    cancel = Cancel()
    cancel.set()

    with pytest.raises(Failed, match="it was given up"):
        download(source_of(origin), file, QUICK, cancel=cancel)

    assert origin.asked == []


class EmptyAnswers:
    """A source whose answers end, in good order, after `first` bytes of ten; further ones bring nothing."""

    shown = identity = file_name = "m.mar"

    def __init__(self, first: int) -> None:
        self.begin, self.first = 0, first
        self.entry = Entry("m.mar", 10, '"1"')
        self.reads = 0

    @contextlib.contextmanager
    def read(self, begin: int, end: int | None, of: Entry | None = None) -> Iterator[EmptyAnswers]:
        """See `Source.read`."""
        self.reads += 1
        self.begin = begin
        yield self

    def __iter__(self) -> Iterator[bytes]:
        if self.reads == 1 and self.first:
            yield b"x" * self.first
        if self.reads > 20:
            raise AssertionError("it is asked for ever")

    def stat(self) -> Entry:
        """See `Source.stat`."""
        return self.entry

    def close(self) -> None:
        """See `Source.close`."""


@pytest.mark.parametrize("first", [0, 4])
def test_answers_that_bring_nothing_are_given_up(file: int, first: int) -> None:
    """Each counts as one that broke: an origin that says nothing in good order is not asked for ever."""
    source = EmptyAnswers(first)

    with pytest.raises(Failed, match="the answer was empty, 4 times"):
        download(source, file, DownloadOptions(first_pause_s=0.001))

    assert source.reads <= 6


def test_a_silent_part_is_fetched_anew(proxy: FaultProxy, file: int) -> None:
    """After the time that an origin may be silent."""
    proxy.on(Fault(stall_at=0), begin=FIRST)

    check_whole(download(source_of(proxy, silence_s=2.0), file, QUICK), file)


def test_an_object_over_the_bound_is_not_begun(origin: RangeOrigin, file: int) -> None:
    """Its size is known from the first answer."""
    with pytest.raises(Failed, match=f"it has {len(DATA)} bytes, more than 1000000"):
        download(source_of(origin), file, DownloadOptions(max_bytes=1_000_000))

    assert len(origin.asked) == 1


def test_a_corrupt_byte_is_in_the_digest(proxy: FaultProxy, file: int) -> None:
    """Whoever has the right one notices; the digest is of what is in the file."""
    proxy.on(Fault(corrupt_at=99), begin=FIRST)

    downloaded = download(source_of(proxy), file, QUICK)

    assert downloaded.sha256 == hashlib.sha256(content(file)).hexdigest() != hashlib.sha256(DATA).hexdigest()


def test_a_full_disk_is_an_error_of_the_file(origin: RangeOrigin, monkeypatch: pytest.MonkeyPatch, file: int) -> None:
    """Told before the parts are fetched, and not tried again."""

    def full(descriptor: int, begin: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)

    with pytest.raises(OSError, match="No space left"):
        download(source_of(origin), file, QUICK)

    assert len(origin.asked) == 1
    assert not threads()


def test_a_disk_that_becomes_full_ends_all_threads(
    origin: RangeOrigin, monkeypatch: pytest.MonkeyPatch, file: int
) -> None:
    """The error reaches the caller, whoever of them met it."""
    real = os.pwrite

    def full(descriptor: int, data: bytes, at: int) -> int:
        if at > FIRST + 2 * MIB:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", full)

    with pytest.raises(OSError, match="No space left"):
        download(source_of(origin), file, QUICK)

    assert not threads()


def test_progress_grows_to_the_whole(origin: RangeOrigin, file: int) -> None:
    """Counted over all connections."""
    seen: list[tuple[int, int | None]] = []

    download(source_of(origin), file, QUICK, on_progress=lambda have, size: seen.append((have, size)))

    assert [have for have, _ in seen] == sorted(have for have, _ in seen)
    assert seen[-1] == (len(DATA), len(DATA))


@pytest.mark.parametrize("times", [10, pytest.param(40, marks=pytest.mark.long)])
def test_random_faults_never_make_a_wrong_file(origin: RangeOrigin, proxy: FaultProxy, file: int, times: int) -> None:
    """Downloads through cuts, resets, stalls, busy answers and other ETags: whole, or an error."""
    data = DATA[: 3 * MIB]
    origin.put("/m.mar", data)
    whole = 0
    for seed in range(times):
        dice = random.Random(seed)
        proxy.clear()
        for _ in range(dice.randrange(1, 10)):
            [fault] = dice.choices(
                [
                    Fault(cut_at=dice.randrange(300_000)),
                    Fault(cut_at=dice.randrange(300_000), reset=True),
                    Fault(stall_at=dice.randrange(300_000)),
                    Fault(status=dice.choice([429, 500, 503])),
                    Fault(etag=f'"{seed}"'),
                    Fault(),
                ],
                weights=[8, 8, 1, 8, 8, 8],
            )
            proxy.on(fault, times=dice.randrange(1, 3))
        options = DownloadOptions(dice.choice([1, 2, 4]), first_part_bytes=256 * 1024, first_pause_s=0.001)
        try:
            downloaded = download(source_of(proxy, silence_s=1.0), file, options)
        except Failed:
            continue
        check_whole(downloaded, file, data)
        whole += 1

    assert whole > times / 2
    assert not threads()


# ------------------------------------------------------------------------------------------- pure parts


def test_attempts_count_those_that_brought_nothing() -> None:
    """Pauses double, and begin anew with progress."""
    attempts = Attempts(DownloadOptions(attempts=3, first_pause_s=1.0))

    assert (attempts.note(0), attempts.pause_s) == (True, 1.0)
    assert (attempts.note(0), attempts.pause_s) == (True, 2.0)
    assert (attempts.note(PROGRESS_BYTES), attempts.pause_s) == (True, 1.0)
    assert (attempts.note(0), attempts.pause_s) == (True, 2.0)
    assert not attempts.note(0)


def test_pace_is_judged_by_windows() -> None:
    """A slow beginning does not count against what came later, nor a fast one for it."""
    pace = Pace(0.0, 30.0)
    for second in range(1, 60):
        pace.check(float(second), LEAST_BYTES_PER_S)
    pace.check(61.0, 100 * LEAST_BYTES_PER_S)

    with pytest.raises(Broken, match="slower than"):
        pace.check(92.0, LEAST_BYTES_PER_S)
