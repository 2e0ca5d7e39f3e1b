"""Tests for models that declare themselves: ONNX, exported programs, and a signature in the configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from marserve_handlers.base import BaseHandler
from marserve_handlers.declared.answer import JsonAnswer
from marserve_handlers.declared.declaration import DeclarationError
from marserve_handlers.declared.named import declare_specs
from marserve_handlers.declared.signature import read_signature
from marserve_handlers.envelopes.kserve import KServeEnvelope
from marserve_handlers.envelopes.kserve_v2 import KServev2Envelope
from marserve_handlers.errors import BadInput
from support.model_context import FakeItem, make_context
from support.pages import block
from support.triton_models import write_negative

torch = pytest.importorskip("torch")
SIGNATURE = yaml.safe_load(block("docs/declared-handlers.md", "signature"))


class Doubled(torch.nn.Module):  # type: ignore[name-defined,misc]
    """Twice its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[name-defined]
        """Of any shape."""
        return x * 2


class Two(torch.nn.Module):  # type: ignore[name-defined,misc]
    """Two inputs, two outputs."""

    def forward(self, x: Any, y: Any) -> Any:
        """The second has a number for each row."""
        return x.sum(1) + y, x


class Sorted(torch.nn.Module):  # type: ignore[name-defined,misc]
    """Its numbers in order: what one request gives depends on all of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[name-defined]
        """Along the last axis."""
        return torch.sort(x, -1)[0]


class Both(torch.nn.Module):  # type: ignore[name-defined,misc]
    """Two outputs of one input."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[name-defined]
        """The input and its negative."""
        return x, -x


def exported(folder: Path, module: Any, *arguments: Any, shapes: Any) -> Any:
    """A base handler that has loaded a program exported with these arguments."""
    program = torch.export.export(module.eval(), arguments, dynamic_shapes=shapes)
    torch.export.save(program, folder / "model.pt2")
    return loaded(folder, "model.pt2")


def loaded(folder: Path, name: str, **config: Any) -> BaseHandler:
    """A base handler that has loaded this file."""
    handler = BaseHandler()
    handler.initialize(make_context(folder, name, config=config))
    return handler


def answers(handler: BaseHandler, *bodies: Any) -> list[Any]:
    """The answers to a batch of these values, JSON decoded."""
    context = handler.context
    context.begin_batch([FakeItem() for _ in bodies])
    given = handler.handle([{"body": body} for body in bodies], context)
    return [json.loads(each.body) if isinstance(each, JsonAnswer) else each for each in given]


@pytest.mark.parametrize("specs", [[("x", None, ["n"])], [("x", "float32", [])], []])
def test_what_is_no_tensor_of_numbers_declares_nothing(specs: Any) -> None:
    """Nor does a program that also takes or gives tensors."""
    assert declare_specs(specs, [("y", "float32", ["n"])]) is None
    assert declare_specs([("y", "float32", ["n"])], specs) is None


@pytest.mark.parametrize(
    ("first", "given", "shape", "has_batch_axis", "takes_one_row"),
    [
        ("n", "n", ["batch", 2], True, False),
        (1, 1, ["batch", 2], True, True),
        (3, 3, ["batch", 3, 2], False, False),
        (1, 3, ["batch", 1, 2], False, False),
        ("n", 3, ["batch", "n", 2], False, False),
    ],
)
def test_the_first_sizes_are_the_batchs_if_all_vary_or_all_are_one(
    first: int | str, given: int | str, shape: list[int | str], has_batch_axis: bool, takes_one_row: bool
) -> None:
    """Of any other program the shapes are whole, and each request is run by itself."""
    found = declare_specs([("x", "float32", [first, 2])], [("y", "float32", [given, 2])])

    assert found is not None
    assert (found.inputs["x"].shape, found.has_batch_axis, found.takes_one_row) == (
        shape,
        has_batch_axis,
        takes_one_row,
    )


