"""Claims of `marserve.settings.watches`: what `watches` and `event_secrets` may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from marserve.errors import BadSettings
from marserve.settings import Settings, load_settings
from marserve.settings.table import Entry
from marserve.settings.values import Kind, Reading, Wrong
from marserve.settings.watches import EVENT_SECRETS, STORE_POLICY, WATCHES, WatchedPlace


def read(kind: Kind[Any], text: str) -> Any:
    """Read a value as settings do."""
    return kind.read(text, Reading("watches", Path("/srv"), lambda sentence: None))


def test_a_watch_needs_a_place_and_a_policy() -> None:
    """All else has a default; names come from places, folders begin where the server does."""
    watches = read(
        WATCHES,
        '[{"place": "s3://bucket/models/", "policy": "load_and_default"}, {"place": "drop", "policy": "load"},'
        ' {"place": "model_store", "policy": "ignore"}]',
    )

    assert watches == (
        WatchedPlace("models", "s3://bucket/models/", "load-and-default"),
        WatchedPlace("drop", "/srv/drop", "load"),
        WatchedPlace("model_store", "model_store", "ignore"),
    )


def test_what_is_read_is_written_the_same() -> None:
    """For snapshots of settings."""
    text = json.dumps(
        [
            {
                "name": "w",
                "place": "s3://b/p/",
                "policy": "canary",
                "removed": "unload",
                "names": "path",
                "keep": 3,
                "interval": 5.0,
                "canary": {"steps": [10, 100]},
            }
        ]
    )

    assert WATCHES.write(read(WATCHES, text)) == text
    assert read(WATCHES, WATCHES.write(())) == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("s3://b/", "is no JSON"),
        ("{}", "is no list of objects"),
        ("[1]", "is no list of objects"),
        ('[{"policy": "load"}]', "place of watch 1 is null; it must be model_store, a folder"),
        ('[{"place": "s3://b/", "policy": "yes"}]', 'policy of watch 1 is "yes"; it must be one of ignore, load'),
        ('[{"place": "s3://b/"}]', "policy of watch 1 is null"),
        ('[{"place": "s3://b/?x", "policy": "load"}]', "an address without ? and #"),
        ('[{"place": "x", "policy": "load", "keep": -1}]', "keep of watch 1 is -1; it must be a whole number of 0"),
        ('[{"place": "x", "policy": "load", "keep": true}]', "keep of watch 1 is true"),
        ('[{"place": "x", "policy": "load", "interval": 0.1}]', "interval of watch 1 is 0.1; it must be a number of"),
        ('[{"place": "x", "policy": "load", "interval": NaN}]', "interval of watch 1 is NaN"),
        ('[{"place": "x", "policy": "load", "name": "a b"}]', "name of watch 1"),
        ('[{"place": "x", "policy": "load", "polcy": 1}]', "watch 1 has 'polcy'; known are name, place"),
        (
            '[{"place": "x", "policy": "load", "canary": {}}, {"place": "x", "policy": "load", "name": "y"}]',
            "two watches",
        ),
        ('[{"place": "x", "policy": "load", "canary": {"steps": [5]}}]', "with the policy canary"),
        ('[{"place": "a/x", "policy": "load"}, {"place": "b/x", "policy": "load"}]', "two watches of the name 'x'"),
        ('[{"place": "x", "policy": "load", "removed": "delete"}]', "one of ignore, unload"),
        ('[{"place": "x", "policy": "load", "names": "any"}]', "one of auto, manifest, path"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_would_be_right(text: str, said: str) -> None:
    """By the number of the watch and its key."""
    with pytest.raises(Wrong) as raised:
        read(WATCHES, text)

    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("text", "policy"),
    [("off", None), ("", None), ("LOAD", "load"), ("load_and_default", "load-and-default"), ("canary", "canary")],
)
def test_the_model_store_has_a_word_of_its_own(text: str, policy: str | None) -> None:
    """With hyphens or underscores."""
    assert read(STORE_POLICY, text) == policy
    assert read(STORE_POLICY, STORE_POLICY.write(policy)) == policy


def test_another_word_for_the_model_store_is_refused() -> None:
    """Saying which there are."""
    with pytest.raises(Wrong, match="must be off or one of ignore, load, load-and-default, canary"):
        read(STORE_POLICY, "always")


def test_event_secrets_stand_there_or_elsewhere_and_are_never_shown(tmp_path: Path) -> None:
    """In the setting, in a variable, in a file that may change."""
    (tmp_path / "secret").write_text("from-a-file-0123456789\n")
    text = json.dumps(
        {"a": "stands-here-0123456789", "b": {"env": "B_SECRET"}, "c": {"file": str(tmp_path / "secret")}}
    )
    secrets = read(EVENT_SECRETS, text)
    environment = {"B_SECRET": "from-a-variable-0123"}

    assert {name: secret.reveal(environment) for name, secret in secrets.items()} == {
        "a": "stands-here-0123456789",
        "b": "from-a-variable-0123",
        "c": "from-a-file-0123456789",
    }
    assert "0123456789" not in repr(secrets) + EVENT_SECRETS.write(secrets)


@pytest.mark.parametrize("text", ["x", "[]", '{"a": "short"}', '{"a b": "0123456789abcdef"}', '{"a": {"env": 1}}'])
def test_event_secrets_that_cannot_be_are_refused_without_their_value(text: str) -> None:
    """A secret of a few characters is none."""
    with pytest.raises(Wrong) as raised:
        read(EVENT_SECRETS, text)

    assert "0123456789abcdef" not in str(raised.value)


def settings_of(folder: Path, entry: Entry = "torchserve", **keys: str) -> Settings:
    """Settings from a file with these keys."""
    lines = {"disable_token_authorization": "true", "model_store": str(folder), **keys}
    (folder / "config.properties").write_text("".join(f"{name}={value}\n" for name, value in lines.items()))
    return load_settings(entry, {}, {}, folder)


@pytest.mark.parametrize("entry", ["torchserve", "marserve"])
def test_nothing_is_watched_unless_it_is_asked_for(tmp_path: Path, entry: Entry) -> None:
    """As TorchServe, which never looks again."""
    settings = settings_of(tmp_path, entry)

    assert settings.watch_model_store is None
    assert settings.watches == ()
    assert settings.event_secrets == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [("watch_model_store", "load"), ("watches", '[{"place": "drop", "policy": "load"}]')],
)
def test_where_a_desired_state_decides_nothing_else_is_watched(tmp_path: Path, name: str, value: str) -> None:
    """Two words for one thing are an error that names both."""
    (tmp_path / "models.yaml").write_text("models: {}\n")

    with pytest.raises(BadSettings, match=f"decides alone which models there are, and {name} says it too"):
        settings_of(tmp_path, desired_state="models.yaml", **{name: value})
