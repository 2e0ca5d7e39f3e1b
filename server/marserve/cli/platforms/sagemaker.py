"""How SageMaker starts a container, `docker run IMAGE serve`, as arguments of `marserve`.

It knows SageMaker's variables and folders, and the forms that a model may have in them. A setting that has a variable
of marserve's own in the environment is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from marserve.errors import BadSettings, without_stop

DEFAULT_PORT = 8080
LOOPBACK = "127.0.0.1"
SCRIPT_HANDLER = "sagemaker_script"
# Installed before the script is imported, as by SageMaker's toolkit.
SCRIPT_REQUIREMENTS = "code/requirements.txt"
SCRIPT_MODEL, SCRIPT_VERSION = "model", "1.0"
# SageMaker kills 30 s after SIGTERM.
DRAIN_TIMEOUT_S = 20
FURTHER_PORTS = ("metrics_address", "grpc_inference_port", "grpc_management_port", "management_address")

_SETTINGS = {
    "SAGEMAKER_MODEL_SERVER_WORKERS": "default_workers_per_model",
    "SAGEMAKER_MODEL_SERVER_TIMEOUT": "default_response_timeout",
    "SAGEMAKER_MAX_REQUEST_SIZE": "max_request_size",
    "SAGEMAKER_MAX_RESPONSE_SIZE": "max_response_size",
}
# The toolkit's variables for the model that it makes of a script.
_SCRIPT_SETTINGS = {
    "SAGEMAKER_TS_MIN_WORKERS": "minWorkers",
    "SAGEMAKER_TS_MAX_WORKERS": "maxWorkers",
    "SAGEMAKER_TS_BATCH_SIZE": "batchSize",
    "SAGEMAKER_TS_MAX_BATCH_DELAY": "maxBatchDelay",
    "SAGEMAKER_TS_RESPONSE_TIMEOUT": "responseTimeout",
}
_LOG_LEVELS = {"10": "debug", "20": "info", "30": "warning", "40": "error", "50": "error"}


def sagemaker_arguments(environment: Mapping[str, str], base: Path = Path("/opt/ml")) -> list[str] | None:
    """The arguments with which `marserve` serves as SageMaker expects; None outside of SageMaker.

    `SAGEMAKER_BIND_TO_PORT`, `SAGEMAKER_MULTI_MODEL` or the folder `model` in `base` show that it is SageMaker. Raises
    BadSettings for a variable that cannot be used, and for a folder with files but without a model.
    """
    base = Path(environment.get("SAGEMAKER_BASE_DIR") or base)
    is_multi_model = serves_many_models(environment)
    if not (is_multi_model or "SAGEMAKER_BIND_TO_PORT" in environment or (base / "model").is_dir()):
        return None
    # Late: other containers do not need it, and start sooner.
    from marserve.settings import KEYS

    settings: dict[str, object] = {
        "sagemaker_endpoints": "true",
        "disable_token_authorization": "true",
        "drain_timeout": DRAIN_TIMEOUT_S,
        **_addresses(environment, is_multi_model),
    }
    for variable, key in _SETTINGS.items():
        if variable in environment:
            settings[key] = _number(environment, variable)
    if workers := settings.get("default_workers_per_model"):
        settings["NUM_WORKERS"] = workers
    if (level := environment.get("SAGEMAKER_CONTAINER_LOG_LEVEL")) in _LOG_LEVELS:
        settings["log_level"] = _LOG_LEVELS[str(level)]
    settings |= _many_models(environment, base) if is_multi_model else _one_model(environment, base / "model")
    said = {key: value for key, value in settings.items() if KEYS[key].env not in environment}
    return ["start", "--foreground", *(word for key, value in said.items() for word in ("--set", f"{key}={value}"))]


def serves_many_models(environment: Mapping[str, str]) -> bool:
    """Whether this is a multi-model endpoint, by SageMaker's own variable or by that of its plug-in for TorchServe."""
    return any(
        environment.get(name, "").lower() not in ("", "false")
        for name in ("SAGEMAKER_MULTI_MODEL", "SAGEMAKER_MULTI_MODE")
    )


def _addresses(environment: Mapping[str, str], is_multi_model: bool) -> dict[str, object]:
    """One port for SageMaker's calls. All other addresses are of this machine alone, on ports that belong to this
    container: the containers of an endpoint share their addresses.
    """
    port = _number(environment, "SAGEMAKER_BIND_TO_PORT", 1, 65534) or DEFAULT_PORT
    front = f"http://0.0.0.0:{port}"
    addresses: dict[str, object] = {
        "inference_address": front,
        "management_address": f"http://{LOOPBACK}:8081",
        "metrics_address": f"http://{LOOPBACK}:8082",
        "grpc_inference_address": LOOPBACK,
        "grpc_management_address": LOOPBACK,
    }
    wanted: tuple[str, ...] = FURTHER_PORTS
    if is_multi_model:
        addresses |= {"management_address": front, "allow_open_management": "true", "enable_model_api": "true"}
        wanted = FURTHER_PORTS[:-1]
    for name, safe in zip(wanted, _safe_ports(environment, port, len(wanted)), strict=False):
        addresses[name] = safe if name.endswith("_port") else f"http://{LOOPBACK}:{safe}"
    return addresses