def test_sizes_that_vary_get_names() -> None:
    """Their own where these are plain and not taken."""
    declaration = declare_specs(
        [("a.1", "float32", ["n", "tokens", None, "tokens", "n", "x+1", 3])], [("y", "int64", [None])]
    )

    assert declaration is not None
    assert declaration.inputs["a.1"].shape == [
        "batch", "tokens", "a_1_size_2", "a_1_size_3", "a_1_size_4", "a_1_size_5", 3,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("signature", "words"),
    [
        (3, "inputs is empty"),
        ({"inputs": {"x": {"shape": ["batch"]}}}, "signature.inputs of the model's configuration is"),
        ({"inputs": 3}, "signature.inputs of the model's configuration is 3"),
        ({"inputs": {"x": {"dtype": "float32", "shape": [1]}}, "outputs": {}}, "outputs is missing"),
    ],
)
def test_a_signature_that_cannot_be_used_fails_the_load(signature: Any, words: str) -> None:
    """One sentence says why."""
    with pytest.raises(DeclarationError, match=words):
        read_signature({"signature": signature})


def test_an_exported_program_takes_its_inputs_by_name(tmp_path: Path) -> None:
    """With the batch axis and without, several at once; a row that does not fit fails alone."""
    rows, width = torch.export.Dim("rows"), torch.export.Dim("width")
    arguments = (torch.ones(3, 4), torch.ones(3))
    handler = exported(tmp_path, Two(), *arguments, shapes=({0: rows, 1: width}, {0: rows}))

    one, several, bad = answers(handler, {"x": [1, 2], "y": 3}, {"x": [[1, 2, 3], [4, 5, 6]], "y": [1, 2]}, {"x": [1]})

    assert one == {"output_0": 6.0, "output_1": [1.0, 2.0]}
    assert several["output_0"] == [7.0, 17.0]
    assert isinstance(bad, BadInput)
    declared = json.loads(handler.declaration)
    assert [each["name"] for each in declared["inputs"]] == ["x", "y"]
    assert declared["inputs"][1]["shape"] == ["batch"]


def test_json_without_a_content_type_names_inputs_too(tmp_path: Path) -> None:
    """As bytes, which is what comes of `curl -T body.json`."""
    rows = torch.export.Dim("rows", min=1)
    handler = exported(tmp_path, Two(), torch.zeros(2, 3), torch.zeros(2), shapes={"x": {0: rows}, "y": {0: rows}})
    body = {"x": [1.0, 2.0, 3.0], "y": 4.0}

    assert answers(handler, bytearray(json.dumps(body).encode())) == answers(handler, body)


def test_rows_of_numbers_are_answered_as_ever(tmp_path: Path) -> None:
    """Also beside requests that name the input."""
    handler = exported(tmp_path, Doubled(), torch.ones(3, 2), shapes=({0: torch.export.Dim("rows")},))

    assert answers(handler, [1.0, 2.0], {"x": [3, 4]}, [5.0, 6.0]) == [[2.0, 4.0], {"output": [6.0, 8.0]}, [10.0, 12.0]]
    assert answers(handler, [1.0, 2.0]) == [[2.0, 4.0]]


