"""Objects of buckets: described, read in ranges, bound to one content, and every trouble as a sentence of its kind.

Against stand-ins that speak the providers' protocols, and against endpoints that answer oddly.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import trustme

from marserve.settings.stores import STORES
from marserve.settings.values import Reading
from marserve.store.addresses.fetch_guard import parse_target
from marserve.store.fetching.download import DownloadOptions, download
from marserve.store.sources.object_errors import TEXT_CHARACTERS, explain
from marserve.store.sources.object_store import ObjectSource, ObjectStores
from marserve.store.sources.source import Broken, Cancel, Entry, Failed, Missing, Replaced, SourceError
from support.object_stores import AZURE_ACCOUNT, AZURE_KEY, Bucket, S3Server, StoreProgram, azure_server
from support.odd_store import MODIFIED, OddStore, an_object, odd_store, trouble
from support.server import free_ports, poll

pytest.importorskip("obstore")

SECRET = "planted-secret"
KEYS = {"AWS_ACCESS_KEY_ID": "AKIAPLANTED", "AWS_SECRET_ACCESS_KEY": SECRET}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the variables of whoever runs the tests: the library reads some by itself."""
    for name in os.environ:
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(subprocess, "Popen", StoreProgram)


def stores_of(document: Any, environment: dict[str, str] | None = None, **more: Any) -> ObjectStores:
    """The stores of such settings."""
    settings = STORES.read(json.dumps(document), Reading("stores", Path("/"), lambda sentence: None))
    return ObjectStores(settings, environment or {}, **more)


def in_moto(s3: S3Server) -> ObjectStores:
    """The stand-in, found by its variables."""
    return ObjectStores(environment=s3.environment)


def at(store: OddStore, silence_s: float = 30.0, **options: Any) -> ObjectSource:
    """An object of an odd endpoint."""
    stores = stores_of({"s3://bucket/": {"endpoint_url": store.url, **options}}, KEYS, silence_s=silence_s)
    return stores.open(parse_target("s3://bucket/m.mar"))


def read(source: ObjectSource, begin: int = 0, end: int | None = None, of: Entry | None = None) -> bytes:
    """All bytes of one reading."""
    with source.read(begin, end, of) as reading:
        assert reading.begin == begin
        return b"".join(bytes(piece) for piece in reading)


def threads_of(source: ObjectSource) -> int:
    """How many threads the process has that asks for it."""
    return len(os.listdir(f"/proc/{source._asking.process.pid}/task"))


@pytest.fixture
def bucket(s3: S3Server) -> Bucket:
    """An empty bucket."""
    return s3.bucket()


# ------------------------------------------------------------------------------------------------------- S3


def test_an_object_is_described_and_read_in_ranges(s3: S3Server, bucket: Bucket) -> None:
    """As a whole, from the middle, to the middle, and beyond its end."""
    data = os.urandom(3_000_000)
    etag = bucket.put("models/echo.mar", data)
    source = in_moto(s3).open(parse_target(f"s3://{bucket.name}/models/echo.mar"))

    entry = source.stat()

    assert (entry.key, entry.size, entry.etag) == ("models/echo.mar", len(data), etag)
    assert abs((entry.modified or 0) - time.time()) < 100
    assert (source.file_name, source.shown) == ("echo.mar", f"s3://{bucket.name}/models/echo.mar")
    assert read(source) == data
    assert read(source, 10, 1_500_000) == data[10:1_500_000]
    assert read(source, 2_000_000, None, entry) == data[2_000_000:]
    assert read(source, 2_999_000, 9_000_000, entry) == data[2_999_000:]


def test_a_download_is_what_was_put(s3: S3Server, bucket: Bucket, tmp_path: Path) -> None:
    """In parallel ranges, straight into a file."""
    data = os.urandom(9_000_000)
    bucket.put("m.mar", data)
    source = in_moto(s3).open(parse_target(f"s3://{bucket.name}/m.mar"))

    with (tmp_path / "m.mar").open("w+b") as file:
        done = download(source, file.fileno(), DownloadOptions(first_part_bytes=1_000_000), cancel=Cancel())

    assert (tmp_path / "m.mar").read_bytes() == data
    assert done.entry.size == len(data)


def test_pieces_are_of_a_mebibyte_at_most(s3: S3Server, bucket: Bucket) -> None:
    """Whatever the library gathers."""
    bucket.put("m.mar", b"x" * 5_000_000)
    source = in_moto(s3).open(parse_target(f"s3://{bucket.name}/m.mar"))

    with source.read(0, None) as reading:
        sizes = [len(piece) for piece in reading]

    assert sum(sizes) == 5_000_000
    assert max(sizes) <= 1024 * 1024


def test_an_empty_object_is_read(s3: S3Server, bucket: Bucket) -> None:
    """Though no range of it can be asked for."""
    bucket.put("empty.mar", b"")
    source = in_moto(s3).open(parse_target(f"s3://{bucket.name}/empty.mar"))

    assert source.stat().size == 0
    assert read(source) == read(source, 0, 100) == b""


