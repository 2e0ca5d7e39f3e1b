"""Tests for declarations: what is refused, what their JSON is, how two differ."""

from __future__ import annotations

import json
from typing import Any

import pytest

from marserve_handlers import Tensor, model
from marserve_handlers.declared.declaration import (
    MAX_DECLARATION_BYTES,
    Declaration,
    DeclarationError,
    ItemType,
    check_same,
    check_tensors,
    first_difference,
)

OUT = {"y": Tensor("float32", ["batch"])}


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (Tensor("float32", [1, 28]), 'first dimension must be "batch"'),
        (Tensor("float32", []), 'first dimension must be "batch"'),
        (Tensor("float32", "batch"), 'first dimension must be "batch"'),
        (Tensor("float32", ["batch", "n", "n"]), "'n' twice"),
        (Tensor("float32", ["batch", "batch"]), "'batch' twice"),
        (Tensor("float33", ["batch"]), "dtype 'float33'; there are bool,"),
        (Tensor("float32", ["batch", -1]), "dimension -1"),
        (Tensor("float32", ["batch", True]), "dimension True"),
        (Tensor("float32", ["batch", "a b"]), "dimension 'a b'"),
        (Tensor("float32", ["batch", "n"], pad="0"), "pad '0'"),  # type: ignore[arg-type]
        (Tensor("float32", ["batch", "n"], pad=float("nan")), "pad nan; it must be a number of float32"),
        (Tensor("int8", ["batch", "n"], pad=0.5), "pad 0.5; it must be a number of int8"),
        (Tensor("int8", ["batch", "n"], pad=128), "pad 128"),
        (Tensor("uint8", ["batch", "n"], pad=-1), "pad -1"),
        (Tensor("bool", ["batch", "n"], pad=2), "pad 2"),
        ("float32", "it must be a Tensor"),
    ],
)
def test_a_tensor_that_cannot_be_served_is_refused(tensor: Any, words: str) -> None:
    """With its name, the value seen, and what would be right."""
    with pytest.raises(DeclarationError, match="The input x ") as caught:
        check_tensors({"x": tensor}, OUT)

    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("inputs", "outputs", "words"),
    [
        ({}, OUT, "inputs is empty"),
        ({"x": OUT["y"]}, {}, "outputs is missing"),
        ({"x": Tensor("bool", ["batch"], optional=True)}, OUT, "Every input is optional"),
        ({"x y": OUT["y"]}, OUT, "no name of a parameter"),
        ({"x": OUT["y"]}, {"y": Tensor("int8", ["batch", "n"], pad=0)}, "which only inputs have"),
        (
            {"x": Tensor("int8", ["batch", "n"], pad=0), "n_lengths": OUT["y"]},
            OUT,
            "has the name of the lengths of n",
        ),
    ],
)
def test_tensors_that_do_not_go_together_are_refused(inputs: Any, outputs: Any, words: str) -> None:
    """One sentence says why."""
    with pytest.raises(DeclarationError, match=words):
        check_tensors(inputs, outputs)


@pytest.mark.parametrize(
    ("dtype", "pad"), [("bool", True), ("bool", 0), ("uint8", 255), ("int8", -128), ("int64", 1.0), ("bfloat16", -0.5)]
)
def test_a_pad_is_a_number_of_the_dtype(dtype: str, pad: float) -> None:
    """Its first and last ones, too."""
    check_tensors({"x": Tensor(dtype, ["batch", "n"], pad=pad)}, OUT)


def test_the_decorator_refuses_at_once() -> None:
    """The import of the handler's module fails, and so the load."""
    with pytest.raises(DeclarationError, match="'n' twice"):
        model(inputs={"x": Tensor("float32", ["batch", "n", "n"])}, outputs=OUT)