def test_a_program_of_one_row_is_run_on_one_after_the_other(tmp_path: Path) -> None:
    """Rows of several requests, of one with several rows, and one that does not fit."""
    handler = exported(tmp_path, Doubled(), torch.ones(1, 2), shapes=None)

    one, bare, several, bad = answers(handler, {"x": [1, 2]}, [3.0, 4.0], {"x": [[5, 6], [7, 8]]}, [1, 2, 3])

    assert (one, bare, several) == ({"output": [2, 4]}, [6, 8], {"output": [[10, 12], [14, 16]]})
    assert str(bad.message) == "x: expected float32 [2], got [3]"
    assert json.loads(handler.declaration)["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["batch", 2]}]
    assert answers(handler, [1.0, 2.0]) == [[2.0, 4.0]]


def test_a_program_of_a_fixed_size_takes_that_size_alone(tmp_path: Path) -> None:
    """Another one is refused by name, with what was expected and what came; each request is run by itself."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    program = write_negative(tmp_path, rows=3)
    rows = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]

    for handler in (
        exported(tmp_path, Both(), torch.ones(3, 2), shapes=None),
        loaded(program.parent, program.name),
    ):
        right, other, short, flat = answers(handler, {"x": rows}, rows, rows[:1], [1.0, 2.0])

        assert right == other
        assert list(right.values())[-1] in ([[-1, -2], [-3, -4], [-5, -6]], rows)
        assert str(short.message) == "x: expected float32 [3, 2], got [1, 2]"
        assert str(flat.message) == "x: expected float32 [3, 2], got [2]"


def test_a_signature_may_name_the_rows_of_a_program_of_one_row(tmp_path: Path) -> None:
    """The program is run on one of them at a time all the same."""
    program = torch.export.export(Doubled().eval(), (torch.ones(1, 2),))
    torch.export.save(program, tmp_path / "model.pt2")
    tensor = {"dtype": "float32", "shape": ["batch", 2]}

    handler = loaded(tmp_path, "model.pt2", signature={"inputs": {"a": tensor}, "outputs": {"b": tensor}})

    assert answers(handler, {"a": [[1, 2], [3, 4]]}) == [{"b": [[2.0, 4.0], [6.0, 8.0]]}]


def test_instances_of_an_envelope_name_the_inputs_of_a_program(tmp_path: Path) -> None:
    """And get its answers as values. What names another input, or is no instance of TorchScript, is refused by name."""
    handler = exported(tmp_path, Both(), torch.ones(1, 2), shapes=None)

    def ask(*instances: Any, handler: BaseHandler = handler) -> Any:
        handler.context.begin_batch([FakeItem()])
        return KServeEnvelope(handler.handle).handle([{"body": {"instances": list(instances)}}], handler.context)

    named = {"output_0": [1.0, 2.0], "output_1": [-1.0, -2.0]}
    assert ask({"x": [1, 2]}, [1, 2]) == [{"predictions": [named, named]}]
    with pytest.raises(BadInput, match="input: there is no such input; expected x: float32"):
        ask({"input": [1, 2]})

    bare = BaseHandler()
    bare.context, bare.device, bare.model = handler.context, "cpu", None
    with pytest.raises(BadInput, match="got an object with input"):
        ask({"input": [1, 2]}, handler=bare)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript_declares_by_its_configuration(tmp_path: Path) -> None:
    """The page's `signature`; without one nothing."""
    torch.jit.script(Doubled()).save(tmp_path / "model.pt")

    handler = loaded(tmp_path, "model.pt", **SIGNATURE)

    assert answers(handler, {"x": [1, 2, 3, 4]}, [1.0, 2, 3, 4]) == [{"y": [2.0, 4.0, 6.0, 8.0]}, [2.0, 4.0, 6.0, 8.0]]
    assert loaded(tmp_path, "model.pt").declaration == b""


def test_an_onnx_model_takes_its_inputs_by_name(tmp_path: Path) -> None:
    """Whatever their names are."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    floats, helper = onnx.TensorProto.FLOAT, onnx.helper
    graph = helper.make_graph(
        [helper.make_node("Add", ["a.1", "a.1"], ["sum"])],
        "g",
        [helper.make_tensor_value_info("a.1", floats, ["N", 2])],
        [helper.make_tensor_value_info("sum", floats, ["N", 2])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    onnx.save(model, tmp_path / "model.onnx")

    handler = loaded(tmp_path, "model.onnx")

    assert answers(handler, {"a.1": [1, 2]}, [3.0, 4.0], {"a.1": [[5, 6]]}) == [
        {"sum": [2.0, 4.0]},
        [6.0, 8.0],
        {"sum": [[10.0, 12.0]]},
    ]


def test_requests_of_the_open_inference_protocol_are_answered_beside_rows_of_numbers(tmp_path: Path) -> None:
    """Decoded before or not, with raw tensors or without; a row of numbers is one as ever."""
    dynamic = {"x": {0: torch.export.Dim.DYNAMIC}}
    handler = exported(tmp_path, Doubled(), torch.ones(2, 3), shapes=dynamic)
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 3]}
    output = json.loads(bytes(handler._named.text))["outputs"][0]["name"]
    plain = {"inputs": [{**tensor, "data": [1, 2, 3]}]}
    text = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": 12}}]}).encode()
    raw = text + torch.tensor([1.0, 2, 3]).numpy().tobytes()
    length = [(b"inference-header-content-length", str(len(text)).encode())]
    mark = [("open_inference", "v2")]
    context = handler.context
    context.begin_batch([FakeItem("a", [], mark), FakeItem("b", length, mark), FakeItem("c")])

    given = handler.handle([{"body": plain}, {"body": bytearray(raw)}, {"body": [1, 2, 3]}], context)

    for each in given[:2]:
        assert json.loads(each.body)["outputs"] == [
            {"name": output, "datatype": "FP32", "shape": [1, 3], "data": [2, 4, 6]}
        ]
    assert given[2] == [2, 4, 6]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_model_without_a_batch_axis_runs_each_request_by_itself(tmp_path: Path) -> None:
    """Its shapes are as its program knows them; several items of one request run one after the other."""
    tensor = {"dtype": "float32", "shape": [3]}
    torch.jit.script(Sorted()).save(tmp_path / "model.pt")
    signature = {"batch": False, "inputs": {"x": tensor}, "outputs": {"y": tensor}}
    handler = loaded(tmp_path, "model.pt", signature=signature)

    one, other, several = answers(handler, {"x": [3, 1, 2]}, {"x": [9, 8, 7]}, {"x": [[2, 1, 0], [5, 4, 6]]})

    assert (one, other) == ({"y": [1.0, 2.0, 3.0]}, {"y": [7.0, 8.0, 9.0]})
    assert several == {"y": [[0.0, 1.0, 2.0], [4.0, 5.0, 6.0]]}
    declared = json.loads(handler.declaration)
    assert (declared["batch"], declared["inputs"][0]["shape"]) == (False, [3])


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_program_may_know_a_tensor_by_another_shape_than_clients(tmp_path: Path) -> None:
    """Sizes that vary keep their names on both sides."""
    torch.jit.script(Sorted()).save(tmp_path / "model.pt")
    tensor = {"dtype": "float32", "shape": ["batch", 1, "n"], "reshape": ["batch", "n"]}
    handler = loaded(tmp_path, "model.pt", signature={"inputs": {"x": tensor}, "outputs": {"y": tensor}})

    one, other = answers(handler, {"x": [[3, 1]]}, {"x": [[2, 1, 0]]})

    assert (one, other) == ({"y": [[1.0, 3.0]]}, {"y": [[0.0, 1.0, 2.0]]})


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_request_of_the_protocol_has_no_batch_axis_where_the_model_has_none(tmp_path: Path) -> None:
    """Two requests of a batch run by themselves; one that brings the axis is refused, and classes have none either."""
    torch.jit.script(Sorted()).save(tmp_path / "model.pt")
    tensor = {"dtype": "float32", "shape": [3]}
    signature = {"batch": False, "inputs": {"x": tensor}, "outputs": {"y": tensor}}
    handler = loaded(tmp_path, "model.pt", signature=signature)

    def infer(*shape: int, **more: Any) -> dict[str, Any]:
        return {"inputs": [{"name": "x", "datatype": "FP32", "shape": list(shape), "data": [3, 1, 2]}], **more}

    bodies = [infer(3), infer(1, 3), infer(3, outputs=[{"name": "y", "parameters": {"classification": 1}}])]
    handler.context.begin_batch([FakeItem(server_headers=[("open_inference", "v2")]) for _ in bodies])
    plain, with_axis, classes = handler.handle([{"body": body} for body in bodies], handler.context)

    assert json.loads(plain.body)["outputs"] == [
        {"name": "y", "datatype": "FP32", "shape": [3], "data": [1.0, 2.0, 3.0]}
    ]
    assert str(with_axis.message) == "x: expected float32 [3], got [1, 3]"
    assert json.loads(classes.body)["outputs"] == [
        {"name": "y", "datatype": "BYTES", "shape": [1], "data": ["3.000000:2"]}
    ]


@pytest.mark.parametrize(
    ("signature", "words"),
    [
        ({"batch": "no"}, "signature.batch of the model's configuration is 'no'"),
        ({"inputs": {"x": {"dtype": "float32", "shape": ["batch"], "reshape": [1]}}}, 'must be "batch"'),
        (
            {"inputs": {"x": {"dtype": "float32", "shape": ["batch"], "reshape": ["batch", -1]}}},
            "has -1 in its",
        ),
        ({"inputs": {"x": 3}}, "must be a map of names"),
    ],
)
def test_a_signature_names_what_is_wrong_with_its_axes(signature: Any, words: str) -> None:
    """As the load fails."""
    outputs = {"outputs": {"y": {"dtype": "float32", "shape": ["batch"]}}}

    with pytest.raises(DeclarationError, match=words):
        read_signature({"signature": {**outputs, **signature}})


def test_an_onnx_model_gives_the_outputs_that_its_signature_names(tmp_path: Path) -> None:
    """By their names, in any order and not all of them; names that are not identifiers are names."""
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    value, kind = onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    nodes = [onnx.helper.make_node("Neg", ["x.1"], ["minus"]), onnx.helper.make_node("Abs", ["x.1"], ["size"])]
    ends = [value(name, kind, ["n", 2]) for name in ("minus", "size")]
    graph = onnx.helper.make_graph(nodes, "g", [value("x.1", kind, ["n", 2])], ends)
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8),
        tmp_path / "model.onnx",
    )
    tensor = {"dtype": "float32", "shape": ["batch", 2]}

    swapped = loaded(
        tmp_path, "model.onnx", signature={"inputs": {"x.1": tensor}, "outputs": {"size": tensor, "minus": tensor}}
    )
    fewer = loaded(tmp_path, "model.onnx", signature={"inputs": {"x.1": tensor}, "outputs": {"size": tensor}})

    assert answers(swapped, {"x.1": [1, -2]}) == [{"size": [1.0, 2.0], "minus": [-1.0, 2.0]}]
    assert answers(fewer, {"x.1": [1, -2]}) == [{"size": [1.0, 2.0]}]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_classes_have_the_labels_of_the_signatures_file(tmp_path: Path) -> None:
    """A class beyond its lines has none; a file that is not the archive's fails the load."""
    torch.jit.script(Doubled()).save(tmp_path / "model.pt")
    (tmp_path / "labels.txt").write_text("cat\ndög\n")
    tensor = {"dtype": "float32", "shape": ["batch", 3]}
    outputs = {"y": {**tensor, "labels": "labels.txt"}}
    handler = loaded(tmp_path, "model.pt", signature={"inputs": {"x": tensor}, "outputs": outputs})
    asked = [{"name": "y", "parameters": {"classification": 2}}]
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}], "outputs": asked}
    handler.context.begin_batch([FakeItem(server_headers=[("open_inference", "v2")])])

    (given,) = handler.handle([{"body": body}], handler.context)

    assert json.loads(given.body)["outputs"][0]["data"] == ["6.000000:2", "4.000000:1:dög"]
    for file in ("other.txt", "../labels.txt", "/etc/passwd"):
        outputs["y"]["labels"] = file
        with pytest.raises(DeclarationError, match="which is no file of the archive"):
            loaded(tmp_path, "model.pt", signature={"inputs": {"x": tensor}, "outputs": outputs})


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_signature_may_name_the_first_outputs_alone(tmp_path: Path) -> None:
    """More than the program gives fail the request."""
    torch.jit.script(Both()).save(tmp_path / "model.pt")
    tensor = {"dtype": "float32", "shape": ["batch", 2]}
    some, more = (
        loaded(
            tmp_path,
            "model.pt",
            signature={"inputs": {"x": tensor}, "outputs": {f"y{number}": tensor for number in range(count)}},
        )
        for count in (1, 3)
    )

    assert answers(some, {"x": [1, 2]}) == [{"y0": [1.0, 2.0]}]
    with pytest.raises(ValueError, match="the model gave 2 outputs, and 3 are declared"):
        answers(more, {"x": [1, 2]})


