"""Every key, every key of `models` and every flag of TorchServe: honoured, or answered with a sentence.

The lists are the contract's inventory; each entry is a test. A key is honoured when the server reads its setting.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from marserve.cli.torchserve import torchserve
from marserve.errors import BadSettings
from marserve.model_options import BY_KEY, said_in
from marserve.settings import KEYS, Settings, load_settings
from support.inventory import inventory

SERVER = Path(torchserve.__file__).parents[2]

CONFIG_KEYS = inventory("config_keys")
FLAGS = [flag for flag in inventory("cli_flags") if flag["program"] == "torchserve"]

# What a key may well be set to; the rest have a value of their type.
SAMPLES = {
    "allowed_urls": "https://example.org/.*",
    "default_service_handler": "service.py:handle",
    "keystore": "file.txt",
    "load_models": "a.mar",
    "metrics_mode": "legacy",
    "models": '{"m": {"1.0": {"minWorkers": 1}}}',
    "model_snapshot": '{"name": "startup.cfg", "modelCount": 0, "created": 1, "models": {}}',
    "model_store": "other",
    "number_of_gpu": "0",
    "python": "python3",
    "service_envelope": "json",
    "workflow_store": "other",
}
BY_TYPE = {
    "address": "http://127.0.0.1:7999",
    "host": "127.0.0.2",
    "int": "1234",
    "float": "12.5",
    "string": "text",
    "path": "file.txt",
    "regex": "SECRET_.*",
}
# Settings that are used up while settings are found and checked.
USED_IN_SETTINGS = {
    "enable_envvars_config": "says whether TS_ variables are read",
    "use_env_allowed_urls": "says whether TS_ALLOWED_URLS is read",
    "use_native_io": "with false, socket files as addresses are refused",
}


def sample(key: dict[str, Any]) -> str:
    """A value that is not the key's default."""
    if key["type"] == "bool":
        return "false" if key["default"] else "true"
    return SAMPLES.get(key["key"]) or BY_TYPE[key["type"]]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A working directory with what samples name."""
    (tmp_path / "store").mkdir()
    (tmp_path / "other").mkdir()
    for name in ("file.txt", "cert.pem", "key.pem"):
        (tmp_path / name).write_text("")
    return tmp_path


def load(here: Path, lines: dict[str, str], environment: dict[str, str] | None = None) -> Settings:
    """Settings as `torchserve` finds them, from a file with these lines."""
    needed = {
        "model_store": "store",
        "disable_token_authorization": "true",
        "certificate_file": "cert.pem",
        "private_key_file": "key.pem",
    }
    text = "".join(f"{name}={value}\n" for name, value in (needed | lines).items())
    (here / "config.properties").write_text(text)
    return load_settings("torchserve", {}, environment or {}, here)


def load_or_refuse(here: Path, lines: dict[str, str], environment: dict[str, str] | None = None) -> Any:
    """The settings, or what is said where they cannot be."""
    try:
        return load(here, lines, environment)
    except BadSettings as refusal:
        return refusal


@pytest.fixture(scope="module")
def settings_read() -> set[str]:
    """The settings that the server's code reads, outside of where they are found, or a model's option falls back to."""
    found = {str(option.setting) for option in said_in("server")}
    for path in SERVER.rglob("*.py"):
        if path.parent.name == "settings":
            continue
        text = path.read_text("utf-8")
        if not re.search(r"\b_*(?:settings|loaded)\s*\.", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
                if owner.lstrip("_") in ("settings", "loaded"):
                    found.add(node.attr)
    return found


def answers_with_a_next_step(name: str, refusal: BadSettings) -> bool:
    """Whether a refusal names the key, where it stands and what to do."""
    said = str(refusal)
    steps = ("set it to", "set this to", "remove it", "instead", "use ", "write ", "name ")
    return name in said and "config.properties, line" in said and any(step in said for step in steps)


@pytest.mark.parametrize("key", CONFIG_KEYS, ids=lambda key: key["key"])
def test_every_key_is_honoured_or_answered(here: Path, settings_read: set[str], key: dict[str, Any]) -> None:
    """Never ignored in silence: the server reads it, a note says that it changes nothing, or it is refused."""
    name = key["key"]
    settings = load_or_refuse(here, {name: sample(key)})
    if isinstance(settings, BadSettings):
        assert KEYS[name].refuses
        assert answers_with_a_next_step(name, settings)
        return

    assert getattr(settings, name) != KEYS[name].defaults["torchserve"]
    if KEYS[name].accepts:
        assert any(name in note and "accepted" in note for note in settings.notes)
    else:
        assert name in settings_read | USED_IN_SETTINGS.keys()


@pytest.mark.parametrize("key", [key for key in CONFIG_KEYS if key["env"]], ids=lambda key: key["env"])
def test_every_variable_goes_before_the_file(here: Path, key: dict[str, Any]) -> None:
    """Where the file lets it, and for two keys always."""
    name, variable = key["key"], key["env"]
    lines = {"enable_envvars_config": "true"}
    if key.get("env_always"):
        lines = {}
    elif "env_only_if" in key:
        lines |= dict([key["env_only_if"].split("=")])
    value = key.get("env_true_value") or sample(key)
    settings = load_or_refuse(here, lines, {variable: value})
    if isinstance(settings, BadSettings):
        assert KEYS[name].refuses
        assert str(settings).endswith(f"({variable})")
        return

    assert settings.origins[name][-1].where == variable
    assert getattr(settings, name) != KEYS[name].defaults["torchserve"]


@pytest.mark.parametrize(
    "key",
    [key for key in CONFIG_KEYS if key["env"] and not key.get("env_always") and not KEYS[key["key"]].always_env],
    ids=lambda key: key["env"],
)
def test_no_variable_counts_unless_the_file_lets_it(here: Path, key: dict[str, Any]) -> None:
    """And that it is set is said."""
    settings = load(here, {}, {key["env"]: sample(key)})

    assert key["env"] not in [origin.where for origin in settings.origins.get(key["key"], ())]
    assert any(key["env"] in note and "not read" in note for note in settings.notes)


@pytest.mark.parametrize("name", inventory("models_json_keys"))
def test_every_key_of_models_is_read_and_used(here: Path, name: str) -> None:
    """It reaches the version's options, in seconds where it is a time."""
    value: int | str = "python3" if name == "runtimeType" else 7
    settings = load(here, {"models": json.dumps({"m": {"1.0": {name: value}}})})

    (defaults,) = settings.models["m"].values()
    option = BY_KEY.get(name)
    read = defaults.runtime_type if option is None else defaults.options[option.attribute]
    assert read == (0.007 if name == "maxBatchDelay" else value)
    assert settings.warnings == ()
    assert option is None or "models" in option.order


