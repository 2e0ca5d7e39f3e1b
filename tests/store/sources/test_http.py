"""Fetching: complete or not at all, from where it is allowed and nowhere else, whatever the other side does."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from marserve.errors import ArchiveExists, ArchiveNotFound, DownloadFailed
from marserve.store.addresses.fetch_guard import AllowedUrls, IPAddress, Target, resolve_host
from marserve.store.fetching.download import MAX_ATTEMPTS, DownloadOptions
from marserve.store.fetching.fetcher import Fetcher, FetchOptions
from marserve.store.sources.http import HEADER_SILENCES, MAX_REDIRECTS, SILENCE_S, HttpOrigins
from support.file_server import Answer, FileServer, cut, file_server, status, whole

DATA = os.urandom(100_000)


@pytest.fixture
def files() -> Iterator[FileServer]:
    """A web server."""
    with file_server() as running:
        yield running


def fetcher(files: FileServer, *, silence_s: float = 5.0, **changes: Any) -> Fetcher:
    """A fetcher that may fetch everything of this server, and does not wait long."""
    return fetcher_of([files.url.replace(".", r"\.") + "/.*"], silence_s=silence_s, **changes)


def fetcher_of(
    patterns: list[str],
    *,
    resolve: Callable[[Target], list[IPAddress]] = resolve_host,
    silence_s: float = SILENCE_S,
    **changes: Any,
) -> Fetcher:
    """A fetcher with these patterns that does not wait long before it tries again."""
    allowed = AllowedUrls(patterns)
    web = HttpOrigins(allowed, resolve=resolve, silence_s=silence_s)
    options = FetchOptions(DownloadOptions(**{"first_pause_s": 0.01, **changes}))
    return Fetcher(allowed, options, openers={"http": web, "https": web})


def test_an_archive_lands_in_the_store_under_its_name(files: FileServer, tmp_path: Path) -> None:
    """The last part of the path, without the query."""
    url = files.on("/a/m.mar?X-Sig=1", whole(DATA))

    fetched = fetcher(files).fetch(url, tmp_path)
    name = fetched.name

    assert (name, fetched.in_store) == ("m.mar", tmp_path / "m.mar")
    assert fetched.sha256 == hashlib.sha256(DATA).hexdigest()
    assert (tmp_path / name).read_bytes() == DATA
    assert list(tmp_path.iterdir()) == [tmp_path / name]


def test_a_file_that_is_there_is_never_replaced(files: FileServer, tmp_path: Path) -> None:
    """Not by a download, nor by one that came first meanwhile."""
    (tmp_path / "m.mar").write_bytes(b"mine")

    with pytest.raises(ArchiveExists, match=r"Model file already exists m\.mar"):
        fetcher(files).fetch(files.on("/m.mar", whole(DATA)), tmp_path)

    assert (tmp_path / "m.mar").read_bytes() == b"mine"
    assert files.asked == []


def test_one_that_is_cut_goes_on_where_it_ended(files: FileServer, tmp_path: Path) -> None:
    """Where the ETag vouches that it is the same."""
    url = files.on("/m.mar", cut(DATA, 60_000, '"v1"'), whole(DATA, '"v1"'))

    fetcher(files).fetch(url, tmp_path)

    assert (tmp_path / "m.mar").read_bytes() == DATA
    assert files.asked[1][1]["range"] == "bytes=60000-"
    assert files.asked[1][1]["if-range"] == '"v1"'


def test_one_that_was_replaced_meanwhile_is_never_mixed(files: FileServer, tmp_path: Path) -> None:
    """The new one is fetched from its beginning."""
    other = os.urandom(len(DATA))
    url = files.on("/m.mar", cut(DATA, 60_000, '"v1"'), whole(other, '"v2"'))

    fetcher(files).fetch(url, tmp_path)

    assert (tmp_path / "m.mar").read_bytes() == other


def test_without_an_etag_it_begins_anew(files: FileServer, tmp_path: Path) -> None:
    """Nothing tells that the rest belongs to the beginning."""
    url = files.on("/m.mar", cut(DATA, 60_000), whole(DATA))

    fetcher(files).fetch(url, tmp_path)

    assert (tmp_path / "m.mar").read_bytes() == DATA
    assert "if-range" not in files.asked[1][1]
    assert files.asked[1][1].get("range", "bytes=0-").startswith("bytes=0-")


def test_a_busy_origin_is_asked_again_and_then_given_up(files: FileServer, tmp_path: Path) -> None:
    """A bounded number of times."""
    fetcher(files).fetch(files.on("/m.mar", status(503), status(503), status(503), whole(DATA)), tmp_path)
    assert (tmp_path / "m.mar").read_bytes() == DATA

    files.asked.clear()
    with pytest.raises(DownloadFailed):
        fetcher(files).fetch(files.on("/n.mar", status(503)), tmp_path)
    assert len(files.asked) == MAX_ATTEMPTS


@pytest.mark.parametrize("code", [400, 401, 403, 404, 410, 204, 206])
def test_another_status_is_a_failure_at_once(files: FileServer, tmp_path: Path, code: int) -> None:
    """In TorchServe's words, with nothing left in the store."""
    url = files.on("/m.mar", status(code))

    with pytest.raises(DownloadFailed) as failed:
        fetcher(files).fetch(url, tmp_path)

    assert str(failed.value) == f"Failed to download archive from: {url}"
    assert len(files.asked) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_origin_that_always_cuts_leaves_nothing(files: FileServer, tmp_path: Path) -> None:
    """Half an archive is none."""
    with pytest.raises(DownloadFailed) as failed:
        fetcher(files).fetch(files.on("/m.mar", cut(DATA, 10)), tmp_path)

    assert failed.value.reason
    assert list(tmp_path.iterdir()) == []