def test_a_bare_array_is_the_only_input(tmp_path: Path) -> None:
    """In its dtype, with the batch axis and without; what does not fit fails alone, as it does by name."""
    handler = exported(tmp_path, Doubled(), torch.ones(3, 2), shapes=({0: torch.export.Dim("rows")},))

    given = answers(handler, [1, 2], [[3, 4], [5, 6]], [1, 2, 3], [[[1, 2]]], [1, "a"], {"y": 1}, {"x": [1, 2], "y": 1})

    assert given[:2] == [[2.0, 4.0], [[6.0, 8.0], [10.0, 12.0]]]
    assert type(given[0]) is list
    assert [str(each.message) for each in given[2:]] == [
        "x: expected float32 [2], got [3]",
        "x: expected float32 [2], got [1, 1, 2]",
        "x: expected float32 [2], got 'a'",
        "y: there is no such input; expected x: float32 [2]",
        "y: there is no such input; expected x: float32 [2]",
    ]


def test_a_bare_array_for_several_inputs_is_the_clients_mistake(tmp_path: Path) -> None:
    """The message names them."""
    handler = exported(tmp_path, Two(), torch.ones(3, 4), torch.ones(3), shapes=({0: torch.export.Dim.DYNAMIC},) * 2)

    with pytest.raises(BadInput, match=r"expected a JSON object with x: float32 \[4\], y: float32 \[\], got a list"):
        answers(handler, [1, 2, 3, 4])


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_bare_array_of_several_outputs_is_answered_by_their_names(tmp_path: Path) -> None:
    """A bare answer could not say which is which."""
    torch.jit.script(Both()).save(tmp_path / "model.pt")
    tensor = {"dtype": "float32", "shape": ["batch", 2]}
    signature = {"inputs": {"x": tensor}, "outputs": {"y": tensor, "z": tensor}}

    assert answers(loaded(tmp_path, "model.pt", signature=signature), [1, 2]) == [{"y": [1.0, 2.0], "z": [-1.0, -2.0]}]


