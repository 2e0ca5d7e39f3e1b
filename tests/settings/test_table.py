"""The table itself: complete against TorchServe's keys, and the files made from it up to date."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import javaproperties
import pytest

from marserve.settings import KEYS, Settings, load_settings
from marserve.settings.__main__ import main
from marserve.settings.document import write_config, write_page
from marserve.settings.values import Reading
from support.inventory import inventory

ROOT = Path(__file__).parents[2]


def test_every_key_of_torchserve_is_known_with_its_default_and_variable() -> None:
    """Differences are those that are meant: nothing remote is fetched by default."""
    for theirs in inventory("config_keys"):
        key = KEYS[theirs["key"]]
        assert key.is_torchserves, key.name
        variable = key.always_env if theirs.get("env_always") else key.ts_env
        assert variable == theirs["env"], key.name
        default = theirs["default"]
        if key.name in ("allowed_urls", "workflow_store", "number_of_gpu", "metrics_config", "python"):
            continue  # "whatever is there", or nothing remote
        shown = key.kind.write(key.defaults["torchserve"])
        expected = "" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
        assert shown == expected, key.name


def test_every_key_of_models_is_read() -> None:
    """Beside a snapshot's keys."""
    kind = KEYS["models"].kind
    warnings: list[str] = []

    for name in inventory("models_json_keys"):
        kind.read(
            json.dumps({"m": {"1": {name: "python" if name == "runtimeType" else 1}}}), reading("models", warnings)
        )

    assert warnings == []


def reading(name: str, warnings: list[str]) -> Reading:
    """How a value of that key is read."""
    key = KEYS[name]
    return Reading(name, Path("/here"), warnings.append, key.minimum, key.maximum, key.choices)


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_a_default_survives_being_written_and_read(key: Any) -> None:
    """So that the commented file says what happens without it; and no default warns."""
    warnings: list[str] = []
    for default in key.defaults.values():
        text = key.kind.write(default)
        again = key.kind.read(text, reading(key.name, warnings))
        assert again == (Path("/here") / default if isinstance(default, Path) else default)
    assert warnings == []


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_a_key_says_what_it_is_for(key: Any) -> None:
    """One sentence each, in the form all have."""
    assert key.sentence.endswith(".")
    assert key.sentence[0].isupper()
    assert not (key.accepts and key.refuses)


def test_no_two_keys_share_a_variable() -> None:
    """A variable sets one thing."""
    variables = [variable for key in KEYS.values() for variable in (key.env, key.ts_env, key.always_env) if variable]

    assert len(variables) == len(set(variables))


def test_every_field_but_the_bookkeeping_is_a_key() -> None:
    """A field that the table does not know would never be set."""
    assert {declared.name for declared in fields(Settings)} - set(KEYS) == {
        "entry",
        "notes",
        "original_file",
        "origins",
        "restored_from",
        "source_file",
        "warnings",
        "working_directory",
    }


def test_the_root_config_is_up_to_date() -> None:
    """`python -m marserve.settings config > config.properties` makes it."""
    assert (ROOT / "config.properties").read_text() == write_config()


def test_the_page_is_up_to_date() -> None:
    """`python -m marserve.settings docs > docs/settings.md` makes it."""
    assert (ROOT / "docs" / "settings.md").read_text() == write_page()


def test_the_commented_file_names_every_key_once_in_plain_ascii() -> None:
    """Java's properties are no UTF-8."""
    text = write_config()

    assert text.isascii()
    assert all(sum(line.lstrip("#").startswith(f"{name}=") for line in text.splitlines()) == 1 for name in KEYS)
    assert all(f"| `{name}` |" in write_page() for name in KEYS)


def test_the_commented_lines_are_the_defaults() -> None:
    """Uncommenting everything changes nothing but what the examples set."""
    lines = [line.lstrip("#") for line in write_config().splitlines() if "=" in line and line.lstrip("#")[0].isalpha()]
    values = javaproperties.loads("\n".join(lines))

    for name, key in KEYS.items():
        assert values[name] == (key.example or key.kind.write(key.defaults["torchserve"])), name


@pytest.mark.parametrize("entry", ["torchserve", "marserve"])
def test_the_root_config_starts_both(entry: Any, tmp_path: Path) -> None:
    """Without a warning."""
    (tmp_path / "config.properties").write_text(write_config())
    (tmp_path / "model_store").mkdir()

    settings = load_settings(entry, {}, {}, tmp_path)

    assert settings.warnings == ()
    assert settings.load_models == "all"
    assert settings.disable_token_authorization


def test_the_command_prints_both_files(capsys: pytest.CaptureFixture[str]) -> None:
    """And explains itself otherwise."""
    assert main(["config"]) == 0
    assert capsys.readouterr().out == write_config()
    assert main(["docs"]) == 0
    assert capsys.readouterr().out == write_page()
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err
