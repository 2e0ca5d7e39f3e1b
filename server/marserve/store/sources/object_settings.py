"""How an object store is asked: endpoint, region, credentials and connections, from `stores` and the environment.

The options in `stores` for an address take precedence over the environment. Credentials are never mixed: with a key
from `stores` no token of the environment is sent. If neither names credentials, the library looks for those of the
machine (web identity, container, instance, managed identity). This module only decides; it reads nothing but profiles
and files with secrets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from marserve.errors import BadSettings
from marserve.files.regular import open_regular
from marserve.settings.stores import StoreOptions
from marserve.store.sources.aws_profiles import Profile, find_profile, get_credentials
from marserve.store.sources.source import Failed

CONNECT_S = 10.0
SILENCE_S = 30.0
# Credentials without an expiry are looked up again after this time, so that rotated ones are found.
FRESH_S = 300.0
MAX_BUNDLE_BYTES = 4 * 1024 * 1024

Provider = Callable[[], dict[str, Any]]
"""Tells credentials as the library wants them; asked again when they expire. Blocks."""


@dataclass(frozen=True)
class Connection:
    """The library's settings. Do not log them: `config` and `client` may hold secrets.

    `place` is the endpoint or account, which distinguishes stores with the same bucket's name. `how` says in a few
    words where the credentials come from. `warning` is a sentence for the log, or empty.
    """

    config: dict[str, Any] = field(repr=False)
    client: dict[str, Any] = field(repr=False)
    provider: Provider | None = field(repr=False)
    place: str
    how: str
    warning: str = ""


def connect_s3(
    bucket: str, options: StoreOptions, environment: Mapping[str, str], silence_s: float = SILENCE_S
) -> Connection:
    """The settings for an S3 bucket. Raises Failed for invalid options. Blocks."""
    profile = _find_profile(options, environment)
    region = (
        options.text("region")
        or (profile.region if profile and options.has("profile") else None)
        or environment.get("AWS_REGION")
        or environment.get("AWS_DEFAULT_REGION")
        or (profile.region if profile else None)
        or "us-east-1"
    )
    endpoint = (
        options.text("endpoint_url")
        or environment.get("AWS_ENDPOINT_URL_S3")
        or environment.get("AWS_ENDPOINT_URL")
        or environment.get("AWS_ENDPOINT")
        or (profile.endpoint_url if profile else None)
    )
    config: dict[str, Any] = {"bucket": bucket, "region": region}
    wished = options.text("addressing_style") or (
        "virtual" if environment.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "").lower() == "true" else None
    )
    # No certificate covers a bucket with dots as a host's name; private stores seldom have host names for buckets.
    is_virtual = wished == "virtual" or (wished is None and not endpoint and "." not in bucket)
    config["virtual_hosted_style_request"] = is_virtual
    if endpoint:
        _check_endpoint(endpoint, "S3")
        # Takes precedence over the variables that the library would read by itself.
        config["aws_endpoint_url_s3"] = _with_bucket(endpoint, bucket) if is_virtual else endpoint.rstrip("/")
    pays = options.flag("requester_pays")
    if pays is None:
        pays = environment.get("AWS_REQUEST_PAYER", "").lower() in ("requester", "true")
    config["request_payer"] = pays
    key = options.secret("sse_customer_key", environment)
    if key:
        config |= {"server_side_encryption": "sse-c", "sse_customer_key_base64": key}
    elif options.text("kms_key_id"):
        config |= {"server_side_encryption": "aws:kms", "sse_kms_key_id": options.text("kms_key_id")}
    provider, how = _s3_credentials(options, environment, profile)
    config["skip_signature"] = how == "none: it is asked anonymously"
    bundle = options.path("ca_bundle") or _path(environment.get("AWS_CA_BUNDLE"))
    client = _client(options, environment, bundle, endpoint or "", silence_s)
    return Connection(config, client, provider, f"{endpoint or 'aws'}", how)


def _find_profile(options: StoreOptions, environment: Mapping[str, str]) -> Profile | None:
    if options.flag("anonymous") or (options.has("access_key_id") and not options.has("profile")):
        return None
    return find_profile(environment, options.text("profile"))


def _s3_credentials(
    options: StoreOptions, environment: Mapping[str, str], profile: Profile | None
) -> tuple[Provider | None, str]:
    anonymous = options.flag("anonymous")
    if anonymous or (
        anonymous is None
        and not options.has("access_key_id", "profile")
        and environment.get("AWS_SKIP_SIGNATURE", "").lower() == "true"
    ):
        return None, "none: it is asked anonymously"
    if options.has("access_key_id", "secret_access_key"):
        if not options.has("access_key_id") or not options.has("secret_access_key"):
            raise Failed(f"stores has one of access_key_id and secret_access_key for {options.prefix}, and not both")

        def given() -> dict[str, Any]:
            token = options.secret("session_token", environment)
            secret = options.secret("secret_access_key", environment)
            return _s3_key(options.text("access_key_id"), secret, token, _soon())

        given()  # so that a missing secret is an error at once
        return given, f"the key of stores for {options.prefix}"
    if not options.has("profile") and environment.get("AWS_ACCESS_KEY_ID"):
        key, secret = environment["AWS_ACCESS_KEY_ID"], environment.get("AWS_SECRET_ACCESS_KEY")
        if not secret:
            raise Failed("AWS_ACCESS_KEY_ID is set, and AWS_SECRET_ACCESS_KEY is not")
        token = environment.get("AWS_SESSION_TOKEN")
        return lambda: _s3_key(key, secret, token, None), "AWS_ACCESS_KEY_ID"
    if not options.has("profile") and environment.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return None, "the web identity of AWS_WEB_IDENTITY_TOKEN_FILE"
    if profile is not None and (profile.has_credentials or options.has("profile")):
        found = profile

        def of_profile() -> dict[str, Any]:
            fresh = get_credentials(found)
            return _s3_key(fresh.access_key_id, fresh.secret_access_key, fresh.session_token, fresh.expires or _soon())

        of_profile()
        return of_profile, f"profile {found.name} of AWS's files"
    return None, "the machine's own (container or instance role)"


def _s3_key(key: str | None, secret: str | None, token: str | None, expires: datetime | None) -> dict[str, Any]:
    return {"access_key_id": key, "secret_access_key": secret, "token": token or None, "expires_at": expires}


def connect_gs(
    bucket: str, options: StoreOptions, environment: Mapping[str, str], silence_s: float = SILENCE_S
) -> Connection:
    """The settings for a bucket of Google's. Raises Failed for invalid options. Blocks."""
    emulator = environment.get("STORAGE_EMULATOR_HOST", "")
    if emulator and "://" not in emulator:
        emulator = f"http://{emulator}"
    endpoint = options.text("endpoint_url") or environment.get("GOOGLE_BASE_URL") or emulator
    given = environment.get("GOOGLE_APPLICATION_CREDENTIALS")
    config: dict[str, Any] = {"bucket": bucket}
    if endpoint:
        _check_endpoint(endpoint, "GCS")
        config["base_url"] = endpoint.rstrip("/")
    provider: Provider | None = None
    config["skip_signature"] = False
    if options.flag("anonymous") or (
        options.flag("anonymous") is None
        and not options.has("credentials", "credentials_file", "bearer_token")
        and (environment.get("GOOGLE_SKIP_SIGNATURE", "").lower() == "true" or (emulator and endpoint == emulator))
    ):
        config["skip_signature"] = True
        how = "none: it is asked anonymously"
    elif options.has("bearer_token"):
        provider = _refreshing(lambda: {"token": options.secret("bearer_token", environment)})
        how = f"the token of stores for {options.prefix}"
    elif options.has("credentials"):
        text = options.secret("credentials", environment) or ""
        how = f"the credentials of stores for {options.prefix}"
        endpoint = _add_google_credentials(config, text, how, None) or endpoint
    elif options.has("credentials_file") or given:
        file = options.path("credentials_file") or Path(given or "")
        named = "credentials_file of stores" if options.has("credentials_file") else "GOOGLE_APPLICATION_CREDENTIALS"
        endpoint = _add_google_credentials(config, _read_text(file, named), named, file) or endpoint
        how = named
    else:
        how = "the machine's own (application default credentials, workload identity)"
    client = _client(options, environment, options.path("ca_bundle"), endpoint, silence_s)
    if options.text("billing_project"):
        client["default_headers"] = {"x-goog-user-project": options.text("billing_project")}
    warning = ""
    if emulator and endpoint == emulator and (not config["skip_signature"] or given):
        how += f"; STORAGE_EMULATOR_HOST has {emulator} asked"
        warning = (
            f"STORAGE_EMULATOR_HOST is set beside credentials of Google's: gs://{bucket} is asked of {emulator}, "
            + ("which gets a token made of them" if not config["skip_signature"] else "without them")
        )
    return Connection(config, client, provider, endpoint or "google", how, warning)


