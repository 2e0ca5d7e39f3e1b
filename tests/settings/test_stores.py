"""What `stores` may say, which of it holds for an address, and that its secrets are in no text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from marserve.errors import BadSettings
from marserve.settings.load import load_settings
from marserve.settings.stores import NO_STORES, OPTIONS, STORES, Secret, Stores
from marserve.settings.values import Reading, Wrong

SECRET = "planted-secret"


def read(document: Any, folder: Path = Path("/here")) -> Stores:
    """What is made of this document."""
    text = document if isinstance(document, str) else json.dumps(document)
    return STORES.read(text, Reading("stores", folder, lambda sentence: None))


def test_the_longest_prefix_counts_alone() -> None:
    """What a shorter one says is not mixed in: a key of one is never sent with the endpoint of the other."""
    stores = read(
        {
            "s3://": {"region": "eu-west-1", "access_key_id": "A", "secret_access_key": SECRET},
            "s3://team/": {"endpoint_url": "http://minio:9000/"},
            "gs://team/": {"anonymous": True},
        }
    )

    assert stores.choose("s3", "s3://other/m.mar").text("region") == "eu-west-1"
    team = stores.choose("s3", "s3://team/m.mar")
    assert (team.text("endpoint_url"), team.text("region"), team.has("access_key_id")) == (
        "http://minio:9000",
        None,
        False,
    )
    assert stores.choose("gs", "gs://team/m.mar").flag("anonymous") is True
    assert stores.choose("gs", "gs://other/m.mar").flag("anonymous") is None
    assert stores.choose("az", "az://team/m.mar").values == {}


@pytest.mark.parametrize(
    ("prefix", "kind", "url"),
    [
        ("s3a://bucket/", "s3", "s3://bucket/m.mar"),
        ("GCS://bucket/", "gs", "gs://bucket/m.mar"),
        ("abfss://box@account.dfs.core.windows.net/", "az", "az://box@account/m.mar"),
        ("wasbs://box@account.blob.core.windows.net", "az", "az://box@account/m.mar"),
        ("az://box/", "az", "az://box/m.mar"),
        ("hf://org/name", "hf", "hf://org/name@main"),
    ],
)
def test_every_spelling_of_an_address_is_a_prefix(prefix: str, kind: Any, url: str) -> None:
    """In the form that counts."""
    stores = read({prefix: {"anonymous": True}})

    assert stores.choose(kind, url).flag("anonymous") is True


def test_nothing_given_is_no_stores() -> None:
    """An empty text, and no text at all."""
    assert read("  ") is NO_STORES


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ('{"s3://b/": {"secret_access_key": "planted-secret"', "is no JSON"),
        ("[]", "no JSON object"),
        ({"https://b/": {}}, "prefixes begin with s3://"),
        ({"b": {}}, "prefixes begin with"),
        ({"s3://b/?versionId=1": {}}, "prefixes begin with"),
        ({"s3://b/": SECRET}, "no object of options for s3://b/"),
        ({"s3://b/": {"secret": SECRET}}, "has 'secret' for s3://b/; options there are endpoint_url, "),
        ({"gs://b/": {"access_key_id": SECRET}}, "options there are .*billing_project"),
        ({"s3://b/": {"secret_access_key": 5}}, r'must be a text, \{"env": "VARIABLE"\} or'),
        ({"s3://b/": {"secret_access_key": {"env": ""}}}, "must be a text"),
        ({"s3://b/": {"secret_access_key": {"vault": SECRET}}}, "must be a text"),
        ({"s3://b/": {"anonymous": "yes"}}, "anonymous of s3://b/ in stores must be true or false"),
        ({"s3://b/": {"endpoint_url": f"http://u:{SECRET}@h"}}, "must be an http or https address without user"),
        ({"s3://b/": {"endpoint_url": "minio:9000"}}, "must be an http or https address"),
        ({"s3://b/": {"addressing_style": "auto"}}, "must be path or virtual"),
        ({"s3://b/": {"region": ""}}, "must be a text"),
    ],
)
def test_what_cannot_be_is_refused_without_its_values(document: Any, words: str) -> None:
    """The sentence names the option and the prefix; a value may be a secret that stands in the wrong place."""
    with pytest.raises(Wrong, match=words) as refused:
        read(document)

    assert SECRET not in str(refused.value)


def test_a_secret_is_a_text_a_variable_or_a_file(tmp_path: Path) -> None:
    """A file is read each time, so a rotated secret counts, and without its last newline."""
    (tmp_path / "key").write_text(f"{SECRET}\n")
    stores = read(
        {
            "s3://text/": {"secret_access_key": SECRET},
            "s3://env/": {"secret_access_key": {"env": "KEY"}},
            "s3://file/": {"secret_access_key": {"file": "key"}},
        },
        tmp_path,
    )

    for name in ("text", "env", "file"):
        assert stores.choose("s3", f"s3://{name}/m").secret("secret_access_key", {"KEY": SECRET}) == SECRET
    (tmp_path / "key").write_text("another")
    assert stores.choose("s3", "s3://file/m").secret("secret_access_key", {}) == "another"


def test_a_secret_that_is_not_there_is_named(tmp_path: Path) -> None:
    """By its variable or its file."""
    with pytest.raises(BadSettings, match="the variable KEY, which is not set"):
        Secret(env="KEY").reveal({})
    with pytest.raises(BadSettings, match=r"the file .*/key, which cannot be read \(No such file"):
        Secret(file=tmp_path / "key").reveal({})
    (tmp_path / "key").write_bytes(b"\xff\xfe")
    with pytest.raises(BadSettings, match=r"cannot be read \(it is no text\)"):
        Secret(file=tmp_path / "key").reveal({})


def test_no_text_of_the_settings_holds_a_secret(tmp_path: Path) -> None:
    """Not `repr`, nor what explains the value, though the origin of the key is told."""
    text = json.dumps(
        {"s3://b/": {"access_key_id": "A", "secret_access_key": SECRET, "proxy_url": f"http://u:{SECRET}@p"}}
    )
    (tmp_path / "config.properties").write_text(f"stores={text}\n")
    settings = load_settings("marserve", {}, {}, tmp_path)

    assert settings.stores.choose("s3", "s3://b/m").secret("secret_access_key", {}) == SECRET
    assert SECRET not in repr(settings.stores) + str(settings.stores) + settings.explain("stores")
    assert settings.explain("stores") == "stores=*** (config.properties, line 1)"
    assert SECRET not in repr(Secret(SECRET)) + str(Secret(SECRET)) + f"{Secret(SECRET)}"


def test_the_environment_sets_stores_too(tmp_path: Path) -> None:
    """As every key."""
    settings = load_settings("marserve", {}, {"MARSERVE_STORES": '{"gs://b/": {"anonymous": true}}'}, tmp_path)

    assert settings.stores.choose("gs", "gs://b/m").flag("anonymous") is True


def test_every_option_that_may_hold_a_secret_is_one() -> None:
    """Whoever adds an option whose name sounds like a secret has to say that it is one."""
    for option in OPTIONS.values():
        if any(
            word in option.name for word in ("secret", "token", "_key", "credentials", "connection_string", "proxy_url")
        ):
            assert option.form == "secret" or option.name in ("access_key_id", "kms_key_id", "credentials_file"), option
