"""Tests for folders of the web: fetched by what an index in them names, judged, bounded, whole or not at all."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from marserve.errors import AddressNotAllowed, ArchiveNotFound, BadArchive, DownloadFailed
from marserve.files.leased_folders import Lease
from marserve.store.addresses.fetch_guard import AllowedUrls, Target
from marserve.store.fetching.cache import Cache
from marserve.store.fetching.download import DownloadOptions
from marserve.store.fetching.fetcher import Fetcher, FetchOptions
from marserve.store.sources.http import HttpOrigins
from marserve.store.sources.source import Opener
from support.file_server import Answer, FileServer, file_server, status
from support.patience import PATIENCE_S
from support.range_origin import RangeOrigin, range_origin

INDEX, SINGLE = "index.json", "single.bin"


class Wanted:
    """An index is a list of names in JSON; without one a single file is wanted."""

    heads: Mapping[str, int] = {INDEX: 2000, ".hidden": 2000, SINGLE: 0}

    def choose(self, names: Sequence[str]) -> Iterable[str]:
        """All of them."""
        return names

    def named_in(self, head: str, data: bytes) -> Iterable[str]:
        """The list."""
        try:
            names: list[str] = json.loads(data)
        except ValueError:
            raise BadArchive(f"{head} is no index.") from None
        return names


@pytest.fixture
def origin() -> Iterator[RangeOrigin]:
    """With a folder of two files and their index."""
    with range_origin() as origin:
        origin.put(f"/w/{INDEX}", json.dumps(["a", "b", "a"]).encode())
        origin.put("/w/a", b"first")
        origin.put("/w/b", b"second")
        origin.put("/w/other", b"beside")
        yield origin


def _fetcher(*patterns: str, cache: Cache | None = None, most: int = 1 << 20, open_at: Opener | None = None) -> Fetcher:
    options = FetchOptions(DownloadOptions(first_pause_s=0.01, attempts=2, max_bytes=most))
    allowed = AllowedUrls(patterns)
    openers = None if open_at is None else {"http": open_at}
    return Fetcher(allowed, options, cache=cache, openers=openers)


def _fetch(origin: RangeOrigin | FileServer, folder: Path, most: int = 1 << 20) -> Lease:
    return _fetcher(f"{origin.url}/.*", most=most).fetch_below(f"{origin.url}/w/", Wanted(), folder)


def _contents(lease: Lease) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in lease.folder.iterdir()}
    lease.release()
    return found


def test_what_an_index_names_is_fetched_with_it_and_once_a_machine(origin: RangeOrigin, tmp_path: Path) -> None:
    """Another server asks for the index, and whether the files are what they were."""
    cache = [Cache(tmp_path / "cache", 1 << 20) for _ in range(2)]
    first, second = (
        _fetcher(origin.pattern, cache=each).fetch_below(f"{origin.url}/w/", Wanted(), tmp_path / "own")
        for each in cache
    )

    assert first.folder == second.folder
    assert _contents(first) == {INDEX: b'["a", "b", "a"]', "a": b"first", "b": b"second"}
    whole = [path for _, path, bytes_asked in origin.asked if path in ("/w/a", "/w/b") and bytes_asked != "bytes=0-0"]
    assert sorted(whole) == ["/w/a", "/w/b"]
    assert not (tmp_path / "own").exists()
    second.release()


@pytest.mark.parametrize("has_etags", [True, False])
def test_another_content_of_one_file_is_another_folder(origin: RangeOrigin, tmp_path: Path, has_etags: bool) -> None:
    """Though its size is the same, by its ETag; without, all is fetched anew. The older one stays while it is used."""
    origin.has_etags = has_etags
    first = _fetch(origin, tmp_path)
    origin.put("/w/a", b"other")

    second = _fetch(origin, tmp_path)

    assert (first.folder / "a").read_bytes() == b"first"
    assert (second.folder / "a").read_bytes() == b"other"
    first.release()
    second.release()


def test_without_an_index_a_single_file_will_do(origin: RangeOrigin, tmp_path: Path) -> None:
    """And without both the sentence says what was looked for."""
    del origin.objects[f"/w/{INDEX}"]
    with pytest.raises(DownloadFailed) as raised:
        _fetch(origin, tmp_path)
    origin.put(f"/w/{SINGLE}", b"all")

    assert _contents(_fetch(origin, tmp_path)) == {SINGLE: b"all"}
    assert raised.value.message.startswith(f"Failed to download checkpoint from: {origin.url}/w/ (none of {INDEX} (the")
    assert f"answer was 404), .hidden (the answer was 404), {SINGLE} (the answer was 404) is there" in str(raised.value)


def test_an_origin_that_forbids_what_it_does_not_have_is_asked_for_the_next(tmp_path: Path) -> None:
    """As stores do whose keys may not be listed, and servers that hide files that begin with a dot."""
    with file_server() as server:
        server.on(f"/w/{INDEX}", status(403))
        server.on("/w/.hidden", status(401))
        server.on(f"/w/{SINGLE}", _sized(b"all"))

        assert _contents(_fetch(server, tmp_path)) == {SINGLE: b"all"}


def test_a_file_that_is_missing_in_the_middle_ends_it_before_anything_is_fetched(
    origin: RangeOrigin, tmp_path: Path
) -> None:
    """The sentence names it and who names it; nothing is left."""
    del origin.objects["/w/a"]

    with pytest.raises(DownloadFailed, match=rf"\(a: the answer was 404, and {INDEX} names it\)"):
        _fetch(origin, tmp_path)
    assert [path for _, path, asked in origin.asked if path == "/w/b" and asked != "bytes=0-0"] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "sub/a", "..", "", "%2e%2e", "a?b", "a#b", "http://127.0.0.1/a", "\x00", "a\nb", INDEX],
)
def test_a_name_that_leads_out_of_the_folder_is_never_asked_for(origin: RangeOrigin, tmp_path: Path, name: str) -> None:
    """Of what the index names only files directly beside it are fetched."""
    origin.put(f"/w/{INDEX}", json.dumps(["a", name]).encode())

    with pytest.raises(DownloadFailed, match="only files that lie directly beside it are fetched") as raised:
        _fetch(origin, tmp_path)
    assert raised.value.message.isprintable()
    assert {path for _, path, _ in origin.asked} == {f"/w/{INDEX}"}


def test_what_is_no_index_is_said_by_its_own_sentence(origin: RangeOrigin, tmp_path: Path) -> None:
    """As a page that some servers answer with for whatever is missing."""
    origin.put(f"/w/{INDEX}", b"<html>Not here</html>")

    with pytest.raises(BadArchive, match=f"^{INDEX} is no index"):
        _fetch(origin, tmp_path)


def test_an_index_is_not_read_beyond_its_bound(origin: RangeOrigin, tmp_path: Path) -> None:
    """Neither one that says how large it is, nor one without an end."""
    origin.put(f"/w/{INDEX}", bytes(3000))
    with pytest.raises(DownloadFailed, match=rf"\({INDEX}: it has 3000 bytes, more than 2000\)"):
        _fetch(origin, tmp_path)

    with file_server() as server:
        server.on(f"/w/{INDEX}", _endless(server.closing))
        with pytest.raises(DownloadFailed, match=rf"\({INDEX}: it has more than 2000 bytes\)"):
            _fetch(server, tmp_path)


def test_files_have_a_bound_together_and_one_without_a_size_is_refused(origin: RangeOrigin, tmp_path: Path) -> None:
    """Before the first is fetched: an endless body has no size."""
    with pytest.raises(DownloadFailed, match="what lies below it has 26 bytes; at most 25 are fetched"):
        _fetch(origin, tmp_path, most=25)

    with file_server() as server:
        server.on(f"/w/{INDEX}", _sized(b'["a"]'))
        server.on("/w/a", _endless(server.closing))
        with pytest.raises(DownloadFailed, match=r"\(a: its origin does not say how many bytes it has\)"):
            _fetch(server, tmp_path)


def test_a_body_that_ends_early_is_tried_again_and_then_refused(tmp_path: Path) -> None:
    """Nothing of it is left."""
    with file_server() as server:
        server.on(f"/w/{INDEX}", _sized(b'["a"]'))
        server.on("/w/a", _cut)
        with pytest.raises(DownloadFailed, match=r"\(a: it ended after 2 of 5 bytes, 2 times\)"):
            _fetch(server, tmp_path)
        server.on("/w/a", _sized(b"first"), _cut, _sized(b"first"))

        assert _contents(_fetch(server, tmp_path))["a"] == b"first"


def test_a_file_that_changes_between_its_two_requests_is_refused(tmp_path: Path) -> None:
    """By its ETag; by its time where it has none."""
    with file_server() as server:
        server.on(f"/w/{INDEX}", _sized(b'["a"]'))
        for before, after in (({"etag": '"1"'}, {"etag": '"2"'}), (_time(1), _time(2))):
            server.on("/w/a", _sized(b"first", **before), _sized(b"other", **after))
            with pytest.raises(DownloadFailed, match=r"\(a was replaced while it was fetched; try again when"):
                _fetch(server, tmp_path)


def test_each_address_is_judged_also_where_it_leads(origin: RangeOrigin, tmp_path: Path) -> None:
    """A hub leads to its store by redirects: only where `allowed_urls` lets it."""
    with range_origin() as store:
        store.put("/.blob", b"first")
        origin.redirects["/w/a"] = f"{store.url}/.blob"
        address = f"{origin.url}/w/"
        with pytest.raises(AddressNotAllowed, match=r"/\.blob"):
            _fetcher(origin.pattern).fetch_below(address, Wanted(), tmp_path)
        origin.redirects[f"/w/{INDEX}"] = f"{store.url}/index"
        with pytest.raises(AddressNotAllowed, match="/index"):
            _fetcher(origin.pattern).fetch_below(address, Wanted(), tmp_path)
        assert store.asked == []
        del origin.redirects[f"/w/{INDEX}"]

        lease = _fetcher(origin.pattern, store.pattern).fetch_below(address, Wanted(), tmp_path)

    assert _contents(lease)["a"] == b"first"


def test_what_no_pattern_lets_is_not_asked_for(origin: RangeOrigin, tmp_path: Path) -> None:
    """Neither the folder, nor one of its files; a head that may not be asked for counts as absent."""
    address = f"{origin.url}/w/"
    with pytest.raises(AddressNotAllowed) as raised:
        _fetcher(f"{origin.url}/other/.*").fetch_below(address, Wanted(), tmp_path)
    assert raised.value.message.endswith(f"{origin.url}/w/ does not match any allowed URL(s)")
    assert origin.asked == []
    with pytest.raises(AddressNotAllowed, match="/w/b"):
        _fetcher(rf"{origin.url}/w/(a|.*\.json)").fetch_below(address, Wanted(), tmp_path)

    del origin.objects[f"/w/{INDEX}"]
    origin.put(f"/w/{SINGLE}", b"all")
    lease = _fetcher(rf"{origin.url}/w/[a-z]+\.(json|bin)").fetch_below(address, Wanted(), tmp_path)

    assert _contents(lease) == {SINGLE: b"all"}
    assert not any(path.endswith(".hidden") for _, path, _ in origin.asked)


def test_addresses_inside_need_a_pattern_that_spells_the_host_out(origin: RangeOrigin, tmp_path: Path) -> None:
    """As for archives."""
    with pytest.raises(ArchiveNotFound, match="an address that is not public"):
        _fetcher(".*").fetch_below(f"{origin.url}/w/", Wanted(), tmp_path)
    assert origin.asked == []


@pytest.mark.parametrize("address", ["http://host/w/?token=1/", "http://host/w?token=1/", "http://u:p@host/w/"])
def test_an_address_with_a_query_or_a_user_is_refused(tmp_path: Path, address: str) -> None:
    """What they are for cannot be sent for the files below it."""
    with pytest.raises(ArchiveNotFound, match="is refused"):
        _fetcher(".*").fetch_below(address, Wanted(), tmp_path)


def test_a_stop_ends_looks_that_wait_for_a_silent_origin(tmp_path: Path) -> None:
    """With its reason, and no later look begins."""
    with file_server() as server:
        begun = threading.Event()

        def silent(handler: BaseHTTPRequestHandler) -> None:
            begun.set()
            server.closing.wait(PATIENCE_S)

        server.on(f"/w/{INDEX}", _sized(json.dumps([f"f{number}" for number in range(50)]).encode()))
        for number in range(50):
            server.on(f"/w/f{number}", silent)
        fetcher = _fetcher(f"{server.url}/.*")
        errors: list[BaseException] = []

        def fetch() -> None:
            try:
                fetcher.fetch_below(f"{server.url}/w/", Wanted(), tmp_path)
            except DownloadFailed as error:
                errors.append(error)

        thread = threading.Thread(target=fetch)
        thread.start()
        assert begun.wait(PATIENCE_S)
        fetcher.close()
        thread.join(PATIENCE_S)

        assert not thread.is_alive()
        assert "the server stops" in str(errors[0])
        assert len(server.asked) <= 1 + 8


def test_a_look_that_fails_for_a_moment_is_tried_again(origin: RangeOrigin, tmp_path: Path) -> None:
    """As downloads are."""
    with file_server() as server:
        server.on(f"/w/{INDEX}", _sized(b'["a"]'))
        server.on("/w/a", status(503), _sized(b"first"))

        assert _contents(_fetch(server, tmp_path))["a"] == b"first"

        server.on("/w/a", status(503))
        with pytest.raises(DownloadFailed, match=r"a: the answer was 503, 2 times"):
            _fetch(server, tmp_path)


def test_files_are_asked_for_by_the_address_as_it_was_written(tmp_path: Path) -> None:
    """What is escaped in it stays escaped, and what is not does not become so."""
    asked: list[str] = []
    with range_origin() as origin:
        web = HttpOrigins(AllowedUrls([origin.pattern]))
        origin.put("/m@1/a%20b/single.bin", b"all")

        def open_at(target: Target) -> object:
            asked.append(target.url)
            return web(target)

        fetcher = _fetcher(f"{origin.url}/m@1/.*", open_at=open_at)  # type: ignore[arg-type]
        _contents(fetcher.fetch_below(f"{origin.url}/m@1/a%20b/", Wanted(), tmp_path))

    assert {url.removeprefix(origin.url) for url in asked} == {
        f"/m@1/a%20b/{name}" for name in (INDEX, ".hidden", SINGLE)
    }


def _sized(data: bytes, **headers: str) -> Answer:
    """An answer of all of it, of a server without ranges."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        for name, value in {"content-length": str(len(data)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def _time(second: int) -> dict[str, str]:
    return {"last-modified": f"Mon, 02 Jan 2023 10:00:0{second} GMT"}


def _cut(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("content-length", "5")
    handler.end_headers()
    handler.wfile.write(b"fi")


def _endless(closing: threading.Event) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while not closing.is_set():
                handler.wfile.write(bytes(10_000))
        except OSError:
            return

    return answer