# Flags that are no setting: what they do, and where that is tested.
ACTIONS = {
    "version": "tests/cli/torchserve/test_torchserve.py",
    "start": "tests/cli/torchserve/test_torchserve.py",
    "stop": "tests/cli/torchserve/test_torchserve.py",
    "foreground": "tests/cli/server/test_foreground.py",
}


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag["flag"])
def test_every_flag_is_taken_in_every_spelling(flag: dict[str, Any]) -> None:
    """The long one, with `=` and without, the short one, and the alias."""
    spellings = [flag["flag"], *(flag[other] for other in ("short", "alias") if flag.get(other))]
    for spelling in spellings:
        forms = [[spelling]] if flag["argument"] is None else [[spelling, "x"]]
        if flag["argument"] is not None and spelling.startswith("--"):
            forms.append([f"{spelling}=x"])
        for words in forms:
            taken = torchserve.parser().parse_args(words)
            given = getattr(taken, flag["flag"].removeprefix("--").replace("-", "_"))
            assert given in (True, "x", ["x"])


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag["flag"])
def test_every_flag_does_something(flag: dict[str, Any]) -> None:
    """It becomes a setting, is an action, or is answered with a sentence."""
    dest = flag["flag"].removeprefix("--").replace("-", "_")
    if dest in ACTIONS:
        assert (Path(__file__).parents[2] / ACTIONS[dest]).exists()
        return
    words = [flag["flag"]] if flag["argument"] is None else [flag["flag"], "x"]
    changed = torchserve._as_settings(torchserve.parser().parse_args(words))
    if not changed:
        source = Path(torchserve.__file__).read_text("utf-8")
        assert f"flags.{dest}" in source
        return
    ((name, _),) = changed.items()
    assert name == "ts_config" or name in KEYS


# The port's name to the key whose default has it.
PORT_KEYS = {
    "inference": "inference_address",
    "management": "management_address",
    "metrics": "metrics_address",
    "grpc_inference": "grpc_inference_port",
    "grpc_management": "grpc_management_port",
    "workers_from": "initial_worker_port",
    "distributed_from": "initial_distribution_port",
}


@pytest.mark.parametrize("name", inventory("ports"))
def test_every_port_is_the_default_of_its_key(name: str) -> None:
    """For those who let everything be."""
    default = KEYS[PORT_KEYS[name]].defaults["torchserve"]

    assert getattr(default, "port", default) == inventory("ports")[name]