def test_keys_may_hold_what_an_address_escapes(s3: S3Server, bucket: Bucket) -> None:
    """Spaces, plus signs, other letters, and percent signs."""
    bucket.put("a%20b/m%2Bn%C3%BC%25.mar", b"here")
    source = in_moto(s3).open(parse_target(f"s3://{bucket.name}/a%20b/m+n%C3%BC%25.mar"))

    assert source.stat().key == "a b/m+nü%.mar"
    assert read(source) == b"here"


def test_a_replaced_object_is_noticed(s3: S3Server, bucket: Bucket) -> None:
    """By the store, which is told the ETag."""
    bucket.put("m.mar", b"first")
    source = in_moto(s3).open(parse_target(f"s3://{bucket.name}/m.mar"))
    entry = source.stat()
    bucket.put("m.mar", b"other")

    with pytest.raises(Replaced, match="replaced while it was fetched"):
        read(source, 0, 5, entry)


def test_a_store_that_does_not_compare_is_compared(bucket: Bucket) -> None:
    """An endpoint that answers whatever the condition says: the ETag of its answer is looked at as well."""
    with odd_store(an_object(b"other", '"2"')) as store, pytest.raises(Replaced):
        read(at(store), 0, 5, Entry("m.mar", 5, '"1"'))


def test_without_an_etag_the_size_is_compared() -> None:
    """And a weak ETag is none."""
    with odd_store(an_object(b"hello", 'W/"1"')) as store:
        source = at(store)

        assert source.stat().etag is None
        assert read(source, 0, 5, Entry("m.mar", 5, None)) == b"hello"
        with pytest.raises(Replaced):
            read(source, 0, 5, Entry("m.mar", 6, None))


def test_what_is_not_there_is_missing(s3: S3Server, bucket: Bucket) -> None:
    """An object; of a bucket it is told that it is the bucket."""
    stores = in_moto(s3)

    with pytest.raises(Missing, match=r"^S3: there is no such object$"):
        stores.open(parse_target(f"s3://{bucket.name}/m.mar")).stat()
    with pytest.raises(Missing):
        read(stores.open(parse_target(f"s3://{bucket.name}/m.mar")))
    with pytest.raises(Failed, match=r"^S3: there is no bucket nowhere$"):
        read(stores.open(parse_target("s3://nowhere/m.mar")))


def test_a_version_of_an_object_can_be_named() -> None:
    """As S3 has it in its own addresses."""
    with odd_store(an_object(b"old")) as store:
        stores = stores_of({"s3://": {"endpoint_url": store.url}}, KEYS)
        source = stores.open(parse_target("s3://bucket/m.mar?versionId=3HL4kqtJ"))

        assert (source.stat().size, read(source)) == (3, b"old")
        assert [asked.target for asked in store.asked] == ["/bucket/m.mar?versionId=3HL4kqtJ"] * 2
        assert source.file_name == "m.mar"


def test_objects_are_written_where_nobody_else_did(s3: S3Server, bucket: Bucket) -> None:
    """Compare-and-swap on the ETag, and a new object only where none is."""
    source = in_moto(s3).open(parse_target(f"s3://{bucket.name}/models.yaml"))

    first = source.write(b"one", is_new=True)
    second = source.write(b"two", first)

    assert read(source) == b"two"
    assert source.stat().etag == second.etag
    with pytest.raises(Replaced):
        source.write(b"three", first)
    with pytest.raises(Replaced):
        source.write(b"three", is_new=True)
    assert read(source) == b"two"
    source.write(b"four")
    assert read(source) == b"four"


# --------------------------------------------------------------------------------------------------- listings


def test_a_listing_tells_every_key_with_the_prefix(s3: S3Server, bucket: Bucket) -> None:
    """Also where the prefix ends within a name; what it tells can be opened."""
    etags = {key: bucket.put(key, key.encode()) for key in ("a/m1.mar", "a/m2.mar", "a/b/m3.mar", "am.mar", "a/x.txt")}
    listing = in_moto(s3).list_at(parse_target(f"s3://{bucket.name}/a/m"))

    found = {entry.key: entry for entry in listing.list()}

    assert set(found) == {"a/m1.mar", "a/m2.mar"}
    assert found["a/m1.mar"].etag == etags["a/m1.mar"]
    assert {entry.key for entry in listing.list("a/b")} == {"a/b/m3.mar"}
    assert read(listing.open(found["a/m2.mar"]), 0, None, found["a/m2.mar"]) == b"a/m2.mar"
    assert listing.open(found["a/m2.mar"]).stat().is_of(found["a/m2.mar"])