def test_under_the_protocols_envelope_its_routes_name_tensors_and_others_are_rows(tmp_path: Path) -> None:
    """Clients of TorchServe name inputs as they like; a batch of both is run again in parts."""
    handler = exported(tmp_path, Doubled(), torch.ones(2, 2), shapes=({0: torch.export.Dim("rows")},))
    envelope = KServev2Envelope(handler.handle)
    envelope.passes_protocol = handler.reads_open_inference
    named, unknown = ({"name": name, "datatype": "FP32", "shape": [1, 2], "data": [1, 2]} for name in ("x", "any"))

    def ask(*tensors: Any, marks: Any) -> Any:
        handler.context.begin_batch([FakeItem(server_headers=mark) for mark in marks])
        return envelope.handle([{"body": {"inputs": [tensor]}} for tensor in tensors], handler.context)

    mark = [("open_inference", "v2")]
    right, wrong = ask(named, unknown, marks=[mark, mark])
    (row,) = ask(unknown, marks=[[]])

    assert json.loads(right.body)["outputs"][0] == {
        "name": "output", "datatype": "FP32", "shape": [1, 2], "data": [2.0, 4.0],
    }  # fmt: skip
    assert str(wrong.message).startswith("any: there is no such input; expected x")
    assert row["outputs"][0] == {"name": "any", "datatype": "FP64", "data": [2.0, 4.0], "shape": [1, 2]}
    with pytest.raises(ValueError, match="share a batch"):
        ask(named, unknown, marks=[mark, []])