def _add_google_credentials(config: dict[str, Any], text: str, named: str, file: Path | None) -> str | None:
    """Add a document of Google's to the library's settings; returns the endpoint that it names, if any."""
    try:
        document = json.loads(text)
        kind = document.get("type", "service_account")
    except (ValueError, AttributeError, RecursionError):
        raise Failed(f"{named} holds no JSON of a service account") from None
    if kind == "service_account":
        config["service_account_key"] = text
    elif file is not None:
        config["application_credentials"] = str(file)
    else:
        raise Failed(f"{named} is of type {str(kind)[:40]!r}: name the file itself with credentials_file")
    found = document.get("gcs_base_url")
    return found if isinstance(found, str) else None


def connect_az(
    container: str,
    account: str | None,
    options: StoreOptions,
    environment: Mapping[str, str],
    silence_s: float = SILENCE_S,
) -> Connection:
    """The settings for a container; `account` is the one in the address, None without one.

    Raises Failed for invalid options: an unknown account, or another one than that of the credentials.
    """
    text = options.secret("connection_string", environment)
    if text is None and not options.has("account_name", "account_key", "sas_token", "bearer_token", "client_secret"):
        text = environment.get("AZURE_STORAGE_CONNECTION_STRING")
    said = _read_connection_string(text) if text else {}
    named = (
        options.text("account_name")
        or said.get("accountname")
        or environment.get("AZURE_STORAGE_ACCOUNT_NAME")
        or environment.get("AZURE_STORAGE_ACCOUNT")
    )
    if account and named and account != named:
        # Tokens and signatures of one account would be sent to another.
        raise Failed(
            f"the credentials are for the account {named}; give stores options for az://{container}@{account}/"
        )
    account = account or named
    if not account:
        raise Failed(
            "no storage account is named: set AZURE_STORAGE_ACCOUNT_NAME, or account_name in stores, or write "
            f"abfss://{container}@ACCOUNT.dfs.core.windows.net/…"
        )
    endpoint = (
        options.text("endpoint_url")
        or said.get("blobendpoint")
        or environment.get("AZURE_STORAGE_ENDPOINT")
        or environment.get("AZURE_ENDPOINT")
    )
    suffix = said.get("endpointsuffix", "core.windows.net")
    if not endpoint and suffix != "core.windows.net":
        endpoint = f"https://{account}.blob.{suffix}"
    config: dict[str, Any] = {"container_name": container, "account_name": account}
    if endpoint:
        _check_endpoint(endpoint, "Azure")
        config["endpoint"] = endpoint.rstrip("/")
    provider, how = _azure_credentials(options, environment, said, config)
    client = _client(options, environment, options.path("ca_bundle"), endpoint or "", silence_s)
    return Connection(config, client, provider, f"{endpoint or 'azure'}/{account}", how)