def test_a_key_that_cannot_be_listed_is_told(s3: S3Server, bucket: Bucket) -> None:
    """And a longer prefix leaves it out; other odd keys are listed and opened as they are."""
    keys = {"a/m.mar": "a/m.mar", "a/x%2520y+%C3%BC%3F%23.mar": "a/x%20y+ü?#.mar"}
    for escaped in (*keys, "b//m.mar"):
        bucket.put(escaped.replace("+", "%2B"), b"x")
    listing = in_moto(s3).list_at(parse_target(f"s3://{bucket.name}/a/m"))

    found = list(listing.list("a/"))

    assert {entry.key for entry in found} == set(keys.values())
    assert all(listing.open(entry).stat().is_of(entry) for entry in found)
    with pytest.raises(Failed, match="a key below it has an empty part"):
        list(listing.list("b/"))


def test_a_listing_has_one_request_for_a_thousand_keys() -> None:
    """And ends with the last page."""
    keys = [f"m/{number:05d}.mar" for number in range(2_500)]

    def page(handler: BaseHTTPRequestHandler) -> None:
        begin = int(handler.path.partition("continuation-token=")[2].partition("&")[0] or 0)
        inner = "".join(
            f"<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;{key}&quot;</ETag><Size>1</Size></Contents>"
            for key in keys[begin : begin + 1000]
        )
        more = f"<NextContinuationToken>{begin + 1000}</NextContinuationToken>" if begin + 1000 < len(keys) else ""
        body = f"<ListBucketResult>{more}{inner}</ListBucketResult>".encode()
        handler.send_response(200)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    with odd_store(page) as store:
        stores = stores_of({"s3://": {"endpoint_url": store.url}}, KEYS)

        found = list(stores.list_at(parse_target("s3://bucket/m/x")).list("m/"))

        assert [entry.key for entry in found] == keys
        assert len(store.asked) == 3


# ------------------------------------------------------------------------------------- what the operator said


def test_requests_are_signed_with_the_stores_own_key() -> None:
    """And with nothing of the environment's: a token of other credentials would spoil the signature."""
    environment = {"AWS_ACCESS_KEY_ID": "AKIAENV", "AWS_SECRET_ACCESS_KEY": "x", "AWS_SESSION_TOKEN": "env-token"}
    with odd_store(an_object(b"x")) as store:
        mine = {"endpoint_url": store.url, "access_key_id": "AKIAMINE", "secret_access_key": SECRET, "region": "mars-1"}
        stores = stores_of({"s3://bucket/": mine, "s3://": {"endpoint_url": store.url}}, environment)

        stores.open(parse_target("s3://bucket/m.mar")).stat()
        stores.open(parse_target("s3://other/m.mar")).stat()

        first, second = (asked.headers for asked in store.asked)
    assert "Credential=AKIAMINE/" in first["authorization"]
    assert "/mars-1/s3/" in first["authorization"]
    assert "x-amz-security-token" not in first
    assert "Credential=AKIAENV/" in second["authorization"]
    assert second["x-amz-security-token"] == "env-token"


def test_the_processes_own_variables_do_not_come_in_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library would read them: an endpoint, a key, a token. What counts is what is passed on."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-another")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    with odd_store(an_object(b"x")) as store:
        at(store).stat()

        [asked] = store.asked
    assert "Credential=AKIAPLANTED/" in asked.headers["authorization"]
    assert "x-amz-security-token" not in asked.headers


def test_an_empty_variable_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a compose file sets those that it was not given. The library panics at the address, and refuses the flag."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_UNSIGNED_PAYLOAD"):
        monkeypatch.setenv(name, "")
    with odd_store(an_object(b"x")) as store:
        assert read(at(store)) == b"x"


def test_a_public_bucket_is_asked_without_a_signature() -> None:
    """Though there are credentials."""
    with odd_store(an_object(b"x")) as store:
        at(store, anonymous=True).stat()

        assert "authorization" not in store.asked[0].headers


def test_whoever_reads_pays_where_it_is_said() -> None:
    """In a header of each request, which is signed."""
    with odd_store(an_object(b"x")) as store:
        source = at(store, requester_pays=True)
        source.stat()
        read(source)
        at(store).stat()

        pays = [asked.headers.get("x-amz-request-payer") for asked in store.asked]
    assert pays == ["requester", "requester", None]


def test_a_customers_key_is_sent_with_each_reading() -> None:
    """SSE-C: the store cannot decrypt without it."""
    key = "a2V5IG9mIHRoaXJ0eS10d28gYnl0ZXMgZXhhY3RseS4="
    with odd_store(an_object(b"x")) as store:
        source = at(store, sse_customer_key=key)
        source.stat()
        read(source)

        assert [asked.headers.get("x-amz-server-side-encryption-customer-key") for asked in store.asked] == [key, key]


def test_kms_is_asked_for_nothing_when_reading() -> None:
    """S3 decrypts for who may, and refuses reads that name a key; each request has a signature of version 4."""
    with odd_store(an_object(b"x")) as store:
        source = at(store, kms_key_id="arn:aws:kms:eu-west-1:1:key/k")
        source.stat()
        read(source)
        source.write(b"x")

        *reads, write = (asked.headers for asked in store.asked)
    for headers in reads:
        assert headers["authorization"].startswith("AWS4-HMAC-SHA256")
        assert not [name for name in headers if "encryption" in name]
    assert write["x-amz-server-side-encryption"] == "aws:kms"
    assert write["x-amz-server-side-encryption-aws-kms-key-id"] == "arn:aws:kms:eu-west-1:1:key/k"