def test_an_endless_answer_ends_at_the_bound(files: FileServer, tmp_path: Path) -> None:
    """Announced or not."""

    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while not files.closing.is_set():
                handler.wfile.write(bytes(65536))
        except OSError:
            return

    limited = fetcher(files, max_bytes=1_000_000)

    with pytest.raises(DownloadFailed, match=r"Failed to download") as failed:
        limited.fetch(files.on("/m.mar", endless), tmp_path)
    assert "more than 1000000 bytes" in failed.value.reason
    with pytest.raises(DownloadFailed) as failed:
        limited.fetch(files.on("/n.mar", whole(bytes(1_000_001))), tmp_path)
    assert "1000001 bytes" in failed.value.reason
    assert list(tmp_path.iterdir()) == []


def test_an_origin_that_drips_is_given_up(files: FileServer, tmp_path: Path) -> None:
    """A byte now and then keeps no registration waiting for ever."""

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("content-length", "100000")
        handler.end_headers()
        try:
            while not files.closing.wait(0.02):
                handler.wfile.write(b"x")
                handler.wfile.flush()
        except OSError:
            return

    with pytest.raises(DownloadFailed) as failed:
        fetcher(files, pace_window_s=0.2).fetch(files.on("/m.mar", drip), tmp_path)

    assert "slower than" in failed.value.reason


def test_an_origin_that_falls_silent_is_given_up(files: FileServer, tmp_path: Path) -> None:
    """After the limit, each time it is tried."""

    def hang(handler: BaseHTTPRequestHandler) -> None:
        files.closing.wait(10)

    with pytest.raises(DownloadFailed) as caught:
        fetcher(files, silence_s=0.1).fetch(files.on("/m.mar", hang), tmp_path)

    assert caught.value.reason.endswith(f", {MAX_ATTEMPTS} times")
    assert 0 < len(files.asked) <= MAX_ATTEMPTS  # an origin that is slow to read sees some of them gone


