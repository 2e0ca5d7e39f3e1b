"""Rules across settings: refuses impossible combinations, and warns of odd ones.

It looks whether named files and folders exist, and opens none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from marserve.errors import BadSettings
from marserve.files.regular import why_not_regular
from marserve.settings.table import KEYS, Settings
from marserve.settings.values import Address


def check(settings: Settings) -> tuple[list[str], list[str]]:
    """Raise BadSettings for the first broken rule; else return warnings, and notes that need no action."""
    warnings = list(_check_folders(settings))
    _refuse_what_is_not_there(settings)
    warnings += _check_tls(settings)
    _check_unix_addresses(settings)
    _check_envelope(settings)
    warnings += _check_open_management(settings)
    warnings += _warnings_of_log4j(settings)
    warnings += _warnings_of_origins(settings)
    _check_desired_state(settings)
    _check_preemption(settings)
    _check_abort(settings)
    _check_ray(settings)
    more, notes = _check_snapshot(settings)
    return [*warnings, *more], [*_notes_of_accepted(settings), *_notes_of_modes(settings), *notes]


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
            # A missing default folder is no error: commands that only need an address run in any folder.
            remedy = f"there is nothing to load; create it, or name another with --{name.replace('_', '-')}"
            yield f"{name} is {_given(settings, name)!r}, and there is no such folder: {remedy}"
            continue
        step = f"name {'a folder' if folder.exists() else 'another'} with --{name.replace('_', '-')}"
        what = f"which is a file; {step}" if folder.exists() else f"and there is no such folder; create it, or {step}"
        raise BadSettings(f"{name} is {_given(settings, name)!r}, {what}", key=name, source=_where(settings, name))
    for root in settings.model_roots:
        if not root.is_dir():
            # It may be mounted or made later.
            yield f"model_roots has {str(root)!r}, and there is no such folder: nothing is found below it"
    for interpreter in settings.allowed_interpreters:
        if not interpreter.path.exists():
            yield f"allowed_interpreters has {interpreter}, and there is no such file: models that name it are refused"
    folder = settings.temporary_folder
    if folder is not None and not folder.is_dir():
        raise BadSettings(
            f"Invalid temp directory: {_given(settings, 'temporary_folder')}, please check TEMP environment variable.",
            key="temporary_folder",
        )


def _warnings_of_origins(settings: Settings) -> Iterator[str]:
    for origin in (settings.cors_allowed_origin or "").split(","):
        scheme, parts, rest = origin.strip().partition("://")
        if parts and "/" in rest:
            meant = f"{scheme}://{rest.partition('/')[0]}"
            yield (
                f"cors_allowed_origin has {origin.strip()!r}, and browsers name origins without a slash behind the "
                f"host, so it lets no page in; write {meant}"
            )


def _check_preemption(settings: Settings) -> None:
    file = settings.preemption_file
    if file is not None and not file.parent.is_dir():
        raise BadSettings(
            f"preemption_file is {_given(settings, 'preemption_file')!r}, and its folder is not there, so the file "
            "could never appear; create the folder (in a container, mount it), or name another file",
            key="preemption_file",
            source=_where(settings, "preemption_file"),
        )


def _check_abort(settings: Settings) -> None:
    if 0 < settings.abort_when_stuck < settings.loop_stall_threshold:
        raise BadSettings(
            f"abort_when_stuck is {_given(settings, 'abort_when_stuck')!r}, shorter than loop_stall_threshold, "
            f"{settings.loop_stall_threshold:g} s, from when on a wait counts at all; give it more, a minute say, or 0",
            key="abort_when_stuck",
            source=_where(settings, "abort_when_stuck"),
        )


def _check_ray(settings: Settings) -> None:
    for name in ("ray_listen", "ray_advertise"):
        text: str = getattr(settings, name)
        host, colon, port = text.rpartition(":")
        if text and not (colon and host and port.isdecimal() and int(port) < 1 << 16):
            raise BadSettings(
                f"{name} is {_given(settings, name)!r}, and must be HOST:PORT, as 10.0.0.5:7443 or [::]:7443",
                key=name,
                source=_where(settings, name),
            )


def _refuse_what_is_not_there(settings: Settings) -> None:
    for name, key in KEYS.items():
        value = getattr(settings, name)
        if key.refuses and value != key.defaults[settings.entry]:
            raise BadSettings(f"{name}={key.show(value)} {key.refuses}", key=name, source=_where(settings, name))


def _addresses(settings: Settings) -> dict[str, Address]:
    return {name: getattr(settings, name) for name in ("inference_address", "management_address", "metrics_address")}


def _check_tls(settings: Settings) -> Iterator[str]:
    needs = [name for name, address in _addresses(settings).items() if address.is_tls]
    pair = {"certificate_file": settings.certificate_file, "private_key_file": settings.private_key_file}
    for name, file in (*pair.items(), ("keystore", settings.keystore)):
        if file is not None and (why := why_not_regular(file)):
            raise BadSettings(
                f"{name} is {_given(settings, name)!r}, and {why}",
                key=name,
                source=_where(settings, name),
            )
    if settings.enable_grpc_ssl and (absent := [name for name, file in pair.items() if file is None]):
        raise BadSettings(
            f"enable_grpc_ssl is true, and {' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not given: "
            "the gRPC ports need the certificate and its key as PEM files",
            key="enable_grpc_ssl",
            source=_where(settings, "enable_grpc_ssl"),
        )
    if not needs or settings.keystore is not None:
        return
    missing = [name for name, file in pair.items() if file is None]
    if len(missing) == 1:
        raise BadSettings(
            f"{needs[0]}={getattr(settings, needs[0])} is https, and {missing[0]} is not given: name both the "
            "certificate and its key as PEM files, or neither to have a certificate made up at each start",
            key=missing[0],
            source=_where(settings, needs[0]),
        )
    if missing:
        yield (
            f"{needs[0]}={getattr(settings, needs[0])} is https, and no certificate is given: one is made up at each "
            "start, which no client can check; name one in certificate_file and private_key_file"
        )


def _check_unix_addresses(settings: Settings) -> None:
    for name, address in _addresses(settings).items():
        if address.scheme == "unix" and not settings.use_native_io:
            raise BadSettings(
                f"{name}={address} is a socket file, and use_native_io=false refuses those; remove one of the two",
                key=name,
                source=_where(settings, name),
            )


def _check_envelope(settings: Settings) -> None:
    """Refuse former names, with which no model loads. Other unknown words may name modules."""
    now = {"kfserving": "kserve", "kfservingv2": "kservev2"}.get(settings.service_envelope or "")
    if now is not None:
        raise BadSettings(
            f"service_envelope={settings.service_envelope} is the former name of {now}; write that",
            key="service_envelope",
            source=_where(settings, "service_envelope"),
        )


def _check_open_management(settings: Settings) -> Iterator[str]:
    """Refuse unprotected management addresses beyond this machine; only warn if TorchServe's settings ask for them."""
    if settings.management_is_kept_here or settings.allow_open_management or not settings.disable_token_authorization:
        return
    grpc = Address("http", settings.grpc_management_address, settings.grpc_management_port)
    for name, address in (("management_address", settings.management_address), ("grpc_management_address", grpc)):
        if not address.is_loopback:
            yield from _check_open_address(settings, name)
    grpc = Address("http", settings.grpc_inference_address, settings.grpc_inference_port)
    for name, address in (("inference_address", settings.inference_address), ("grpc_inference_address", grpc)):
        if settings.open_inference_control and not address.is_loopback:
            raise BadSettings(
                f"open_inference_control=true lets callers at {name}={address} load and unload models, other machines "
                "reach it, and nothing authenticates them; use 127.0.0.1, switch tokens on with "
                "disable_token_authorization=false, or set allow_open_management=true if something in front protects "
                "it",
                key="open_inference_control",
                source=_where(settings, "open_inference_control"),
            )