def test_buckets_stand_in_the_path_or_in_the_host() -> None:
    """In the path for endpoints of one's own, unless it is said otherwise."""
    with odd_store(an_object(b"x")) as store:
        at(store).stat()
        virtual = store.url.replace("127.0.0.1", "localhost")
        stores = stores_of({"s3://": {"endpoint_url": virtual, "addressing_style": "virtual"}}, KEYS)
        with contextlib.suppress(Broken):  # where bucket.localhost has no address
            stores.open(parse_target("s3://bucket/m.mar")).stat()

        assert store.asked[0].target == "/bucket/m.mar"
        for asked in store.asked[1:]:
            assert asked.target == "/m.mar"
            assert asked.headers["host"].startswith("bucket.localhost")


def test_an_authority_of_ones_own_is_trusted_where_it_is_named(tmp_path: Path) -> None:
    """By `ca_bundle`, or by AWS's variable; without either the sentence says what to do."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    bundle = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(bundle)
    with odd_store(an_object(b"x"), context) as store:
        environment = {**KEYS, "AWS_CA_BUNDLE": str(bundle), "AWS_ENDPOINT_URL": store.url}

        assert at(store, ca_bundle=str(bundle)).stat().size == 1
        assert ObjectStores(environment=environment).open(parse_target("s3://bucket/m.mar")).stat().size == 1
        with pytest.raises(Failed, match="certificate is not trusted; name its authority's with ca_bundle"):
            at(store).stat()


def test_requests_go_through_the_proxy_that_is_named() -> None:
    """With its credentials, which nothing tells."""
    with odd_store(an_object(b"x")) as proxy:
        options = {"endpoint_url": "http://store.invalid", "proxy_url": proxy.url.replace("//", f"//user:{SECRET}@")}
        source = stores_of({"s3://": options}, KEYS).open(parse_target("s3://bucket/m.mar"))

        assert source.stat().size == 1
        assert proxy.asked[0].target == "http://store.invalid/bucket/m.mar"
        assert "proxy-authorization" in proxy.asked[0].headers

        proxy.answer = trouble(407)
        with pytest.raises(SourceError) as refused:
            source.stat()
        assert SECRET not in str(refused.value)


def test_the_environments_proxy_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As everybody's; hosts of `NO_PROXY` are asked without it."""
    with odd_store(an_object(b"x")) as proxy, odd_store(an_object(b"xx")) as store:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        stores = stores_of({"s3://": {"endpoint_url": "http://store.invalid"}}, KEYS)

        assert stores.open(parse_target("s3://bucket/m.mar")).stat().size == 1
        assert at(store).stat().size == 2
        assert [asked.target for asked in proxy.asked] == ["http://store.invalid/bucket/m.mar"]


def test_settings_that_cannot_be_are_told_when_an_address_is_opened(tmp_path: Path) -> None:
    """As sentences, whatever the library thinks of them."""
    (tmp_path / "bad.pem").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"access_key_id": "A"}, "one of access_key_id and secret_access_key for s3://bucket/, and not both"),
        ({"access_key_id": "A", "secret_access_key": {"env": "NO"}}, "the variable NO, which is not set"),
        ({"ca_bundle": str(tmp_path / "none.pem")}, "the file of ca_bundle cannot be read"),
        ({"ca_bundle": str(tmp_path / "bad.pem")}, "the certificates of ca_bundle cannot be read as PEM"),
        ({"profile": "nobody"}, "have no profile nobody"),
    ]
    for options, words in wrong:
        stores = stores_of({"s3://bucket/": options}, {"HOME": str(tmp_path)})
        with pytest.raises(Failed, match=words):
            stores.open(parse_target("s3://bucket/m.mar"))


