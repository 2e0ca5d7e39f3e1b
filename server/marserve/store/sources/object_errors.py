"""Turns an error of obstore into a type of error and a sentence without secrets.

The library's messages quote addresses with signatures, and answers with keys. `explain` makes sentences of statuses and
codes, and passes on only plain words of the library. The process that asks a store imports this module, so it imports
little.
"""

from __future__ import annotations

import re

from marserve.store.sources.source import Broken, Failed, Missing, Replaced, SourceError

# A word of the library's own sentences, which may name headers. Addresses, signatures and keys do not match it.
_WORD = r"(?:[A-Za-z]{1,20}|[A-Z][a-z]{1,20}-[A-Z][a-z]{1,20})"
_PLAIN_WORDS = re.compile(rf"{_WORD}(?:[,:]? {_WORD}){{1,15}}")
_PREFIX = re.compile(r"Generic [A-Za-z0-9]+ error: ")
# The names of the error in the library's details, the last one the most exact: `Parse(`, `source: BadScheme,`.
_KIND = re.compile(r"^ *(?:(?:source|error|kind): )?([A-Z][a-z]+(?:[A-Z][a-z]+)*)[,(]$", re.MULTILINE)
# The length of an error's text that is read: statuses, codes and addresses are at its beginning.
TEXT_CHARACTERS = 64 * 1024
NAMES = {"s3": "S3", "gs": "Google Cloud Storage", "az": "Azure"}

_STATUS = re.compile(r"status code: ([0-9]{3})|Client error with status ([0-9]{3})|status: ([0-9]{3}),")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,60})</Code>")
_REGION = re.compile(r"<Region>([a-z0-9\-]{4,30})</Region>")


def text_of(error: Exception) -> str:
    """The beginning of the library's message, which may contain the whole body of a store's answer."""
    return str(error)[:TEXT_CHARACTERS]


def status_of(error: Exception) -> int | None:
    """The status of the store's answer, None without an answer."""
    found = _STATUS.search(text_of(error))
    return int(next(group for group in found.groups() if group)) if found else None


def explain(error: Exception, scheme: str, bucket: str, how: str) -> SourceError:
    """The library's error as a type and a sentence, which has only statuses, codes and plain words of its text.

    `how` says where the credentials come from.
    """
    text = text_of(error)
    kind = type(error).__name__
    status = status_of(error)
    code = _CODE.search(text)
    named = f"{status or ''}{' ' if status and code else ''}{code[1] if code else ''}"
    store = NAMES[scheme]
    if code and code[1] in ("NoSuchBucket", "ContainerNotFound"):
        return Failed(f"{store}: there is no bucket {bucket}")
    if isinstance(error, FileNotFoundError):
        return Missing(f"{store}: there is no such object")
    if kind in ("PreconditionError", "NotModifiedError"):
        return Replaced("it was replaced while it was fetched")
    if _has_no_credentials(text, scheme):
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


def _has_no_credentials(text: str, scheme: str) -> bool:
    """Whether the machine's own credentials were asked for, and there are none."""
    signs = {
        "s3": ("/latest/api/token", "/latest/meta-data", "169.254.170.2", "MissingCredentials", "/v2/credentials"),
        "gs": ("metadata.google.internal", "/computeMetadata/", "169.254.169.254"),
        "az": ("/metadata/identity", "169.254.169.254", "/msi/token"),
    }[scheme]
    return any(sign in text for sign in signs)


def _lost(error: Exception, store: str) -> SourceError:
    """The error for a connection that was not made, or ended."""
    lower = text_of(error).lower()
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
    """The plain words of the library's message; without any the error's type."""
    if not type(error).__module__.startswith("obstore"):
        return type(error).__name__
    first, _, details = text_of(error).partition("\n")
    # In `Error performing GET http://… in 2ms - HTTP error: error sending request` the words after the address.
    said = _PREFIX.sub("", first).rpartition(" - ")[2].removeprefix("HTTP error: ")
    parts = [said] if _PLAIN_WORDS.fullmatch(said) else [type(error).__name__]
    return ", ".join([*parts, *_KIND.findall(details)[-2:]])