def _check_open_address(settings: Settings, name: str) -> Iterator[str]:
    address = getattr(settings, name)
    if settings.entry == "torchserve" and _is_given(settings, "disable_token_authorization"):
        yield (
            f"{name}={address} can be reached from other machines, and tokens are off: any client that "
            "reaches it can run code here. Write allow_open_management=true if that is meant"
        )
        return
    raise BadSettings(
        f"{name}={address} can be reached from other machines, and nothing authenticates its callers; "
        "use 127.0.0.1, switch tokens on with disable_token_authorization=false, or set allow_open_management=true "
        "(MARSERVE_ALLOW_OPEN_MANAGEMENT=true) if something in front protects it",
        key=name,
        source=_where(settings, name),
    )


def _check_desired_state(settings: Settings) -> None:
    """Refuse a second setting that names models beside a desired state, and a document that cannot be used."""
    if settings.desired_state is None:
        return
    where, shown = _where(settings, "desired_state"), KEYS["desired_state"].show(settings.desired_state)
    for name in ("load_models", "model_snapshot", "watch_model_store", "watches"):
        if getattr(settings, name):
            raise BadSettings(
                f"desired_state={shown} ({where}) decides alone which models there are, and {name} "
                "says it too; remove one of the two",
                key=name,
                source=_where(settings, name),
            )
    is_address = "://" in settings.desired_state
    if not is_address and (why := why_not_regular(settings.working_directory / settings.desired_state)):
        raise BadSettings(
            f"desired_state is {settings.desired_state!r}, and {why}; a file with `models: {{}}` is a server without "
            "models",
            key="desired_state",
            source=where,
        )
    if settings.desired_state_changes == "adopt" and settings.desired_state.lower().startswith(("http://", "https://")):
        raise BadSettings(
            f"desired_state_changes=adopt writes into the document, and desired_state={shown} cannot "
            "be written; name a file or an object of a store, or refuse such calls",
            key="desired_state_changes",
            source=_where(settings, "desired_state_changes"),
        )