# ------------------------------------------------------------------------------------------------- troubles


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (
            trouble(403, "AccessDenied"),
            Failed,
            "access was denied .403 AccessDenied., or nothing is there; credentials: AWS_",
        ),
        (
            trouble(403, "SignatureDoesNotMatch", f"<StringToSign>{SECRET}</StringToSign>"),
            Failed,
            "SignatureDoesNotMatch",
        ),
        (trouble(403, "RequestTimeTooSkewed"), Failed, "the clock of this machine is wrong"),
        (trouble(401), Failed, "access was denied .401."),
        (trouble(404, "NoSuchKey"), Missing, "there is no such object"),
        (trouble(404, "NoSuchBucket"), Failed, "there is no bucket bucket"),
        (trouble(412, "PreconditionFailed"), Replaced, "replaced"),
        (
            trouble(400, "AuthorizationHeaderMalformed", "<Region>eu-north-1</Region>"),
            Failed,
            "in the region eu-north-1; set",
        ),
        (trouble(301, "PermanentRedirect"), Failed, "in another region"),
        (trouble(400, "InvalidRequest"), Failed, "the answer was 400 InvalidRequest"),
        (trouble(429), Broken, "the answer was 429"),
        (trouble(500, "InternalError"), Broken, "the answer was 500 InternalError"),
        (trouble(503, "SlowDown"), Broken, "the answer was 503 SlowDown"),
        (trouble(504), Broken, "the answer was 504"),
    ],
)
def test_every_answer_is_a_trouble_of_its_kind(answer: Any, kind: type[SourceError], words: str) -> None:
    """Tried again or not is told by the type; no key, signature or address of the request is in the sentence."""
    with odd_store(answer) as store:
        source = at(store)

        with pytest.raises(kind, match=words) as refused:
            read(source, 0, 10)
        assert type(refused.value) is kind

    assert len(store.asked) == 1  # whoever downloads tries again, nobody below
    for hidden in (SECRET, "AKIAPLANTED", "Signature=", store.url):
        assert hidden not in str(refused.value)
    assert refused.value.__context__ is None


def test_nobody_there_is_broken() -> None:
    """And told as what it was."""
    [port] = free_ports(1)
    stores = stores_of({"s3://": {"endpoint_url": f"http://127.0.0.1:{port}"}}, KEYS)

    with pytest.raises(Broken, match="the connection was refused"):
        stores.open(parse_target("s3://bucket/m.mar")).stat()


def test_a_host_without_an_address_is_broken() -> None:
    """It may have one later."""
    stores = stores_of({"s3://": {"endpoint_url": "http://store.invalid"}}, KEYS)

    with pytest.raises(Broken, match="no address"):
        stores.open(parse_target("s3://bucket/m.mar")).stat()