def _safe_ports(environment: Mapping[str, str], taken: int, count: int) -> list[int]:
    """`count` ports of the range that SageMaker gave this container; none if it gave no range."""
    said = environment.get("SAGEMAKER_SAFE_PORT_RANGE")
    if not said:
        return []
    found = re.fullmatch(r"\s*([0-9]{1,5})\s*-\s*([0-9]{1,5})\s*", said)
    first, last = (int(found[1]), int(found[2])) if found else (1, 0)
    ports = [port for port in range(max(first, 1), min(last, 65534) + 1) if port != taken][:count]
    if len(ports) < count:
        raise BadSettings(
            f"SAGEMAKER_SAFE_PORT_RANGE is {said!r}; it must be two ports with {count} or more to use, as 11000-11999"
        )
    return ports


def _number(environment: Mapping[str, str], variable: str, least: int = 1, most: int = 2**31 - 1) -> int | None:
    said = environment.get(variable, "").strip()
    if not said:
        return None
    number = int(said) if re.fullmatch(r"[0-9]{1,10}", said) else -1
    if not least <= number <= most:
        raise BadSettings(f"{variable} is {said!r}; it must be a whole number from {least} to {most}")
    return number


# ------------------------------------------------------------------------------------------------------ the models


def _many_models(environment: Mapping[str, str], base: Path) -> dict[str, object]:
    """Settings without models at first: SageMaker loads and unloads them, from folders of its own."""
    _refuse_script_settings(environment, "a multi-model endpoint has many")
    settings: dict[str, object] = {
        "load_models": "",
        "model_roots": base / "models",
        "default_service_handler": SCRIPT_HANDLER,
        "default_requirements_file": SCRIPT_REQUIREMENTS,
    }
    if "SAGEMAKER_MODEL_SERVER_WORKERS" not in environment:
        settings["default_workers_per_model"] = 1
    return settings


def _one_model(environment: Mapping[str, str], folder: Path) -> dict[str, object]:
    """The model in `folder`: an unpacked one, archives, or a script with its weights. If it is empty, the image's own
    settings say what is loaded.
    """
    try:
        entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except FileNotFoundError:
        entries = []
    except OSError as error:
        raise BadSettings(
            f"The model's folder {folder} cannot be read ({error.strerror}); SageMaker fills it"
        ) from None
    if not entries:
        _refuse_script_settings(environment, f"{folder} holds none")
        return {}
    # A model that cannot be loaded ends the container at once, and the log says why.
    settings: dict[str, object] = {"model_store": folder, "strict_start": "true"}
    archives = list(_archives(entries))
    if _is_unpacked(folder) or archives:
        _refuse_script_settings(environment, f"{folder} holds one with a manifest, whose configuration says it")
        names = [str(folder)] if _is_unpacked(folder) else archives
        return settings | {"load_models": ",".join(names), "model_roots": folder.parent}
    if not _is_script(folder, entries):
        listed = ", ".join(entry.name for entry in entries[:8]) + (" …" if len(entries) > 8 else "")
        raise BadSettings(
            f"{folder} holds no model, only {listed}: put an archive (.mar, .tar.gz), an unpacked one "
            "(MAR-INF/MANIFEST.json), or code/inference.py with its weights into model.tar.gz"
        )
    said = {name: _number(environment, variable) for variable, name in _SCRIPT_SETTINGS.items()}
    said = {name: number for name, number in said.items() if number is not None}
    if said:
        settings["models"] = json.dumps({SCRIPT_MODEL: {SCRIPT_VERSION: said}})
    return settings | {
        "load_models": f"{SCRIPT_MODEL}={folder}",
        "model_roots": folder.parent,
        "default_service_handler": SCRIPT_HANDLER,
        "default_requirements_file": SCRIPT_REQUIREMENTS,
        "decode_input_request": "false",
    }


def _archives(entries: list[Path]) -> Iterator[str]:
    # Late, as above.
    from marserve.store.sources.local import ARCHIVE_ENDINGS

    for entry in entries:
        if _is_unpacked(entry) or (entry.is_file() and entry.name.lower().endswith(ARCHIVE_ENDINGS)):
            yield entry.name


def _is_unpacked(folder: Path) -> bool:
    return (folder / "MAR-INF" / "MANIFEST.json").is_file()


def _is_script(folder: Path, entries: list[Path]) -> bool:
    return (folder / "code").is_dir() or any(entry.suffix in (".py", ".pt", ".pth") for entry in entries)


def _refuse_script_settings(environment: Mapping[str, str], why: str) -> None:
    for variable in _SCRIPT_SETTINGS:
        if environment.get(variable):
            raise BadSettings(
                f"{variable} is {environment[variable]!r}, and is said of the model of an inference script; "
                f"{without_stop(why)}. Remove the variable"
            )