def _check_snapshot(settings: Settings) -> tuple[list[str], list[str]]:
    """A warning, or a note, if load_models is ignored because of a snapshot.

    A snapshot's own load_models needs none; one beside model_snapshot in a written file (as KServe's) needs only a
    note.
    """
    if settings.model_snapshot is None or not settings.load_models:
        return [], []
    where, other = settings.origins["load_models"][-1].where, settings.origins["model_snapshot"][-1].where
    shown = KEYS["load_models"].show(settings.load_models)
    sentence = f"load_models={shown} is not used: model_snapshot says which models are loaded ({other})"
    if where.partition(", line ")[0] != other.partition(", line ")[0]:
        return [f"{sentence}; remove that, or start with --ncs if it is a snapshot's, to load these ({where})"], []
    return [], [] if settings.restored_from is not None else [sentence]


def _notes_of_accepted(settings: Settings) -> Iterator[str]:
    """One sentence for all keys of a kind that were given and change nothing."""
    by_sentence: dict[str, list[str]] = defaultdict(list)
    for name, key in KEYS.items():
        if key.accepts and _is_given(settings, name) and getattr(settings, name) != key.defaults[settings.entry]:
            by_sentence[key.accepts].append(name)
    for sentence, names in by_sentence.items():
        yield f"{', '.join(names)}: accepted; {sentence}"


def _warnings_of_log4j(settings: Settings) -> Iterator[str]:
    """Warn of a log configuration among the Java machine's arguments, because it has no effect."""
    if settings.vmargs is not None and "log4j" in settings.vmargs:
        yield (
            f"vmargs={settings.vmargs} names a log4j configuration, which is not read: write log_level, log_format, "
            "log_location and metrics_location instead"
        )


def _notes_of_modes(settings: Settings) -> Iterator[str]:
    if settings.metrics_mode == "log" and settings.enable_metrics_api:
        yield (
            "metrics_mode=log: metrics are lines in ts_metrics.log and model_metrics.log, and the page at "
            "metrics_address stays empty; metrics_mode=prometheus fills it"
        )
    if settings.access_log_sample < 1:
        yield (
            f"access_log_sample={settings.access_log_sample:g}: the access log has that share of the requests that "
            f"were answered well within access_log_slow, {settings.access_log_slow:g} s, and all others"
        )
    if settings.metrics_mode == "legacy":
        yield (
            "metrics_mode=legacy: three counters are at metrics_address, and all other metrics are lines in "
            "ts_metrics.log and model_metrics.log; metrics_mode=prometheus puts all of them on the page"
        )


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