def test_the_json_of_tensors_is_a_list_in_order() -> None:
    """With pads and optional ones only where they are given."""
    declaration = Declaration(
        {"b": Tensor("int64", ["batch", "n"], pad=0), "a": Tensor("bool", ["batch"], optional=True)}, OUT, name="m"
    )

    assert json.loads(declaration.encode()) == {
        "version": 1,
        "kind": "tensors",
        "name": "m",
        "inputs": [
            {"name": "b", "dtype": "int64", "shape": ["batch", "n"], "pad": 0},
            {"name": "a", "dtype": "bool", "shape": ["batch"], "optional": True},
        ],
        "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch"]}],
    }


def test_the_json_of_an_item_says_its_types() -> None:
    """Of the answer only that it may be anything, if its type is unknown."""
    declaration = Declaration(input=ItemType("json", "application/json", {"type": "object"}))

    assert json.loads(declaration.encode()) == {
        "version": 1,
        "kind": "item",
        "input": {"type": "json", "contentType": "application/json", "schema": {"type": "object"}},
        "output": {"type": "any"},
    }


def test_a_declaration_is_bounded() -> None:
    """64 KB, of which the sentence says both numbers."""
    declaration = Declaration(input=ItemType("json", schema={"description": "x" * MAX_DECLARATION_BYTES}))

    with pytest.raises(DeclarationError, match=f"may have {MAX_DECLARATION_BYTES}"):
        declaration.encode()


def test_equal_declarations_may_be_written_differently() -> None:
    """Order of keys and blanks do not count."""
    check_same(b'{"a": 1, "b": [2]}', b'{"b":[2],"a":1}', "h.py")


def test_a_difference_says_where_and_what_both_have() -> None:
    """The archive's and the handler's."""
    archive = Declaration({"x": Tensor("float32", ["batch", 3])}, OUT).encode()
    handler = Declaration({"x": Tensor("float32", ["batch", 4])}, OUT).encode()

    with pytest.raises(DeclarationError) as caught:
        check_same(archive, handler, "h.py:H")

    assert 'at inputs[0].shape: the archive ["batch", 3], the handler ["batch", 4].' in str(caught.value)
    assert "the handler h.py:H" in str(caught.value)


def test_the_text_of_an_archive_from_before_texts_had_a_schema_is_the_handlers() -> None:
    """Another schema, or another type, differs."""
    old, new = b'{"input": {"type": "text"}}', b'{"input": {"type": "text", "schema": {"anyOf": []}}}'

    check_same(old, new, "h.py")
    for other in (b'{"input": {"type": "text", "schema": {}}}', b'{"input": {"type": "json"}}', b'{"input": null}'):
        with pytest.raises(DeclarationError, match="at input"):
            check_same(other, new, "h.py")


def test_an_archive_from_before_coroutines_were_declared_is_the_handlers() -> None:
    """The other way round it differs: the handler is no coroutine any more."""
    plain, coroutine = (Declaration(input=ItemType("text"), is_async=says).encode() for says in (False, True))

    check_same(plain, coroutine, "h.py")
    assert json.loads(coroutine)["async"] is True
    with pytest.raises(DeclarationError, match="at async: the archive true, the handler null"):
        check_same(coroutine, plain, "h.py")


def test_a_handler_that_declares_nothing_differs() -> None:
    """As when the archive's handler was replaced by one of TorchServe's shape."""
    with pytest.raises(DeclarationError, match=r"h.py declares nothing"):
        check_same(b'{"version":1}', b"", "h.py")


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ({"a": 1}, {"a": 1}, None),
        ({"a": 1}, {}, ("a", 1, None)),
        ({"a": [{"b": 1}]}, {"a": [{"b": 1}, {"b": 2}]}, ("a[1]", None, {"b": 2})),
        ([1, 2], [1, 3], ("", [1, 2], [1, 3])),
    ],
)
def test_the_first_difference_is_found(one: Any, other: Any, found: Any) -> None:
    """By its path."""
    assert first_difference(one, other) == found