def _azure_credentials(
    options: StoreOptions, environment: Mapping[str, str], said: Mapping[str, str], config: dict[str, Any]
) -> tuple[Provider | None, str]:
    anonymous = options.flag("anonymous")
    of_stores = f"stores for {options.prefix}"
    config["skip_signature"] = bool(anonymous)
    if anonymous:
        return None, "none: it is asked anonymously"
    if options.has("account_key"):
        provider = _refreshing(lambda: {"access_key": options.secret("account_key", environment)})
        return provider, f"the key of {of_stores}"
    if options.has("sas_token"):
        return (
            _refreshing(lambda: {"sas_token": (options.secret("sas_token", environment) or "").lstrip("?")}),
            f"the signature of {of_stores}",
        )
    if options.has("bearer_token"):
        return _refreshing(lambda: {"token": options.secret("bearer_token", environment)}), f"the token of {of_stores}"
    if options.has("client_secret"):
        config |= {
            "credential_type": "client_secret",
            "tenant_id": options.text("tenant_id") or environment.get("AZURE_TENANT_ID", ""),
            "client_id": options.text("client_id") or environment.get("AZURE_CLIENT_ID", ""),
            "client_secret": options.secret("client_secret", environment),
        }
        return None, f"the service principal of {of_stores}"
    if said.get("accountkey"):
        return _constant("access_key", said["accountkey"]), "the connection string"
    if said.get("sharedaccesssignature"):
        return _constant("sas_token", said["sharedaccesssignature"].lstrip("?")), "the connection string"
    for name in ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_KEY"):
        if environment.get(name):
            return _constant("access_key", environment[name]), name
    for name in ("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY"):
        if environment.get(name):
            return _constant("sas_token", environment[name].lstrip("?")), name
    if options.text("client_id"):
        config["client_id"] = options.text("client_id")
    if environment.get("AZURE_SKIP_SIGNATURE", "").lower() == "true":
        config["skip_signature"] = True
        return None, "none: it is asked anonymously"
    return None, "the machine's own (service principal, workload or managed identity)"