def test_a_cut_answer_is_broken_behind_what_came() -> None:
    """So that it goes on from there."""

    def cut(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        for name, value in (
            ("content-length", "1000"),
            ("etag", '"1"'),
            ("last-modified", MODIFIED),
        ):
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(b"x" * 400)

    with odd_store(cut) as store:
        have = 0
        with pytest.raises(Broken, match="the connection was cut"), at(store).read(0, None) as reading:  # noqa: PT012
            for piece in reading:
                have += len(piece)

    assert have == 400


def _stuck(event: threading.Event, *, after_header: bool) -> Any:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        if after_header:
            handler.send_response(200)
            for name, value in (
                ("content-length", "1000"),
                ("etag", '"1"'),
                ("last-modified", MODIFIED),
            ):
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(b"x" * 10)
            handler.wfile.flush()
        event.wait(30)

    return answer


@pytest.mark.parametrize("after_header", [False, True])
def test_silence_is_broken_in_time(after_header: bool) -> None:
    """Before the header, and in the middle of the body."""
    released = threading.Event()
    with odd_store(_stuck(released, after_header=after_header)) as store:
        begun = time.monotonic()
        with pytest.raises(Broken, match=r"it said nothing for|no answer for"):
            read(at(store, 0.3))
        released.set()

    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("after_header", [False, True])
def test_closing_ends_who_reads_at_once(after_header: bool) -> None:
    """Within a second, whatever the origin does; and what is opened later gets the same answer."""
    released = threading.Event()
    with odd_store(_stuck(released, after_header=after_header)) as store:
        source = at(store)
        found: list[BaseException] = []

        def reader() -> None:
            try:
                read(source)
            except SourceError as error:
                found.append(error)

        thread = threading.Thread(target=reader)
        thread.start()
        for _ in poll(10, "the store is asked"):
            if store.asked:
                break
        begun = time.monotonic()
        source.close()
        thread.join(5)
        took = time.monotonic() - begun
        released.set()

        assert (not thread.is_alive(), took < 3.0) == (True, True)  # the promise is a second
        assert [type(error) for error in found] == [Failed]
        with pytest.raises(Failed):
            source.stat()
        source.close()


def test_a_reading_that_is_left_early_ends_in_the_process_too() -> None:
    """The thread that fetches ends when the block does, though the object is larger than what is read ahead."""
    with odd_store(an_object(b"x" * 30_000_000)) as store:
        source = at(store)
        with source.read(0, None) as reading:
            next(iter(reading))
            during = threads_of(source)

        for _ in poll(10, "the thread has ended"):
            if threads_of(source) < during:
                break
        source.close()


def test_what_is_read_ahead_is_bounded() -> None:
    """A reader that is slow holds up the origin, not the memory."""
    sent = 0

    def endless(handler: BaseHTTPRequestHandler) -> None:
        nonlocal sent
        an_object(b"")  # only the header's shape
        handler.send_response(200)
        for name, value in (
            ("content-length", str(10**9)),
            ("etag", '"1"'),
            ("last-modified", MODIFIED),
        ):
            handler.send_header(name, value)
        handler.end_headers()
        try:
            while sent < 10**9:
                sent += handler.wfile.write(b"x" * 100_000)
        except OSError:
            return

    with odd_store(endless) as store, at(store).read(0, None) as reading:
        next(iter(reading))
        settled = -1
        for _ in poll(20, "the origin is held up"):
            if sent == settled:
                break
            settled = sent
            time.sleep(0.3)

        assert sent < 60_000_000


def test_without_the_extra_the_sentence_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the command."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)

    with pytest.raises(Failed, match=r"need the extra cloud: obstore .*; pip install 'marserve\[cloud\]'"):
        ObjectStores(environment=KEYS).open(parse_target("s3://bucket/m.mar"))


def test_no_credentials_anywhere_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the machine's own were looked for, where they would be, and not found."""
    with odd_store(trouble(404)) as machine:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", machine.url)  # as the library reads it
        stores = stores_of({"s3://": {"endpoint_url": "http://127.0.0.1:9"}}, {"HOME": "/nonexistent"})

        with pytest.raises(Failed, match="no credentials were found"):
            stores.open(parse_target("s3://bucket/m.mar")).stat()


def test_a_machine_that_is_busy_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its role may be there the next time."""
    with odd_store(trouble(503)) as machine:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", machine.url)
        stores = stores_of({"s3://": {"endpoint_url": "http://127.0.0.1:9"}}, {"HOME": "/nonexistent"})

        with pytest.raises(Broken, match=r"own role could not be asked for .503."):
            stores.open(parse_target("s3://bucket/m.mar")).stat()


def test_the_role_of_the_machine_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the instance's own service tells, as long as nothing else names credentials."""
    role = {
        "AccessKeyId": "AKIAROLE",
        "SecretAccessKey": "s",
        "Token": "role-token",
        "Code": "Success",
        "LastUpdated": "2026-01-01T00:00:00Z",
        "Expiration": "2099-01-01T00:00:00Z",
        "Type": "AWS-HMAC",
    }

    def machine(handler: BaseHTTPRequestHandler) -> None:
        body = b"a-session" if handler.command == "PUT" else json.dumps(role).encode()
        if handler.path.endswith("/security-credentials/"):
            body = b"the-role"
        handler.send_response(200)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    with odd_store(machine) as instance, odd_store(an_object(b"x")) as store:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", instance.url)
        stores = stores_of({"s3://": {"endpoint_url": store.url}}, {"HOME": "/nonexistent"})

        assert stores.open(parse_target("s3://bucket/m.mar")).stat().size == 1

        assert "Credential=AKIAROLE/" in store.asked[0].headers["authorization"]
        assert store.asked[0].headers["x-amz-security-token"] == "role-token"


# ------------------------------------------------------------------------------------------------------ Google


def test_a_bucket_of_googles_is_read(s3: S3Server, bucket: Bucket, tmp_path: Path) -> None:
    """By a service account's file that names its endpoint, by `endpoint_url`, and by the emulator's variable."""
    data = os.urandom(100_000)
    bucket.put("m.mar", data)
    account = {
        "gcs_base_url": s3.url,
        "disable_oauth": True,
        "client_email": "",
        "private_key": "",
        "private_key_id": "",
    }
    (tmp_path / "account.json").write_text(json.dumps(account))
    target = parse_target(f"gcs://{bucket.name}/m.mar")
    ways = [
        stores_of({"gs://": {"credentials_file": str(tmp_path / "account.json")}}),
        stores_of({"gs://": {"credentials": json.dumps(account)}}),
        ObjectStores(environment={"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "account.json")}),
        stores_of({"gs://": {"endpoint_url": s3.url, "anonymous": True}}),
        ObjectStores(environment={"STORAGE_EMULATOR_HOST": s3.url.removeprefix("http://")}),
    ]

    for stores in ways:
        source = stores.open(target)
        entry = source.stat()
        assert (entry.size, read(source, 100, 50_000, entry)) == (len(data), data[100:50_000])
    assert [entry.key for entry in ways[0].list_at(target).list("m")] == ["m.mar"]


def test_google_is_told_who_pays_and_the_token() -> None:
    """The project in a header of each request."""
    with odd_store(an_object(b"x")) as store:
        options = {"endpoint_url": store.url, "billing_project": "my-project", "bearer_token": SECRET}
        source = stores_of({"gs://": options}).open(parse_target("gs://bucket/m.mar?generation=17"))

        assert source.stat().size == 1
        [asked] = store.asked
    assert asked.headers["x-goog-user-project"] == "my-project"
    assert asked.headers["authorization"] == f"Bearer {SECRET}"
    assert "generation=17" in asked.target


def test_a_document_that_is_no_account_is_told_without_it(tmp_path: Path) -> None:
    """It may be a secret of another kind."""
    (tmp_path / "key").write_text(SECRET)
    for options in ({"credentials": SECRET}, {"credentials_file": str(tmp_path / "key")}):
        with pytest.raises(Failed, match="holds no JSON of a service account") as refused:
            stores_of({"gs://": options}).open(parse_target("gs://bucket/m.mar"))
        assert SECRET not in str(refused.value)


# ------------------------------------------------------------------------------------------------------- Azure


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """azurite with a container that has one blob."""
    import obstore

    with azure_server(tmp_path_factory.mktemp("azurite")) as server:
        container = server.container("models")
        obstore.put(container, "a/m.mar", b"of azure" * 1000)
        yield server


def test_a_container_of_azures_is_read(azure: Any) -> None:
    """By key, by connection string, and by the variables of its own tools."""
    data = b"of azure" * 1000
    connection = (
        f"DefaultEndpointsProtocol=http;AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY};BlobEndpoint={azure.url}"
    )
    endpoint = {"endpoint_url": azure.url}
    ways = [
        stores_of({"az://models/": {**endpoint, "account_name": AZURE_ACCOUNT, "account_key": AZURE_KEY}}),
        stores_of({"az://": {"connection_string": connection}}),
        ObjectStores(environment={"AZURE_STORAGE_CONNECTION_STRING": connection}),
        ObjectStores(
            environment={
                "AZURE_STORAGE_ACCOUNT": AZURE_ACCOUNT,
                "AZURE_STORAGE_KEY": AZURE_KEY,
                "AZURE_STORAGE_ENDPOINT": azure.url,
            }
        ),
    ]

    for stores in ways:
        source = stores.open(parse_target("az://models/a/m.mar"))
        entry = source.stat()
        assert (entry.size, read(source, 8, None, entry)) == (len(data), data[8:])
    listed = list(ways[0].list_at(parse_target("az://models/a/x")).list("a/"))
    assert [entry.is_of(entry_) for entry, entry_ in zip(listed, [entry], strict=True)] == [True]
    with pytest.raises(Replaced):
        read(source, 0, 4, Entry("a/m.mar", len(data), '"0x1"'))
    with pytest.raises(Missing):
        ways[0].open(parse_target("az://models/none.mar")).stat()
    with pytest.raises(Failed, match="there is no bucket nowhere"):
        read(ways[2].open(parse_target("az://nowhere/m.mar")))


def test_a_signature_of_azures_is_in_no_sentence(azure: Any) -> None:
    """It travels in the query of each request, which the library's own messages quote."""
    options = {"endpoint_url": azure.url, "account_name": AZURE_ACCOUNT, "sas_token": f"?sv=2023-11-03&sig={SECRET}"}
    source = stores_of({"az://": options}).open(parse_target("az://models/a/m.mar"))

    with pytest.raises(Failed, match="access was denied") as refused:
        source.stat()
    assert SECRET not in str(refused.value)


def test_credentials_are_sent_to_their_own_account_alone() -> None:
    """An address that names another account than the credentials are for is refused; options of its own allow it."""
    environment = {"AZURE_STORAGE_ACCOUNT_NAME": "mine", "AZURE_STORAGE_KEY": AZURE_KEY}
    other = parse_target("abfss://models@other.dfs.core.windows.net/m.mar")
    with odd_store(an_object(b"x")) as store:
        own = {"az://models@other/": {"endpoint_url": store.url, "account_name": "other", "account_key": AZURE_KEY}}

        with pytest.raises(Failed, match="the credentials are for the account mine"):
            ObjectStores(environment=environment).open(other)
        assert stores_of(own, environment).open(other).stat().size == 1
        assert store.asked[0].target == "/models/m.mar"
    with pytest.raises(Failed, match="no storage account is named"):
        ObjectStores().open(parse_target("az://models/m.mar"))


def test_an_error_of_the_library_that_is_unknown_is_told_by_its_type() -> None:
    """Never by its text."""
    told = explain(RuntimeError(SECRET), "s3", "bucket", "none")

    assert (type(told), str(told)) == (Broken, "S3: the request failed (RuntimeError)")


@pytest.mark.parametrize(
    ("scheme", "bytes_", "sentence"),
    [
        ("http", b"SECRET planted-secret\r\n\r\n", "the request failed (error sending request, Parse, Version)"),
        (
            "http",
            f'HTTP/1.1 200 OK\r\netag: "planted-secret"\r\nlast-modified: {MODIFIED}\r\n\r\n'.encode(),
            "the request failed (Content-Length Header missing from response, MissingContentLength)",
        ),
        (
            "https",
            b"HTTP/1.1 400 planted-secret\r\n\r\n",
            "it does not speak TLS; name it with http:// in endpoint_url",
        ),
    ],
    ids=["no HTTP", "no length", "no TLS"],
)
def test_the_librarys_reason_is_told_in_its_plain_words(scheme: str, bytes_: bytes, sentence: str) -> None:
    """What the origin sent, and what the address holds, is not among them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(bytes_)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1 << 16)

        thread = threading.Thread(target=answer)
        thread.start()
        options = {"endpoint_url": f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"}
        source = stores_of({"s3://bucket/": options}, KEYS).open(parse_target("s3://bucket/m.mar"))
        with pytest.raises((Broken, Failed)) as told:
            source.stat()
        thread.join()

    assert str(told.value) == f"S3: {sentence}"


def test_a_service_accounts_broken_key_is_named() -> None:
    """Not the certificates of ca_bundle, though both are PEM."""
    account = {"type": "service_account", "client_email": "a@b", "private_key_id": "x", "private_key": SECRET}
    stores = stores_of({"gs://bucket/": {"credentials": json.dumps(account)}})

    with pytest.raises(Failed, match="the private key of the service account cannot be read") as refused:
        stores.open(parse_target("gs://bucket/m.mar"))
    assert SECRET not in str(refused.value)


def test_googles_emulator_beside_credentials_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """It gets a token, or the credentials are not used: neither is what one expects of production's settings."""
    emulator = {"STORAGE_EMULATOR_HOST": "localhost:4443"}
    target = parse_target("gs://bucket/m.mar")
    ours = stores_of({"gs://bucket/": {"bearer_token": SECRET}}, emulator)
    ours.open(target)
    ours.open(target)
    ObjectStores(environment={**emulator, "GOOGLE_APPLICATION_CREDENTIALS": "key.json"}).open(target)
    ObjectStores(environment=emulator).open(target)

    assert [record.getMessage() for record in caplog.records] == [
        "STORAGE_EMULATOR_HOST is set beside credentials of Google's: gs://bucket is asked of http://localhost:4443, "
        + rest
        for rest in ("which gets a token made of them", "without them")
    ]


# ------------------------------------------------------------------------------- stores that misbehave, downloaded


def misbehaving(data: bytes, *troubles: Any) -> Any:
    """An object whose first requests go wrong: a status, or a number of bytes after which the connection ends."""
    waiting = list(troubles)
    lock = threading.Lock()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        with lock:
            now = waiting.pop(0) if waiting else None
        if isinstance(now, int) and now < 1000:
            trouble(now, "SlowDown")(handler)
            return
        if now is None:
            an_object(data)(handler)
            return
        begin, _, last = handler.headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")
        part = data[int(begin) : int(last) + 1 if last else len(data)]
        handler.send_response(206)
        handler.send_header("content-length", str(len(part)))
        handler.send_header("content-range", f"bytes {begin}-{int(begin) + len(part) - 1}/{len(data)}")
        handler.send_header("etag", '"1"')
        handler.send_header("last-modified", MODIFIED)
        handler.end_headers()
        handler.wfile.write(part[:now])

    return answer


@pytest.mark.parametrize("connections", [1, 4])
def test_a_download_outlives_cuts_and_busy_answers(tmp_path: Path, connections: int) -> None:
    """It goes on where it ended, and is what the store has."""
    data = os.urandom(6_000_000)
    options = DownloadOptions(connections=connections, first_part_bytes=1_000_000, first_pause_s=0.01)
    with odd_store(misbehaving(data, 503, 400_000, 500)) as store, (tmp_path / "m").open("w+b") as file:
        done = download(at(store), file.fileno(), options, cancel=Cancel())

    assert (tmp_path / "m").read_bytes() == data
    assert done.entry.etag == '"1"'


def test_an_object_that_is_replaced_meanwhile_is_begun_anew(tmp_path: Path) -> None:
    """Never a file of two."""
    first, second = b"1" * 3_000_000, b"2" * 3_000_000
    with odd_store(an_object(first)) as store, (tmp_path / "m").open("w+b") as file:

        def once(handler: BaseHTTPRequestHandler) -> None:
            store.answer = an_object(second, '"2"')  # before the client can ask again
            an_object(first)(handler)

        store.answer = once
        options = DownloadOptions(connections=1, first_part_bytes=1_000_000, first_pause_s=0.01)
        done = download(at(store), file.fileno(), options, cancel=Cancel())

    assert (tmp_path / "m").read_bytes() == second
    assert done.entry.etag == '"2"'


def test_a_refusal_is_not_asked_for_again(tmp_path: Path) -> None:
    """Once is enough."""
    with odd_store(trouble(403, "AccessDenied")) as store, (tmp_path / "m").open("w+b") as file:
        with pytest.raises(Failed, match="access was denied"):
            download(at(store), file.fileno(), DownloadOptions(first_pause_s=0.01), cancel=Cancel())

        assert len(store.asked) == 1


def test_of_a_long_answer_only_the_beginning_is_looked_at() -> None:
    """The library's error holds all that a store answered; statuses and codes stand at its beginning."""
    begun = "Server returned non-2xx status code: 404 Not Found: <Error><Code>"

    near = explain(OSError(f"{begun}NoSuchBucket</Code>" + "x" * 1000), "s3", "bucket", "none")
    far = explain(OSError(begun + "x" * TEXT_CHARACTERS + "<Code>NoSuchBucket</Code>"), "s3", "bucket", "none")

    assert str(near) == "S3: there is no bucket bucket"
    assert str(far) == "S3: the answer was 404"
