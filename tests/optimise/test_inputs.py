"""A folder of request bodies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from marserve.optimise.inputs import BadInputs, content_type_of, drawn_of, find_inputs, own_inputs
from marserve.option_values import Sample


def test_files_come_in_the_order_of_their_names_and_hidden_ones_do_not(tmp_path: Path) -> None:
    """Nor do folders."""
    for name in ("b.json", "a.png", ".hidden", "c"):
        (tmp_path / name).write_text("1")
    (tmp_path / "d").mkdir()

    found = find_inputs(tmp_path)

    assert [each.path.name for each in found] == ["a.png", "b.json", "c"]
    assert [each.content_type for each in found] == ["image/png", "application/json", ""]


@pytest.mark.parametrize(
    ("name", "kind"), [("a.npy", "application/x-npy"), ("a.JSON", "application/json"), ("a.txt", "text/plain")]
)
def test_a_content_type_follows_from_the_ending(name: str, kind: str) -> None:
    """Also in capitals."""
    assert content_type_of(Path(name)) == kind


def test_a_folder_that_is_none_or_empty_is_refused(tmp_path: Path) -> None:
    """With its name."""
    with pytest.raises(BadInputs, match="holds no files"):
        find_inputs(tmp_path)
    with pytest.raises(BadInputs, match="cannot be read"):
        find_inputs(tmp_path / "none")


def test_the_named_folder_goes_before_samples_and_samples_before_what_is_drawn(tmp_path: Path) -> None:
    """A note says what they are."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.json").write_text("1")
    (tmp_path / "cat.png").write_bytes(b"png")
    into = tmp_path / "into"
    into.mkdir()
    samples, drawn = (
        [Sample("image/png", "cat.png"), Sample(None, body=b"text")],
        [Sample("application/json", "", b"2")],
    )

    named = own_inputs(tmp_path, "in", samples, drawn, into)
    of_samples = own_inputs(tmp_path, "", samples, drawn, into)
    of_signature = own_inputs(tmp_path, "", [], drawn, into)

    assert ([each.path.name for each in named.inputs], named.is_drawn) == (["a.json"], False)
    assert [(each.path.read_bytes(), each.content_type) for each in of_samples.inputs] == [
        (b"png", "image/png"),
        (b"text", ""),
    ]
    assert "2 samples of the archive" in of_samples.note
    assert not of_samples.is_drawn
    assert [(each.path.read_bytes(), each.content_type) for each in of_signature.inputs] == [(b"2", "application/json")]
    assert of_signature.is_drawn
    assert "show errors and no agreement" in of_signature.note


def test_an_archive_without_inputs_of_its_own_is_told_what_to_name(tmp_path: Path) -> None:
    """So are a folder that is not in it, one that leads out of it or to itself, and a sample that is not there."""
    inside = tmp_path / "model"
    inside.mkdir()
    (tmp_path / "outside").mkdir()
    (inside / "link").symlink_to(tmp_path / "outside")
    (inside / "loop").symlink_to("loop")

    with pytest.raises(BadInputs, match="no samples, and no signature"):
        own_inputs(inside, "", [], [], tmp_path)
    for name in ("none", "link", "loop", "../outside", "x" * 300):
        with pytest.raises(BadInputs, match="no folder of the archive"):
            own_inputs(inside, name, [], [], tmp_path)
    with pytest.raises(BadInputs, match=r"the sample 'no\.png' is no file"):
        own_inputs(inside, "", [Sample(None, "no.png")], [], tmp_path)
    with pytest.raises(BadInputs, match=r"x' is no file of the archive"):
        own_inputs(inside, "", [Sample(None, "x" * 300)], [], tmp_path)


def test_inputs_are_drawn_from_the_signature_of_a_configuration_and_from_nothing_else() -> None:
    """What is no signature gives none, whatever it is."""
    tensors = {"x": {"dtype": "float32", "shape": ["batch", 2]}, "ids": {"dtype": "int64", "shape": ["batch", 1]}}

    drawn = drawn_of({"inputs": tensors})

    assert json.loads(drawn[0].body) == {"x": [0.0, 0.5], "ids": [0]}
    assert len(drawn) == 2
    assert [json.loads(each.body) for each in drawn_of({"inputs": {"x": tensors["x"]}})] == [[0.0, 0.5], [0.5, -0.5]]
    for odd in (None, 3, [], {}, {"inputs": [1]}, {"inputs": {"x": 3}}, {"inputs": {"x": {}}}, {"inputs": {}}):
        assert drawn_of(odd) == ()
