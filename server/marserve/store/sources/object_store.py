"""Objects in S3, Google Cloud Storage and Azure Blob Storage, by obstore (extra `cloud`).

The library is imported when the first such address is opened, and then checks the settings. It asks stores in processes
of their own (`object_process`): a long answer takes no memory and no event loop time of the server, and a call that
hangs ends with its process. A new store also needs its scheme and options in `settings/stores.py`, its
address in `store/addresses/object_address.py` and `store/addresses/fetch_guard.py`, and lines in `object_settings.py`,
`object_program.py` and `object_errors.py` beside this.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

from marserve.errors import BadSettings
from marserve.optional import trouble
from marserve.settings.stores import NO_STORES, StoreOptions, Stores
from marserve.store.addresses.fetch_guard import Target, hide_query
from marserve.store.sources.object_errors import NAMES, text_of
from marserve.store.sources.object_process import Answer, Asking, StoreProcess
from marserve.store.sources.object_settings import (
    CONNECT_S,
    SILENCE_S,
    Connection,
    connect_az,
    connect_gs,
    connect_s3,
)
from marserve.store.sources.source import Entry, Failed, SourceError

# The parameter of an address that names one version of an object.
VERSIONS = {"s3": "versionId", "gs": "generation", "az": "versionid"}
# How the names of the variables begin that the library reads.
VARIABLES = ("AWS_", "AZURE_", "GOOGLE_")

log = logging.getLogger("marserve.store")


class ObjectStores:
    """Opens objects and listings by the operator's settings, and for the rest by `environment`."""

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
        """The object of an allowed address. Sends no request. Raises Failed for wrong settings."""
        connection = self._connect(target)
        version = dict(parse_qsl(target.query.removeprefix("?"))).get(VERSIONS[target.scheme])
        return ObjectSource(target, self._process(target, connection), connection.place, version)

    def list_at(self, target: Target) -> ObjectListing:
        """The objects below an allowed address, whose path is a prefix of keys. Sends no request."""
        connection = self._connect(target)
        return ObjectListing(target, self._process(target, connection), connection.place)

    def _process(self, target: Target, connection: Connection) -> StoreProcess:
        return StoreProcess(target.scheme, target.host, connection, self._silence_s + CONNECT_S)

    def _connect(self, target: Target) -> Connection:
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
            # Made only so that the library checks its settings; the store that asks is made in its own process.
            maker(
                config=connection.config,
                client_options=connection.client,
                **({"credential_provider": connection.provider} if connection.provider else {}),
            )
        except Exception as error:
            raise _settings_trouble(error, target) from None
        if connection.warning and connection.warning not in self._warned:
            self._warned.add(connection.warning)
            log.warning("%s", connection.warning)
        return connection


def _library(target: Target) -> Any:
    try:
        import obstore.store  # late: a server without such addresses does not need it
    except Exception as error:  # a broken installation may raise anything
        raise Failed(
            f"{target.scheme}:// addresses need the extra cloud: {trouble('cloud', error)}; "
            "pip install 'marserve[cloud]', then restart the server"
        ) from None
    _forget_empty_variables()
    return obstore.store


def _forget_empty_variables() -> None:
    """Delete this process's empty variables of the stores, also for the processes that ask: as AWS's own tools take it,
    empty is as good as unset. The library reads them by itself, refuses an empty flag, and panics at an empty address.
    """
    for name in [name for name, value in os.environ.items() if not value and name.startswith(VARIABLES)]:
        del os.environ[name]


def _settings_trouble(error: Exception, target: Target) -> Failed:
    """The library's error about its settings, by its type alone: its message may quote them."""
    text = text_of(error).lower()
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
                ("endpoint", "the endpoint is no address"),
                ("url", "the endpoint is no address"),
            )
            if sign in text
        ),
        "the library refuses the settings of the store",
    )
    return Failed(f"{NAMES[target.scheme]}: {what}")


class ObjectSource:
    """One object of a bucket. May be read from several threads at once; see `store.sources.source.Source`."""

    def __init__(self, target: Target, process: StoreProcess, place: str, version: str | None) -> None:
        self._asking = Asking(process)
        self._key = unquote(target.key)
        self._version = version
        self.shown = hide_query(target.url)
        self.identity = f"{target.url} at {place}"
        self.file_name = target.file_name

    def stat(self) -> Entry:
        """See `Source.stat`. One HEAD request."""
        with self._asking.ask("stat", key=self._key, version=self._version) as answer:
            return Entry(*answer.first["entry"])

    @contextmanager
    def read(self, begin: int, end: int | None, of: Entry | None = None) -> Iterator[ObjectReading]:
        """See `Source.read`. One GET request, which names the ETag of `of`."""
        known = None if of is None else (of.key, of.size, of.etag)
        question: dict[str, Any] = {"key": self._key, "version": self._version, "begin": begin, "end": end, "of": known}
        with self._asking.ask("read", **question) as answer:
            yield ObjectReading(Entry(*answer.first["entry"]), answer.first["begin"], answer)

    def write(self, data: bytes, of: Entry | None = None, *, is_new: bool = False) -> Entry:
        """Put `data` in its place, in one request: with `of` only if it is still that, with `is_new` only if missing.

        Raises Replaced if it is another one by now, and what `stat` raises.
        """
        mode: Any = "create" if is_new else "overwrite" if of is None else {"e_tag": of.etag}
        with self._asking.ask("write", data, key=self._key, mode=mode, bytes=len(data)) as answer:
            return Entry(*answer.first["entry"])

    def close(self) -> None:
        """See `Source.close`."""
        self._asking.close()


class ObjectReading:
    """Bytes of one object on their way; see `store.sources.source.Reading`."""

    def __init__(self, entry: Entry, begin: int, answer: Answer) -> None:
        self.entry = entry
        self.begin = begin
        self._answer = answer

    def __iter__(self) -> Iterator[bytes | memoryview]:
        """The bytes as they come."""
        return self._answer.pieces()


class ObjectListing:
    """The objects of a bucket whose keys begin with a prefix; see `store.sources.source.Listing`."""

    def __init__(self, target: Target, process: StoreProcess, place: str) -> None:
        self._target = target
        self._process = process
        self._place = place
        self._asking = Asking(process)
        self._prefix = unquote(target.key)
        self.shown = hide_query(target.url)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See `Listing.list`. `prefix` is a beginning of whole keys, as an entry's; one request for each 1,000 keys."""
        wanted = prefix or self._prefix
        # The library only knows prefixes that are whole folders.
        with self._asking.ask("list", folder=wanted.rpartition("/")[0]) as answer:
            for page in chain([answer.first or []], answer.rest()):
                for key, *rest in page:
                    if key.startswith(wanted):
                        yield Entry(key, *rest)

    def open(self, entry: Entry) -> ObjectSource:
        """The object of an entry. Sends no request."""
        target = Target(self._target.scheme, self._target.host, 0, f"/{quote(entry.key)}", "")
        return ObjectSource(target, self._process, self._place, None)

    def close(self) -> None:
        """See `Listing.close`."""
        self._asking.close()