def _read_connection_string(text: str) -> dict[str, str]:
    """The parts of `AccountName=…;AccountKey=…`, names in lower case."""
    parts = [part.partition("=") for part in text.split(";") if part.strip()]
    found = {name.strip().lower(): value.strip() for name, mark, value in parts if mark}
    if found.get("usedevelopmentstorage", "").lower() == "true":
        raise Failed(
            "UseDevelopmentStorage=true names no address; write the emulator's AccountName, AccountKey, BlobEndpoint"
        )
    if not found.keys() & {"accountname", "blobendpoint"}:
        raise Failed("the connection string of the storage account names no AccountName and no BlobEndpoint")
    if "accountname" not in found:
        host = urlsplit(found["blobendpoint"]).hostname or ""
        found["accountname"] = host.partition(".")[0]
    return found


def _client(
    options: StoreOptions, environment: Mapping[str, str], bundle: Path | None, endpoint: str, silence_s: float
) -> dict[str, Any]:
    """The settings of connections: times, certificates, proxy. Plain http only if the operator's endpoint has it."""
    client: dict[str, Any] = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "read_timeout": timedelta(seconds=silence_s),
        # The limit of a whole answer, which may be large; silent or slow answers are ended elsewhere.
        "timeout": timedelta(days=7),
        "user_agent": "marserve",
    }
    if bundle is not None:
        client["root_certificate"] = _read_text(bundle, "ca_bundle")
    proxy = options.secret("proxy_url", environment)
    if proxy:
        client["proxy_url"] = proxy
        if options.text("no_proxy"):
            client["proxy_excludes"] = options.text("no_proxy")
    return client


def _refreshing(values: Callable[[], dict[str, Any]]) -> Provider:
    """Credentials of the options: read once now, so that a missing one is an error at once, and again when old."""
    values()
    return lambda: {**values(), "expires_at": _soon()}


def _constant(name: str, value: str) -> Provider:
    return lambda: {name: value, "expires_at": None}


def _soon() -> datetime:
    return datetime.now(UTC) + timedelta(seconds=FRESH_S)


def _check_endpoint(endpoint: str, which: str) -> None:
    if not re.match(r"https?://[^/?#@\s]+", endpoint) or re.search(r"[?#@\s]", endpoint):
        raise Failed(f"the endpoint that is set for {which} is no http or https address without user and query")


def _with_bucket(endpoint: str, bucket: str) -> str:
    scheme, _, rest = endpoint.rstrip("/").partition("://")
    return endpoint.rstrip("/") if rest.startswith(f"{bucket}.") else f"{scheme}://{bucket}.{rest}"


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def _read_text(path: Path, named: str) -> str:
    try:
        with open_regular(path) as file:
            return file.read(MAX_BUNDLE_BYTES).decode()
    except OSError as error:
        raise BadSettings(f"the file of {named} cannot be read ({error.strerror})", key="stores") from None
    except UnicodeDecodeError:
        raise BadSettings(f"the file of {named} is no text", key="stores") from None
