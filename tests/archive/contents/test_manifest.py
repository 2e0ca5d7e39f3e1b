"""What a manifest may say, and in which words a bad one is refused (RELIABILITY H4)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from marserve.archive.contents.manifest import Manifest, read_manifest
from marserve.errors import BadArchive
from support.archives import manifest


def test_every_key_of_the_contract_is_read(tmp_path: Path) -> None:
    """Known keys become fields; the whole document is kept for handlers."""
    document = {
        "createdOn": "31/01/2026 13:44:53",
        "description": "digits",
        "runtime": "python3",
        "somethingElse": {"a": [1, 2.5, None]},
        "model": {
            "modelName": "mnist",
            "serializedFile": "mnist.pt",
            "handler": "mnist_handler.py:entry",
            "modelFile": "mnist.py",
            "modelVersion": "1.0",
            "requirementsFile": "requirements.txt",
            "configFile": "model-config.yaml",
            "envelope": "json",
            "sourceVocab": "vocab.pt",
            "extensions": {"x": 1},
        },
        "archiverVersion": "0.12.0",
    }
    (tmp_path / "MAR-INF").mkdir()
    (tmp_path / "MAR-INF" / "MANIFEST.json").write_text(json.dumps(document))

    read = read_manifest(tmp_path)

    assert read == Manifest(
        created_on="31/01/2026 13:44:53",
        archiver_version="0.12.0",
        description="digits",
        runtime="python3",
        model_name="mnist",
        model_version="1.0",
        handler="mnist_handler.py:entry",
        serialized_file="mnist.pt",
        model_file="mnist.py",
        requirements_file="requirements.txt",
        config_file="model-config.yaml",
        envelope="json",
        source_vocab="vocab.pt",
        document=document,
    )


def test_an_archive_without_a_manifest_gives_an_empty_one(tmp_path: Path) -> None:
    """Registration may name model and handler itself; handlers then see None."""
    assert read_manifest(tmp_path) == Manifest()
    assert read_manifest(tmp_path).document is None


@pytest.mark.parametrize(
    ("data", "has_model_entry"),
    [(b'{"runtime": "python"}', True), (b'{"runtime": "python", "model": null}', False), (b'{"model": {}}', True)],
)
def test_a_manifest_without_a_model_entry_is_read(data: bytes, has_model_entry: bool) -> None:
    """What is missing is for the registration to say; only an explicit null is told apart."""
    read = read_manifest(data)

    assert read.has_model_entry is has_model_entry
    assert read.model_name is None
    assert read.warnings == ["the manifest has no createdOn and no archiverVersion"]


def test_an_unknown_runtime_is_kept_for_the_registration_to_judge() -> None:
    """Its parameters may name another."""
    assert read_manifest(b'{"runtime": "ruby", "model": {"modelName": "m"}}').runtime == "ruby"


@pytest.mark.parametrize(("number", "text"), [("1.10", "1.10"), ("2", "2"), ("1e3", "1e3")])
def test_a_version_written_as_a_number_is_the_text_that_stands_there(number: str, text: str) -> None:
    """1.10 is not 1.1."""
    read = read_manifest(f'{{"model": {{"modelName": "m", "modelVersion": {number}}}}}'.encode())

    assert read.model_version == text


@pytest.mark.parametrize("word", ["", None])
def test_an_empty_value_is_an_absent_one(word: str | None) -> None:
    """TorchServe's checks ask for empty and missing alike."""
    assert read_manifest(manifest(handler="h.py", configFile=word)).config_file is None


def test_a_byte_order_mark_is_no_damage() -> None:
    """Windows editors write one."""
    assert read_manifest(b"\xef\xbb\xbf" + manifest("m")).model_name == "m"


@pytest.mark.parametrize(
    "data",
    [b"{not json", b"", b"\xff\xfe", b'{"a": 1} x', b"[" * 100_000, b'{"a":' * 100_000],
    ids=["no JSON", "nothing", "no text", "something behind", "deep lists", "deep objects"],
)
def test_what_is_no_json_is_refused_in_the_contracts_words(data: bytes) -> None:
    """Clients know this sentence."""
    with pytest.raises(BadArchive, match=r"^Failed to parse signature\.json\.$"):
        read_manifest(data)


WRONG = {
    "a list": (b"[]", "must hold an object, not a list"),
    "a number": (b"3", "must hold an object, not a number"),
    "null": (b"null", "must hold an object, not null"),
    "model is a list": (b'{"model": []}', "model must be an object, not a list"),
    "model is text": (b'{"model": "m"}', "model must be an object, not text"),
    "name is a list": (b'{"model": {"modelName": ["m"]}}', r"model\.modelName must be text, not a list"),
    "handler is an object": (b'{"model": {"handler": {}}}', r"model\.handler must be text, not an object"),
    "version is true": (b'{"model": {"modelVersion": true}}', r"model\.modelVersion must be text, not true or false"),
    "runtime is a list": (b'{"runtime": []}', "runtime must be text, not a list"),
    "nested too deeply": (b'{"x": ' + b"[" * 70 + b"]" * 70 + b"}", "nested more than 64 deep"),
    "10 MB": (b'{"x": "' + b"x" * 10_000_000 + b'"}', "more than 1048576 bytes"),
}


@pytest.mark.parametrize("what", WRONG)
def test_values_of_the_wrong_type_are_refused_by_key(what: str) -> None:
    """H4: the sentence begins with the contract's words and goes on with the key."""
    data, words = WRONG[what]

    with pytest.raises(BadArchive, match=words) as refusal:
        read_manifest(data)

    assert refusal.value.message.startswith("Failed to parse signature.json.")


@pytest.mark.parametrize(
    "key", ["handler", "serializedFile", "modelFile", "requirementsFile", "configFile", "sourceVocab"]
)
@pytest.mark.parametrize("name", ["../x.py", "/etc/x.py", "a/../../x.py", "..\\x.py", "a\0b", ".."])
def test_a_file_outside_of_the_archive_is_refused_by_key(key: str, name: str) -> None:
    """H4: whoever joins such a name to the archive's folder would leave it."""
    values: dict[str, Any] = {"handler": "h.py", key: name}

    with pytest.raises(BadArchive, match=f"^{key} in MAR-INF/MANIFEST.json is"):
        read_manifest(manifest(**values))


def test_a_handlers_function_and_folder_are_no_way_outside() -> None:
    """The worker drops folders in front of a handler's module."""
    assert read_manifest(manifest(handler="src/h.py:entry")).handler == "src/h.py:entry"


def test_a_folder_in_the_manifests_place_is_refused(tmp_path: Path) -> None:
    """It is no I/O error of the server."""
    (tmp_path / "MAR-INF" / "MANIFEST.json").mkdir(parents=True)

    with pytest.raises(BadArchive, match="is a folder"):
        read_manifest(tmp_path)
