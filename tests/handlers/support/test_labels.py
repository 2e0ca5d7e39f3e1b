"""Labels of classes: the file's forms, and what an answer makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from marserve_handlers.support.labels import load_label_mapping, map_class_to_label


def write(folder: Path, document: Any) -> Path:
    """The path of a mapping file with that content."""
    path = folder / "index_to_name.json"
    path.write_text(json.dumps(document), "utf-8")
    return path


@pytest.mark.parametrize(
    ("document", "mapping"),
    [
        ({"0": "cat", "1": "dog"}, {"0": "cat", "1": "dog"}),
        ({"0": ["n01", "cat"]}, {"0": "cat"}),
        ({"object_type_names": ["cat", "dog"]}, {"0": "cat", "1": "dog"}),
        ({}, {}),
    ],
)
def test_each_form_of_the_file_is_read(tmp_path: Path, document: Any, mapping: dict[str, str]) -> None:
    """Text, lists whose last element counts, and TorchServe's older form."""
    assert load_label_mapping(write(tmp_path, document)) == mapping


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (["cat"], '"class": "label"'),
        ({"0": 1}, "either str or List"),
        ({"0": []}, "either str or List"),
        ({"0": [["x"]]}, "either str or List"),
        ({"object_type_names": [1]}, "either str or List"),
    ],
)
def test_another_form_is_refused(tmp_path: Path, document: Any, words: str) -> None:
    """In TorchServe's words."""
    with pytest.raises(ValueError, match=words):
        load_label_mapping(write(tmp_path, document))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"0": "cat"', "is no JSON: Expecting ',' delimiter"),
        (b"", "is no JSON: Expecting value"),
        (b'{"0": "caf\xe9"}', "is no JSON: it is not UTF-8"),
        (b'["cat"]', 'index->name JSON mapping should be in "class": "label" format.'),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    """The author reads of a failed load which file of the archive is to be mended."""
    (tmp_path / "index_to_name.json").write_bytes(content)

    with pytest.raises(ValueError, match=r"^index_to_name\.json") as refused:
        load_label_mapping(tmp_path / "index_to_name.json")
    assert words in str(refused.value)


def test_no_file_is_no_mapping(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With a warning that names the file, not its folder."""
    assert load_label_mapping(tmp_path / "index_to_name.json") is None
    assert "index_to_name.json is missing" in caplog.text
    assert str(tmp_path) not in caplog.text


def test_labels_stand_beside_their_probabilities() -> None:
    """In the order of the row; classes without a label by number."""
    rows = map_class_to_label([[0.7, 0.3], [0.9, 0.1]], {"3": "cat"}, [[3, 1], [0, 3]])

    assert rows == [{"cat": 0.7, "1": 0.3}, {"0": 0.9, "cat": 0.1}]
    assert [list(row) for row in rows] == [["cat", "1"], ["0", "cat"]]


def test_without_classes_they_are_counted() -> None:
    """0, 1, 2 and so on."""
    assert map_class_to_label([[0.5, 0.5]]) == [{"0": 0.5, "1": 0.5}]


@pytest.mark.parametrize("arguments", [((1, 2),), ([[1]], ["a"]), ([[1]], None, (0,))])
def test_other_types_are_refused(arguments: tuple[Any, ...]) -> None:
    """Rows and classes are lists, the mapping is a dict."""
    with pytest.raises(TypeError):
        map_class_to_label(*arguments)
