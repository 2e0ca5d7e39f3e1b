"""Objects in S3, Google Cloud Storage and Azure Blob Storage, by obstore (extra `cloud`).

The library is imported when the first such address is opened. Its calls cannot be taken back, so each runs on a thread
of its own that whoever waits can leave behind: a closed source answers at once, and the thread ends with its answer or
its time-out. The library's messages quote addresses with signatures and answers with keys in them: `explain` makes
sentences of what kind they are, and passes on no more than plain words of an unknown one.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn
from urllib.parse import parse_qsl, unquote

from marserve.errors import BadSettings
from marserve.optional import trouble
from marserve.settings.stores import NO_STORES, StoreOptions, Stores
from marserve.store.fetch_guard import Target, hide_query
from marserve.store.object_settings import (
    CONNECT_S,
    SILENCE_S,
    Connection,
    connect_az,
    connect_gs,
    connect_s3,
)
from marserve.store.source import Broken, Entry, Failed, Missing, Replaced, SourceError

# What is read ahead of who takes it.
AHEAD_BYTES = 2 * 1024 * 1024
PIECE_BYTES = 1024 * 1024
# Of a listing, in one answer of the library.
KEYS_AT_ONCE = 1000
# How an address names one version of an object.
VERSIONS = {"s3": "versionId", "gs": "generation", "az": "versionid"}
# A sentence of the library's own, in which headers may be named. Addresses, signatures and keys are no such words.
_WORD = r"(?:[A-Za-z]{1,20}|[A-Z][a-z]{1,20}-[A-Z][a-z]{1,20})"
_PLAIN_WORDS = re.compile(rf"{_WORD}(?:[,:]? {_WORD}){{1,15}}")
_PREFIX = re.compile(r"Generic [A-Za-z0-9]+ error: ")
# What its details call the trouble, the last the most exactly: `Parse(`, `source: BadScheme,`.
_KIND = re.compile(r"^ *(?:(?:source|error|kind): )?([A-Z][a-z]+(?:[A-Z][a-z]+)*)[,(]$", re.MULTILINE)
# How much of an error's text is looked at: statuses, codes and addresses stand at its beginning.
TEXT_CHARACTERS = 64 * 1024
NAMES = {"s3": "S3", "gs": "Google Cloud Storage", "az": "Azure"}

_STATUS = re.compile(r"status code: ([0-9]{3})|Client error with status ([0-9]{3})|status: ([0-9]{3}),")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,60})</Code>")
_REGION = re.compile(r"<Region>([a-z0-9\-]{4,30})</Region>")


log = logging.getLogger("marserve.store")


class ObjectStores:
    """Opens objects and listings of what the operator's settings say of stores; `environment` is read for the rest."""

    def __init__(
        self,
        stores: Stores = NO_STORES,
        environment: Mapping[str, str] | None = None,
        *,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._stores = stores
        self._environment = dict(environment or {})
        self._silence_s = silence_s
        self._warned: set[str] = set()

    def open(self, target: Target) -> ObjectSource:
        """The object of an address that is allowed. Asks the origin nothing. Raises Failed for wrong settings."""
        store, connection = self._connect(target)
        version = dict(parse_qsl(target.query.removeprefix("?"))).get(VERSIONS[target.scheme])
        return ObjectSource(target, store, connection, version, silence_s=self._silence_s)

    def list_at(self, target: Target) -> ObjectListing:
        """What is below an address that is allowed: its path is a prefix of keys. Asks the origin nothing."""
        store, connection = self._connect(target)
        return ObjectListing(target, store, connection, silence_s=self._silence_s)

    def _connect(self, target: Target) -> tuple[Any, Connection]:
        store_module = _library(target)
        options: StoreOptions = self._stores.choose(target.scheme, target.url)  # type: ignore[arg-type]
        try:
            if target.scheme == "s3":
                connection = connect_s3(target.host, options, self._environment, self._silence_s)
                maker = store_module.S3Store
            elif target.scheme == "gs":
                connection = connect_gs(target.host, options, self._environment, self._silence_s)
                maker = store_module.GCSStore
            else:
                container, _, account = target.host.partition("@")
                connection = connect_az(container, account or None, options, self._environment, self._silence_s)
                maker = store_module.AzureStore
        except BadSettings as error:
            raise Failed(error.message) from None
        except SourceError as error:
            raise Failed(f"{NAMES[target.scheme]}: {error}") from None
        try:
            store = maker(
                config=connection.config,
                client_options=connection.client,
                # Whoever downloads tries again, with bounds of its own.
                retry_config={"max_retries": 0},
                **({"credential_provider": connection.provider} if connection.provider else {}),
            )
        except Exception as error:
            raise _settings_trouble(error, target) from None
        if connection.warning and connection.warning not in self._warned:
            self._warned.add(connection.warning)
            log.warning("%s", connection.warning)
        return store, connection


def _library(target: Target) -> Any:
    try:
        import obstore.store  # late: a server without such addresses needs none of it
    except Exception as error:  # one that is broken raises what it likes
        raise Failed(
            f"{target.scheme}:// addresses need the extra cloud: {trouble('cloud', error)}; "
            "pip install 'marserve[cloud]', then restart the server"
        ) from None
    return obstore.store


def _settings_trouble(error: Exception, target: Target) -> Failed:
    """What the library has against its settings, by its kind alone: its words may quote them."""
    text = _text_of(error).lower()
    what = next(
        (
            what
            for sign, what in (
                ("cryptoprovider", "the private key of the service account cannot be read"),
                ("certificate", "the certificates of ca_bundle cannot be read as PEM"),
                ("pem", "the certificates of ca_bundle cannot be read as PEM"),
                ("proxy", "proxy_url is no address of a proxy"),
                ("base64", "a key that should be in base64 is not"),
                ("private key", "the private key of the service account cannot be read"),
                ("service account", "the JSON of the service account cannot be read"),
                ("credential", "the credentials cannot be read"),
                ("endpoint", "the endpoint is none"),
                ("url", "the endpoint is none"),
            )
            if sign in text
        ),
        "the library refuses the settings of the store",
    )
    return Failed(f"{NAMES[target.scheme]}: {what}")


class ObjectSource:
    """One object of a bucket. May be read from several threads at once; see `store.source.Source`."""

    def __init__(
        self, target: Target, store: Any, connection: Connection, version: str | None, *, silence_s: float
    ) -> None:
        self._target = target
        self._store = store
        self._connection = connection
        self._version = version
        self._key = unquote(target.key)
        self._errands = _Errands(silence_s + CONNECT_S)
        self.shown = hide_query(target.url)
        self.identity = f"{target.url} at {connection.place}"
        self.file_name = target.file_name

    def stat(self) -> Entry:
        """See `Source.stat`. One HEAD request."""
        import obstore

        options: Any = {"head": True}
        if self._version:
            options["version"] = self._version

        def ask(errand: _Errand) -> None:
            try:
                errand.begin(self._entry(obstore.get(self._store, self._key, options=options).meta), 0)
            except Exception as error:
                self._explain(error)

        with self._errands.run(ask) as errand:
            return errand.answer()[0]

    @contextmanager
    def read(self, begin: int, end: int | None, of: Entry | None = None) -> Iterator[ObjectReading]:
        """See `Source.read`. One GET request, which names the ETag of `of`."""
        import obstore

        options: Any = {}
        if end is not None:
            options["range"] = (begin, end)
        elif begin:
            options["range"] = {"offset": begin}
        if of is not None and of.etag is not None:
            options["if_match"] = of.etag
        if self._version:
            options["version"] = self._version

        def fetch(errand: _Errand) -> None:
            try:
                try:
                    answer = obstore.get(self._store, self._key, options=options)
                except Exception as error:
                    # An empty object has no ranges at all.
                    if begin or _status_of(error) != 416:
                        raise
                    options.pop("range", None)
                    answer = obstore.get(self._store, self._key, options=options)
                found = self._entry(answer.meta)
                if of is not None and not _is_same(found, of):
                    raise Replaced("it was replaced while it was fetched")
                first, behind = answer.range
                if not errand.begin(found, first):
                    return
                # As it comes: what was gathered would be lost with the connection.
                have = first
                for piece in answer.stream(min_chunk_size=1):
                    have += len(piece)
                    if not errand.add(piece):
                        return
                if have != behind:
                    raise Broken(f"it ended after {have} of {behind} bytes")
            except SourceError:
                raise
            except Exception as error:
                self._explain(error)

        with self._errands.run(fetch) as errand:
            entry, first = errand.answer()
            yield ObjectReading(entry, first, errand)

    def write(self, data: bytes, of: Entry | None = None, *, is_new: bool = False) -> Entry:
        """Put `data` in its place, in one request; with `of` only where it is still that, `is_new` where none is.

        Raises Replaced where it is another one by now, and what `stat` raises.
        """
        import obstore

        mode: Any = "create" if is_new else "overwrite" if of is None else {"e_tag": of.etag}

        def send(errand: _Errand) -> None:
            try:
                done = obstore.put(self._store, self._key, data, mode=mode, use_multipart=False)
                errand.begin(Entry(self._key, len(data), _strong(done["e_tag"])), 0)
            except Exception as error:
                if type(error).__name__ == "AlreadyExistsError":
                    raise Replaced("it is there already") from None
                self._explain(error)

        with self._errands.run(send) as errand:
            return errand.answer()[0]

    def close(self) -> None:
        """See `Source.close`."""
        self._errands.close()

    def _entry(self, meta: Any) -> Entry:
        return _entry_of(meta, self._key)

    def _explain(self, error: Exception) -> NoReturn:
        raise explain(error, self._target, self._connection.how) from None


class ObjectReading:
    """Bytes of one object on their way; see `store.source.Reading`."""

    def __init__(self, entry: Entry, begin: int, errand: _Errand) -> None:
        self.entry = entry
        self.begin = begin
        self._errand = errand

    def __iter__(self) -> Iterator[bytes | memoryview]:
        """The bytes as they come."""
        return self._errand.pieces()


class ObjectListing:
    """The objects of a bucket whose keys begin with a prefix; see `store.source.Listing`."""

    def __init__(self, target: Target, store: Any, connection: Connection, *, silence_s: float) -> None:
        self._target = target
        self._store = store
        self._connection = connection
        self._silence_s = silence_s
        self._errands = _Errands(silence_s + CONNECT_S)
        self._prefix = unquote(target.key)
        self.shown = hide_query(target.url)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See `Listing.list`. `prefix` is a beginning of whole keys, as an entry's; one request for each 1,000 keys."""
        import obstore

        wanted = prefix or self._prefix
        # The library knows prefixes of whole folders alone.
        folder = wanted.rpartition("/")[0]
        pages: Iterator[Any] | None = None

        def next_page(errand: _Errand) -> None:
            nonlocal pages
            try:
                if pages is None:
                    pages = iter(obstore.list(self._store, folder or None, chunk_size=KEYS_AT_ONCE))
                errand.say([_entry_of(meta, meta["path"]) for meta in next(pages, [])])
            except Exception as error:
                raise explain(error, self._target, self._connection.how) from None

        while True:
            with self._errands.run(next_page) as errand:
                found: list[Entry] = errand.told()
            if not found:
                return
            yield from (entry for entry in found if entry.key.startswith(wanted))

    def open(self, entry: Entry) -> ObjectSource:
        """The object of an entry. Asks the origin nothing."""
        from urllib.parse import quote

        target = Target(self._target.scheme, self._target.host, 0, f"/{quote(entry.key)}", "")
        return ObjectSource(target, self._store, self._connection, None, silence_s=self._silence_s)

    def close(self) -> None:
        """See `Listing.close`."""
        self._errands.close()


def _entry_of(meta: Any, key: str) -> Entry:
    modified = meta["last_modified"]
    return Entry(key, meta["size"], _strong(meta["e_tag"]), modified.timestamp() if modified is not None else None)


def _strong(tag: str | None) -> str | None:
    """An ETag with its quotes, which Azure's listings leave out; None for a weak one, which promises no equal bytes."""
    if not tag or tag.startswith("W/"):
        return None
    return tag if tag.startswith('"') else f'"{tag}"'


def _is_same(found: Entry, of: Entry) -> bool:
    return found.is_of(of) if of.etag is not None else of.size is None or found.size == of.size


# ---------------------------------------------------------------------------------------------------- what went wrong


def _text_of(error: Exception) -> str:
    """The beginning of the library's words: they hold the whole body that a store answered, however long."""
    return str(error)[:TEXT_CHARACTERS]


def _status_of(error: Exception) -> int | None:
    found = _STATUS.search(_text_of(error))
    return int(next(group for group in found.groups() if group)) if found else None


def explain(error: Exception, target: Target, how: str) -> SourceError:
    """What the library's error comes to; nothing of its text but statuses and codes is in the sentence.

    `how` says where the credentials come from.
    """
    text = _text_of(error)
    kind = type(error).__name__
    status = _status_of(error)
    code = _CODE.search(text)
    named = f"{status or ''}{' ' if status and code else ''}{code[1] if code else ''}"
    store = NAMES[target.scheme]
    if code and code[1] in ("NoSuchBucket", "ContainerNotFound"):
        return Failed(f"{store}: there is no bucket {target.host}")
    if isinstance(error, FileNotFoundError):
        return Missing(f"{store}: there is no such object")
    if kind in ("PreconditionError", "NotModifiedError"):
        return Replaced("it was replaced while it was fetched")
    if _has_no_credentials(text, target):
        if status is not None and (status in (408, 429) or status >= 500):
            return Broken(f"{store}: this machine's own role could not be asked for ({status})")
        return Failed(
            f"{store}: no credentials were found: neither stores nor the environment nor this machine's own role has "
            "any; anonymous in stores asks without"
        )
    if code and code[1] in ("RequestTimeTooSkewed", "RequestExpired"):
        return Failed(f"{store}: the clock of this machine is wrong, so its signatures are not taken ({named})")
    if kind in ("PermissionDeniedError", "UnauthenticatedError") or status in (401, 403):
        return Failed(f"{store}: access was denied ({named or kind}), or nothing is there; credentials: {how}")
    region = _REGION.search(text)
    if region or status in (301, 307) or "redirect without LOCATION" in text or "incorrectly configured region" in text:
        which = f"in the region {region[1]}" if region else "in another region than the one that is set"
        return Failed(f"{store}: the bucket is {which}; set region in stores, or AWS_REGION")
    if status is not None:
        if status in (408, 429) or status >= 500:
            return Broken(f"{store}: the answer was {named}")
        return Failed(f"{store}: the answer was {named}")
    if kind == "InvalidPathError":
        return Failed(
            f"{store}: a key below it has an empty part or a control character, and the library lists none beside "
            "such; take it away, or name a longer prefix"
        )
    if isinstance(error, ValueError):
        return Failed(f"{store}: the address holds no key that the store could have")
    if kind in ("NotSupportedError", "NotImplementedError"):
        return Failed(f"{store}: the store cannot do that")
    return _lost(error, store)


def _has_no_credentials(text: str, target: Target) -> bool:
    """Whether it was the machine's own credentials that were asked for, and none came."""
    signs = {
        "s3": ("/latest/api/token", "/latest/meta-data", "169.254.170.2", "MissingCredentials", "/v2/credentials"),
        "gs": ("metadata.google.internal", "/computeMetadata/", "169.254.169.254"),
        "az": ("/metadata/identity", "169.254.169.254", "/msi/token"),
    }[target.scheme]
    return any(sign in text for sign in signs)


def _lost(error: Exception, store: str) -> SourceError:
    """A connection that was none, or ended."""
    lower = str(error).lower()
    if any(
        sign in lower
        for sign in ("invalid peer certificate", "certificateerror", "unknownissuer", "certificate verify")
    ):
        return Failed(f"{store}: its certificate is not trusted; name its authority's with ca_bundle in stores")
    if "invalidcontenttype" in lower:
        return Failed(f"{store}: it does not speak TLS; name it with http:// in endpoint_url")
    for sign, what in (
        ("connection refused", "the connection was refused"),
        ("dns error", "its host has no address"),
        ("failed to lookup address", "its host has no address"),
        ("timedout", "it said nothing for too long"),
        ("timed out", "it said nothing for too long"),
        ("network is unreachable", "the network is unreachable"),
        ("connection reset", "the connection was cut"),
        ("incompletemessage", "the connection was cut"),
        ("incomplete message", "the connection was cut"),
        ("body", "the connection was cut"),
        ("decode", "the connection was cut"),
        ("connect", f"it could not be reached ({_reason(error)})"),
    ):
        if sign in lower:
            return Broken(f"{store}: {what}")
    return Broken(f"{store}: the request failed ({_reason(error)})")


def _reason(error: Exception) -> str:
    """What the library says in plain words of its own; the error's type alone where it has none."""
    if not type(error).__module__.startswith("obstore"):
        return type(error).__name__
    first, _, details = str(error).partition("\n")
    # Of `Error performing GET http://… in 2ms - HTTP error: error sending request` what follows the address.
    said = _PREFIX.sub("", first).rpartition(" - ")[2].removeprefix("HTTP error: ")
    parts = [said] if _PLAIN_WORDS.fullmatch(said) else [type(error).__name__]
    return ", ".join([*parts, *_KIND.findall(details)[-2:]])


# ------------------------------------------------------------------------------------------- calls that can be left


class _Errands:
    """The library's calls of one source. `limit_s` is how long each step of one may take."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._running: set[_Errand] = set()
        self._is_closed = False

    @contextmanager
    def run(self, work: Callable[[_Errand], None]) -> Iterator[_Errand]:
        """Have a thread do `work` while the block runs; it is left behind where the block ends first."""
        errand = _Errand(work, self._limit_s)
        with self._lock:
            if self._is_closed:
                raise Failed("the server stops")
            self._running.add(errand)
        try:
            errand.start()
            yield errand
        finally:
            with self._lock:
                self._running.discard(errand)
            errand.leave()

    def close(self) -> None:
        """End them all for whoever waits, and take no more."""
        with self._lock:
            self._is_closed = True
            running = list(self._running)
        for errand in running:
            errand.leave(Failed("the server stops"))


class _Errand(threading.Thread):
    """One call, and what it has brought so far. Its thread calls `begin` or `say` once, then `add`."""

    def __init__(self, work: Callable[[_Errand], None], limit_s: float) -> None:
        super().__init__(name="object store", daemon=True)
        self._work = work
        self._limit_s = limit_s
        self._changed = threading.Condition()
        self._told: Any = None
        self._is_told = False
        self._pieces: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._is_over = False
        self._error: SourceError | None = None
        self._is_left = False

    # ------------------------------------------------------------------------------------------- its own thread

    def run(self) -> None:
        """Do the work; its trouble becomes that of who waits."""
        error: SourceError | None = None
        try:
            self._work(self)
        except SourceError as trouble:
            error = trouble
        except BaseException as trouble:
            error = Failed(f"the object store's library failed ({type(trouble).__name__})")
        if error is not None:  # the library's own error holds all that was answered: it is not kept
            error.__context__ = None
            error.__traceback__ = None
        with self._changed:
            self._error = self._error or error
            self._is_over = True
            self._changed.notify_all()

    def begin(self, entry: Entry, first: int) -> bool:
        """Tell what the bytes are of; False where nobody waits for them."""
        return self.say((entry, first))

    def say(self, what: Any) -> bool:
        """Tell what was found; False where nobody waits for it."""
        with self._changed:
            self._told, self._is_told = what, True
            self._changed.notify_all()
            return not self._is_left

    def add(self, piece: bytes) -> bool:
        """Add bytes, when there is room; False where nobody waits for them."""
        with self._changed:
            while self._waiting_bytes >= AHEAD_BYTES and not self._is_left:
                self._changed.wait()
            self._pieces.append(piece)
            self._waiting_bytes += len(piece)
            self._changed.notify_all()
            return not self._is_left

    # ------------------------------------------------------------------------------------------------- who waits

    def leave(self, error: SourceError | None = None) -> None:
        """Nobody waits any more; with `error`, whoever does gets it. Its thread ends when the library lets it."""
        with self._changed:
            self._is_left = True
            self._error = self._error or error
            self._changed.notify_all()

    def told(self) -> Any:
        """What was found. Raises SourceError."""
        limit = time.monotonic() + self._limit_s
        with self._changed:
            while not self._is_told:
                self._check()
                if not self._changed.wait(max(0.0, limit - time.monotonic())):
                    raise Broken(f"there was no answer for {self._limit_s:g} s")
            return self._told

    def answer(self) -> tuple[Entry, int]:
        """The object, and where its bytes begin. Raises SourceError."""
        found: tuple[Entry, int] = self.told()
        return found

    def pieces(self) -> Iterator[bytes | memoryview]:
        """The bytes, as many at once as are there. Raises SourceError."""
        while True:
            with self._changed:
                limit = time.monotonic() + self._limit_s
                while not self._pieces and not self._is_over:
                    if self._is_left:
                        self._check()
                    if not self._changed.wait(max(0.0, limit - time.monotonic())):
                        raise Broken(f"it said nothing for {self._limit_s:g} s")
                if self._is_left:
                    self._check()
                if not self._pieces:
                    self._check()
                    return
                taken, self._pieces = self._pieces, deque()
                self._waiting_bytes = 0
                self._changed.notify_all()
            for piece in taken:
                if len(piece) <= PIECE_BYTES:
                    yield piece
                else:
                    view = memoryview(piece)
                    for begin in range(0, len(view), PIECE_BYTES):
                        yield view[begin : begin + PIECE_BYTES]

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._is_left:
            raise Failed("it was closed")
