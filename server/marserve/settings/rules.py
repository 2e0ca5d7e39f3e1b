"""What settings must hold together: refuses what asks for the impossible, and says what is odd.

Looks whether files and folders that are named exist; opens none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from marserve.errors import BadSettings
from marserve.settings.table import KEYS, Settings
from marserve.settings.values import Address


def check(settings: Settings) -> tuple[list[str], list[str]]:
    """Raise BadSettings for the first rule that is broken; else warnings, and notes that need no action."""
    warnings = list(_check_folders(settings))
    _refuse_what_is_not_there(settings)
    _check_tokens(settings)
    _check_tls(settings)
    _check_unix_addresses(settings)
    warnings += _check_open_management(settings)
    return warnings, [*_notes_of_accepted(settings), *_notes_of_modes(settings)]


def _check_folders(settings: Settings) -> Iterator[str]:
    store = settings.model_store
    if store is None:
        raise BadSettings("Missing mandatory parameter --model-store", key="model_store")
    for name, folder in (("model_store", store), ("workflow_store", settings.workflow_store)):
        if folder is None or folder.is_dir():
            continue
        if settings.entry == "torchserve":
            raise BadSettings(f"--{name.replace('_', '-')} directory not found: {_given(settings, name)}", key=name)
        if not _is_given(settings, name):
            # A default is nobody's wish: commands that only want to know an address run in any folder.
            yield f"{name} is {_given(settings, name)!r}, and there is no such folder: there is nothing to load"
            continue
        raise BadSettings(
            f"{name} is {_given(settings, name)!r}, and there is no such folder; create it, or name another "
            f"with --{name.replace('_', '-')}",
            key=name,
            source=_where(settings, name),
        )
    folder = settings.temporary_folder
    if folder is not None and not folder.is_dir():
        raise BadSettings(
            f"Invalid temp directory: {_given(settings, 'temporary_folder')}, please check TEMP environment variable.",
            key="temporary_folder",
        )


def _refuse_what_is_not_there(settings: Settings) -> None:
    for name, key in KEYS.items():
        value = getattr(settings, name)
        if key.refuses and value != key.defaults[settings.entry]:
            raise BadSettings(f"{name}={key.show(value)} {key.refuses}", key=name, source=_where(settings, name))


def _check_tokens(settings: Settings) -> None:
    if settings.disable_token_authorization:
        return
    asked = "is false" if _is_given(settings, "disable_token_authorization") else "is not given, so it is false"
    raise BadSettings(
        f"disable_token_authorization {asked}, which asks for tokens, and there are none yet: "
        "start with --disable-token-auth, or write disable_token_authorization=true in config.properties",
        key="disable_token_authorization",
        source=_where(settings, "disable_token_authorization"),
    )


def _addresses(settings: Settings) -> dict[str, Address]:
    return {name: getattr(settings, name) for name in ("inference_address", "management_address", "metrics_address")}


def _check_tls(settings: Settings) -> None:
    needs = [name for name, address in _addresses(settings).items() if address.is_tls]
    pair = {"certificate_file": settings.certificate_file, "private_key_file": settings.private_key_file}
    for name, file in pair.items():
        if file is not None and not file.is_file():
            raise BadSettings(
                f"{name} is {_given(settings, name)!r}, and there is no such file",
                key=name,
                source=_where(settings, name),
            )
    missing = [name for name, file in pair.items() if file is None]
    if needs and missing:
        raise BadSettings(
            f"{needs[0]}={getattr(settings, needs[0])} is https, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not given: name the certificate and its key as PEM files, "
            "or write http (certificates are not made up yet)",
            key=missing[0],
            source=_where(settings, needs[0]),
        )


def _check_unix_addresses(settings: Settings) -> None:
    for name, address in _addresses(settings).items():
        if address.scheme == "unix" and not settings.use_native_io:
            raise BadSettings(
                f"{name}={address} is a socket file, and use_native_io=false refuses those; remove one of the two",
                key=name,
                source=_where(settings, name),
            )


def _check_open_management(settings: Settings) -> Iterator[str]:
    """Nobody who is not on this machine may manage models unasked."""
    address = settings.management_address
    if address.is_loopback or settings.allow_open_management:
        return
    if settings.entry == "torchserve" and _is_given(settings, "disable_token_authorization"):
        yield (
            f"management_address={address} can be reached from other machines, and tokens are off: whoever reaches it "
            "can run code here. Write allow_open_management=true if that is meant"
        )
        return
    raise BadSettings(
        f"management_address={address} can be reached from other machines, and nothing authenticates its callers; "
        "use 127.0.0.1, or set allow_open_management=true (MARSERVE_ALLOW_OPEN_MANAGEMENT=true) "
        "if something in front protects it",
        key="management_address",
        source=_where(settings, "management_address"),
    )


def _notes_of_accepted(settings: Settings) -> Iterator[str]:
    """One sentence for all keys of a kind that were given and change nothing."""
    by_sentence: dict[str, list[str]] = defaultdict(list)
    for name, key in KEYS.items():
        if key.accepts and _is_given(settings, name) and getattr(settings, name) != key.defaults[settings.entry]:
            by_sentence[key.accepts].append(name)
    for sentence, names in by_sentence.items():
        yield f"{', '.join(names)}: accepted; {sentence}"


def _notes_of_modes(settings: Settings) -> Iterator[str]:
    if settings.metrics_mode == "log" and settings.enable_metrics_api:
        yield (
            "metrics_mode=log: the page at metrics_address stays empty, and ts_metrics.log and model_metrics.log are "
            "not written yet; write metrics_mode=prometheus to see metrics"
        )
    if settings.metrics_mode == "legacy":
        yield "metrics_mode=legacy: all metrics are at metrics_address, TorchServe's three among them"


def _is_given(settings: Settings, name: str) -> bool:
    return bool(settings.origins.get(name))


def _given(settings: Settings, name: str) -> str:
    """The value as it was written, for messages."""
    if origins := settings.origins.get(name):
        return origins[-1].text.strip()
    value: Path | None = getattr(settings, name)
    return str(value.relative_to(settings.working_directory)) if value else ""


def _where(settings: Settings, name: str) -> str | None:
    origins = settings.origins.get(name)
    return origins[-1].where if origins else None