def test_closing_ends_what_is_under_way(files: FileServer, tmp_path: Path) -> None:
    """A server that stops does not wait for a download."""
    begun = threading.Event()

    def slow(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while not files.closing.is_set():
                handler.wfile.write(bytes(4096))
                begun.set()
                time.sleep(0.005)
        except OSError:
            return

    url = files.on("/m.mar", slow)
    closing = fetcher(files)
    failures: list[BaseException] = []

    def fetch() -> None:
        try:
            closing.fetch(url, tmp_path)
        except DownloadFailed as error:
            failures.append(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    assert begun.wait(10)
    closing.close()
    thread.join(10)

    assert len(failures) == 1
    assert list(tmp_path.iterdir()) == []


def test_closing_ends_what_waits_for_a_silent_origin(files: FileServer, tmp_path: Path) -> None:
    """The server must not wait for its end as long as an origin may be silent, before a header or behind it."""
    for begins in (False, True):
        fetching = fetcher(files, silence_s=60.0)
        came = threading.Event()

        def stay_silent(handler: BaseHTTPRequestHandler, begins: bool = begins, came: threading.Event = came) -> None:
            if begins:
                handler.send_response(200)
                handler.send_header("content-length", "1000")
                handler.end_headers()
            came.set()
            files.closing.wait(60)

        ended: list[float] = []

        def fetch(fetching: Fetcher = fetching, ended: list[float] = ended) -> None:
            with pytest.raises(DownloadFailed):
                fetching.fetch(f"{files.url}/m.mar", tmp_path)
            ended.append(time.monotonic())

        files.on("/m.mar", stay_silent)
        thread = threading.Thread(target=fetch)
        thread.start()
        assert came.wait(10)

        fetching.close()
        thread.join(10)

        assert ended
        assert list(tmp_path.iterdir()) == []


def test_a_header_that_drips_is_given_up(files: FileServer, tmp_path: Path) -> None:
    """Each byte of it would begin the time for silence anew."""

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nx: ")
        with contextlib.suppress(OSError):
            while not files.closing.wait(0.05):
                handler.wfile.write(b"x")

    with pytest.raises(DownloadFailed) as caught:
        fetcher(files, silence_s=0.5).fetch(files.on("/m.mar", drip), tmp_path)

    assert caught.value.reason.endswith(f"no header came within 1 s, {MAX_ATTEMPTS} times")
    assert 0 < len(files.asked) <= HEADER_SILENCES


def test_headers_of_redirects_share_their_time(files: FileServer, tmp_path: Path) -> None:
    """Each hop is in time, all together are not."""

    def send_on(number: int) -> Answer:
        redirect = status(302, location=f"/{number + 1}.mar")

        def answer(handler: BaseHTTPRequestHandler) -> None:
            files.closing.wait(0.35)
            redirect(handler)

        return answer

    for number in range(4):
        files.on(f"/{number}.mar", send_on(number))
    files.on("/4.mar", whole(DATA))

    with pytest.raises(DownloadFailed):
        fetcher(files, silence_s=0.6, attempts=1).fetch(f"{files.url}/0.mar", tmp_path)

    assert "/4.mar" not in [path for path, _ in files.asked]


def test_attempts_have_their_time_anew_after_an_answer(files: FileServer, tmp_path: Path) -> None:
    """What was lost before a header came does not count against later ones."""
    silent = threading.Event()

    def hang(handler: BaseHTTPRequestHandler) -> None:
        silent.wait(5)

    url = files.on("/m.mar", hang, cut(DATA, 60_000, '"v1"'), hang, whole(DATA, '"v1"'))
    try:
        fetcher(files, silence_s=0.4).fetch(url, tmp_path)
    finally:
        silent.set()

    assert (tmp_path / "m.mar").read_bytes() == DATA


@pytest.mark.parametrize("length", ["-5", "5, 5", "+5", "0x5", "9" * 5000, "\u00b2"])
def test_a_length_that_is_no_number_is_refused(files: FileServer, tmp_path: Path, length: str) -> None:
    """It would be taken for an object of unknown length, which may end anywhere."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("content-length", length)
        handler.end_headers()
        handler.wfile.write(DATA)

    with pytest.raises(DownloadFailed) as caught:
        fetcher(files).fetch(files.on("/m.mar", answer), tmp_path)

    assert "its Content-Length is no number" in caught.value.reason
    assert len(caught.value.reason) < 200
    assert len(files.asked) == 1


# ------------------------------------------------------------------------------------------- where it may go


def test_a_redirect_is_followed_where_it_is_allowed(files: FileServer, tmp_path: Path) -> None:
    """The archive is called as it was asked for."""
    files.on("/real/other.mar", whole(DATA))

    name = fetcher(files).fetch(files.on("/m.mar", status(302, location="/real/other.mar")), tmp_path).name

    assert (tmp_path / name).read_bytes() == DATA
    assert name == "m.mar"


@pytest.mark.parametrize(
    "location",
    [
        "http://169.254.169.254/latest/meta-data/m.mar",
        "http://127.0.0.1:1/m.mar",
        "http://localhost/m.mar",
        "http://[::ffff:169.254.169.254]/m.mar",
        "http://2130706433/m.mar",
        "http://user@127.0.0.1/m.mar",
        "file:///etc/passwd",
        "gopher://127.0.0.1/m.mar",
        "//evil.org/m.mar",
        "",
    ],
)
def test_a_redirect_to_elsewhere_is_refused(files: FileServer, tmp_path: Path, location: str) -> None:
    """It is judged as the first address was; nothing is connected to."""
    url = files.on("/m.mar", status(302, location=location))

    with pytest.raises((ArchiveNotFound, DownloadFailed)):
        fetcher(files).fetch(url, tmp_path)

    assert {path for path, _ in files.asked} == {"/m.mar"}
    assert list(tmp_path.iterdir()) == []


def test_redirects_end(files: FileServer, tmp_path: Path) -> None:
    """A loop is followed five times."""
    with pytest.raises(DownloadFailed):
        fetcher(files).fetch(files.on("/m.mar", status(302, location="/m.mar")), tmp_path)

    assert len(files.asked) == MAX_REDIRECTS + 1


def test_it_connects_to_the_address_that_was_judged(files: FileServer, tmp_path: Path) -> None:
    """A name that answers public first and private second is asked once for each connection, and no more."""
    port = int(files.url.rpartition(":")[2])
    asked: list[str] = []

    def resolve(target: Target) -> list[IPAddress]:
        asked.append(target.host)
        # The second answer would be another machine's: whoever asks again connects to what nobody judged.
        return [ipaddress.ip_address("127.0.0.1" if len(asked) == 1 else "10.0.0.1")]

    files.on("/m.mar", whole(DATA))
    named = fetcher_of([rf"http://models\.example:{port}/.*"], resolve=resolve)

    named.fetch(f"http://models.example:{port}/m.mar", tmp_path)

    assert asked == ["models.example"]
    assert files.asked[0][1]["host"] == f"models.example:{port}"


@pytest.mark.parametrize("answers", [["127.0.0.1"], ["93.184.216.34", "10.0.0.1"], ["169.254.169.254"]])
def test_a_name_that_means_a_private_address_is_refused(files: FileServer, tmp_path: Path, answers: list[str]) -> None:
    """One among several is enough, unless a pattern spells the name out."""
    port = int(files.url.rpartition(":")[2])
    everything = fetcher_of(["http://.*"], resolve=lambda target: [ipaddress.ip_address(each) for each in answers])

    with pytest.raises(ArchiveNotFound, match="is refused"):
        everything.fetch(f"http://innocent.example:{port}/m.mar", tmp_path)

    assert files.asked == []


def test_a_forbidden_url_is_never_asked_for(files: FileServer, tmp_path: Path) -> None:
    """Not even its name is looked up."""

    def resolve(target: Target) -> list[IPAddress]:
        raise AssertionError(target)

    with pytest.raises(ArchiveNotFound, match="does not match"):
        fetcher_of(["http://other/.*"], resolve=resolve).fetch(f"{files.url}/m.mar", tmp_path)


def test_the_environments_proxy_is_not_used(files: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would connect for us to what nobody judged."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")

    fetcher(files).fetch(files.on("/m.mar", whole(DATA)), tmp_path)

    assert (tmp_path / "m.mar").read_bytes() == DATA


def test_a_host_is_resolved_once_for_each_of_its_addresses() -> None:
    """The system's resolver is asked."""
    found = resolve_host(Target("http", "localhost", 80, "/m.mar", ""))

    assert ipaddress.ip_address("127.0.0.1") in found or ipaddress.ip_address("::1") in found
    assert len(found) == len(set(found))


def test_a_host_without_an_address_is_a_failure(tmp_path: Path) -> None:
    """After as many tries as any other trouble of the network."""

    def resolve(target: Target) -> list[IPAddress]:
        raise socket.gaierror(-2, "Name or service not known")

    lost = fetcher_of(["http://lost.example/.*"], resolve=resolve)

    with pytest.raises(DownloadFailed) as failed:
        lost.fetch("http://lost.example/m.mar", tmp_path)

    assert "no address" in failed.value.reason


# ------------------------------------------------------------------------------------------- files


def test_a_file_is_copied_where_its_path_is_allowed(tmp_path: Path) -> None:
    """And only a file, of an allowed folder; where links lead counts."""
    allowed, other, store = tmp_path / "allowed", tmp_path / "other", tmp_path / "store"
    for folder in (allowed, other, store):
        folder.mkdir()
    (allowed / "m.mar").write_bytes(DATA)
    (other / "secret.mar").write_bytes(b"secret")
    (allowed / "link.mar").symlink_to(other / "secret.mar")
    (allowed / "folder.mar").mkdir()
    copies = fetcher_of([f"file://{allowed}/.*"])

    assert copies.fetch(f"file://{allowed}/m.mar", store).in_store == store / "m.mar"
    for name in ("link.mar", "folder.mar", "gone.mar"):
        with pytest.raises((ArchiveNotFound, DownloadFailed)):
            copies.fetch(f"file://{allowed}/{name}", store)
    with pytest.raises(ArchiveNotFound, match="does not match"):
        copies.fetch(f"file://{other}/secret.mar", store)

    assert [path.name for path in store.iterdir()] == ["m.mar"]
