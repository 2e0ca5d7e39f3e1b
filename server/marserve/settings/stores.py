"""The setting `stores`: the options of object stores by address, and the places of their secrets.

The setting is a JSON object of address prefixes, each with its options. Only the longest prefix of an address counts.
Secrets are never shown: `Secret` hides its value in every text that is made of it, and messages about the setting name
its options and never their values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from marserve.errors import BadSettings
from marserve.files.regular import open_regular
from marserve.settings.values import Kind, Reading, Wrong

StoreKind = Literal["s3", "gs", "az", "hf"]

MAX_SECRET_BYTES = 64 * 1024


class Secret:
    """A value that no text shows. It is in the setting itself, in a variable (`env`), or in a file (`file`)."""

    __slots__ = ("_env", "_file", "_value")

    def __init__(self, value: str | None = None, *, env: str | None = None, file: Path | None = None) -> None:
        self._value, self._env, self._file = value, env, file

    @property
    def variable(self) -> str | None:
        """The variable that holds it, None for other places."""
        return self._env

    def reveal(self, environment: Mapping[str, str]) -> str:
        """The value itself. Reads its file each time, so that a rotated secret is used. Blocks.

        Raises BadSettings, without the value, if the variable or the file is missing.
        """
        if self._env is not None:
            if not environment.get(self._env):
                raise BadSettings(f"stores names the variable {self._env}, which is not set", key="stores")
            return environment[self._env]
        if self._file is not None:
            try:
                with open_regular(self._file) as file:
                    return file.read(MAX_SECRET_BYTES).decode().strip()
            except (OSError, UnicodeDecodeError) as error:
                why = error.strerror if isinstance(error, OSError) else "it is no text"
                raise BadSettings(
                    f"stores names the file {self._file}, which cannot be read ({why})", key="stores"
                ) from None
        return self._value or ""

    def __repr__(self) -> str:
        return "***"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and (self._value, self._env, self._file) == (
            other._value,
            other._env,
            other._file,
        )

    def __hash__(self) -> int:
        return hash((self._value, self._env, self._file))


@dataclass(frozen=True)
class Option:
    """One option: its form, the stores that have it, and a sentence for the documentation."""

    name: str
    form: Literal["text", "flag", "path", "secret", "url", "style"]
    kinds: tuple[StoreKind, ...]
    sentence: str


_ALL: tuple[StoreKind, ...] = ("s3", "gs", "az", "hf")
_OBJECTS: tuple[StoreKind, ...] = ("s3", "gs", "az")
OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        option.name: option
        for option in (
            Option("endpoint_url", "url", _ALL, "where the store is, if not at its provider's own address"),
            Option("anonymous", "flag", _ALL, "ask without credentials, as public buckets have it"),
            Option("ca_bundle", "path", _OBJECTS, "a PEM file of further certificate authorities that are trusted"),
            Option("proxy_url", "secret", _OBJECTS, "the proxy that requests go through"),
            Option("no_proxy", "text", _OBJECTS, "hosts that are asked without the proxy, comma-separated"),
            Option("region", "text", ("s3",), "the bucket's region"),
            Option("access_key_id", "text", ("s3",), "the id of the access key"),
            Option("secret_access_key", "secret", ("s3",), "the secret of the access key"),
            Option("session_token", "secret", ("s3",), "the token of temporary credentials"),
            Option("profile", "text", ("s3",), "the profile of AWS's own files to take credentials and region from"),
            Option("addressing_style", "style", ("s3",), "`path` or `virtual`: where the bucket stands in addresses"),
            Option("requester_pays", "flag", ("s3",), "pay for what is read from a bucket whose requester pays"),
            Option("sse_customer_key", "secret", ("s3",), "the key, in base64, of objects encrypted with SSE-C"),
            Option("kms_key_id", "text", ("s3",), "the KMS key that written objects are encrypted with"),
            Option("credentials_file", "path", ("gs",), "the JSON of a service account, or of gcloud"),
            Option("credentials", "secret", ("gs",), "a service account's JSON itself"),
            Option(
                "billing_project",
                "text",
                ("gs",),
                "the project that pays where the requester pays",
            ),
            Option("account_name", "text", ("az",), "the storage account"),
            Option("account_key", "secret", ("az",), "the account's key"),
            Option("connection_string", "secret", ("az",), "account, key and endpoint as the portal shows them"),
            Option("sas_token", "secret", ("az",), "a shared access signature"),
            Option("tenant_id", "text", ("az",), "of a service principal"),
            Option("client_id", "text", ("az",), "of a service principal or a managed identity"),
            Option("client_secret", "secret", ("az",), "of a service principal"),
            Option("bearer_token", "secret", ("gs", "az"), "a token that another program renews"),
            Option("token", "secret", ("hf",), "the access token"),
            Option("cache_folder", "path", ("hf",), "where snapshots are kept, if not in HF_HUB_CACHE"),
            Option("pinned_only", "flag", ("hf",), "refuse what names no commit: branches and tags move"),
        )
    }
)

# The spellings of a scheme in use, and the one used here.
SCHEMES: Mapping[str, StoreKind] = MappingProxyType(
    {
        "s3": "s3",
        "s3a": "s3",
        "s3n": "s3",
        "gs": "gs",
        "gcs": "gs",
        "az": "az",
        "azure": "az",
        "adl": "az",
        "abfs": "az",
        "abfss": "az",
        "wasb": "az",
        "wasbs": "az",
        "hf": "hf",
    }
)
# The part behind the account in `abfss://container@account.dfs.core.windows.net/…`, here `az://container@account/…`.
AZURE_HOST = re.compile(r"(?<=[a-z0-9])\.(dfs|blob)\.core\.windows\.net(?=/|$)")
_PREFIX = re.compile(r"([A-Za-z0-9]+)://(\S*)")
_URL = re.compile(r"https?://[A-Za-z0-9.\-:\[\]_]+(/[A-Za-z0-9._~\-/]*)?")


@dataclass(frozen=True)
class StoreOptions:
    """The options of the addresses that begin with `prefix`; `values` are texts, flags, paths and secrets."""

    kind: StoreKind
    prefix: str = ""
    values: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def text(self, name: str) -> str | None:
        """An option that is a text or an address, None if not given."""
        return self.values.get(name)

    def path(self, name: str) -> Path | None:
        """An option that is a path, None if not given."""
        return self.values.get(name)

    def flag(self, name: str) -> bool | None:
        """An option that is true or false, None if not given."""
        return self.values.get(name)

    def secret(self, name: str, environment: Mapping[str, str]) -> str | None:
        """The value of a secret option, None if not given. Blocks; raises BadSettings as `Secret.reveal`."""
        secret: Secret | None = self.values.get(name)
        return None if secret is None else secret.reveal(environment)

    @property
    def public(self) -> dict[str, str | bool]:
        """The options that another machine may know: where the store is, but no credentials."""
        return {name: value for name, value in self.values.items() if name in PUBLIC}

    @property
    def is_private(self) -> bool:
        """Whether reading it needs options that are not sent to other machines: credentials, or files of this one."""
        return any(name not in (*PUBLIC, *NOT_FOR_READING) for name in self.values)

    def has(self, *names: str) -> bool:
        """Whether one of these options is given."""
        return any(name in self.values for name in names)


@dataclass(frozen=True)
class Stores:
    """The whole setting `stores`. If it is empty, the environment decides for every store."""

    options: tuple[StoreOptions, ...] = ()

    @property
    def variables(self) -> frozenset[str]:
        """The variables in the setting that hold secrets of stores."""
        secrets = (value for each in self.options for value in each.values.values() if isinstance(value, Secret))
        return frozenset(secret.variable for secret in secrets if secret.variable)

    def choose(self, kind: StoreKind, url: str) -> StoreOptions:
        """The options of an address in its normal form: those of the longest prefix, empty without one."""
        found = [each for each in self.options if each.kind == kind and url.startswith(each.prefix)]
        return max(found, key=lambda each: len(each.prefix), default=StoreOptions(kind))


NO_STORES = Stores()
# The options that another machine may know: where a store is, but nothing that only this machine has.
PUBLIC = (
    "endpoint_url",
    "anonymous",
    "region",
    "addressing_style",
    "requester_pays",
    "billing_project",
    "account_name",
)
# Options for writing: not sent to other machines, which do not need them.
NOT_FOR_READING = ("kms_key_id",)


def _read_stores(text: str, reading: Reading) -> Stores:
    if not text.strip():
        return NO_STORES
    right = 'it must be JSON such as {"s3://bucket/": {"endpoint_url": "https://…", "region": "…"}}'
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        where = f"line {error.lineno} column {error.colno}" if isinstance(error, json.JSONDecodeError) else "as a whole"
        raise Wrong(f"Invalid configuration: {reading.name} is no JSON ({where}); {right}") from None
    if not isinstance(document, dict):
        raise Wrong(f"Invalid configuration: {reading.name} is no JSON object; {right}")
    return Stores(tuple(_read_store(prefix, options, reading, right) for prefix, options in document.items()))


def _read_store(prefix: str, options: object, reading: Reading, right: str) -> StoreOptions:
    found = _PREFIX.fullmatch(prefix)
    kind = SCHEMES.get(found[1].lower()) if found else None
    if found is None or kind is None or "?" in prefix:
        raise Wrong(
            f"Invalid configuration: {reading.name} has a prefix {prefix[:60]!r}; prefixes begin with s3://, gs://, "
            "az://, abfss:// or hf://"
        )
    if not isinstance(options, dict):
        raise Wrong(f"Invalid configuration: {reading.name} has no object of options for {prefix}; {right}")
    values: dict[str, Any] = {}
    for name, value in options.items():
        option = OPTIONS.get(name)
        if option is None or kind not in option.kinds:
            known = ", ".join(each.name for each in OPTIONS.values() if kind in each.kinds)
            raise Wrong(
                f"Invalid configuration: {reading.name} has {name[:60]!r} for {prefix}; options there are {known}"
            )
        values[name] = _read_option(option, value, prefix, reading)
    rest = AZURE_HOST.sub("", found[2], count=1) if kind == "az" else found[2]
    return StoreOptions(kind, f"{kind}://{rest}", MappingProxyType(values))


def _read_option(option: Option, value: object, prefix: str, reading: Reading) -> Any:
    def wrong(right: str) -> Wrong:
        return Wrong(f"Invalid configuration: {option.name} of {prefix} in {reading.name} must be {right}")

    if option.form == "flag":
        if not isinstance(value, bool):
            raise wrong("true or false")
        return value
    if option.form == "secret":
        if isinstance(value, str) and value:
            return Secret(value)
        if isinstance(value, dict) and len(value) == 1:
            ((how, where),) = value.items()
            if how == "env" and isinstance(where, str) and where:
                return Secret(env=where)
            if how == "file" and isinstance(where, str) and where:
                return Secret(file=reading.working_directory / where)
        raise wrong('a text, {"env": "VARIABLE"} or {"file": "path"}')
    if not isinstance(value, str) or not value or not value.isprintable():
        raise wrong("a text")
    if option.form == "path":
        return reading.working_directory / value
    if option.form == "url" and not _URL.fullmatch(value):
        raise wrong("an http or https address without user, query and fragment")
    if option.form == "style" and value not in ("path", "virtual"):
        raise wrong("path or virtual")
    return value.rstrip("/") if option.form == "url" else value


def _write_stores(value: Stores) -> str:
    """A text that shows the setting; the key is secret, so it is never written into a file."""
    return ", ".join(each.prefix for each in value.options)


STORES: Kind[Stores] = Kind("JSON", _read_stores, _write_stores)
