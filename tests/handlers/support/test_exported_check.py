"""Exported programs that would do more than compute are refused before torch opens them."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import pytest

from marserve_handlers.errors import ModelNotLoadable
from marserve_handlers.support import exported_check
from marserve_handlers.support.exported_check import check_exported_program


def exported(model: Any = None, **members: bytes) -> io.BytesIO:
    """A zip laid out as torch lays exported programs out; `__` in a member's name stands for `/`."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("m/models/model.json", json.dumps(model or {}))
        for name, content in members.items():
            archive.writestr(name.replace("__", "/"), content)
    return file


@pytest.mark.parametrize(
    "target",
    [
        "torch.ops.aten.conv2d.default",
        "torch.ops.aten.sym_size.int",
        "torch.ops.aten._softmax.default",
        "torch.ops.aten.__and__.Scalar",
        "torch.ops.quantized_decomposed.quantize_per_tensor.default",
        "torch.ops.higher_order.cond",
        "torch.sym_max",
        "_operator.getitem",
        "_operator.floordiv",
        "math.trunc",
        "layers.0.weight",
        "p_conv_weight",
    ],
)
def test_operators_of_torch_are_let_through(target: str) -> None:
    """What torch.export writes."""
    check_exported_program(exported({"graph": {"nodes": [{"target": target, "inputs": []}]}}))


@pytest.mark.parametrize(
    "target",
    [
        "torch.os.system",
        "torch.sys.exit",
        "torch.hub.load",
        "torch.load",
        "torch.ops.load_library",
        "torch.ops.aten.__class__",
        "torch.ops.aten.add.__globals__",
        "torch.ops.os.path.join.x",
        "torch._dynamo.x",
        "torch.builtins.eval",
        "_operator.call",
        "_operator.methodcaller",
        "_operator.attrgetter",
        "_operatorx.y",
        "#handler:op",
        "math.__loader__.load_module",
        "torch",
    ],
)
def test_what_is_no_operator_is_refused(target: str) -> None:
    """A name that torch would find by walking attributes to something else."""
    with pytest.raises(ModelNotLoadable, match="no operator of torch"):
        check_exported_program(exported({"graph": {"nodes": [{"target": target, "inputs": []}]}}))


@pytest.mark.parametrize(
    "text",
    [
        "Symbol('s77', positive=True, integer=True)",
        "Mul(Integer(2), Symbol('s77', positive=True, integer=True))",
        "FloorDiv(Mul(Integer(2), Symbol('s77', integer=True)), Integer(3))",
        "s0",
        "2*s0 + 1",
        "Max(1, s0 // 2)",
        "(s0 > 3) & (s1 <= 4)",
        "Float('2.5', precision=53)",
        "OpaqueUnaryFn_sqrt(s0)",
        "-s0",
        "1",
    ],
)
def test_shapes_are_let_through(text: str) -> None:
    """Arithmetic in sympy's and torch's notation."""
    check_exported_program(exported({"sizes": [{"as_expr": {"expr_str": text, "hint": None}}]}))


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "eval('1')",
        "open('x', 'w')",
        "Symbol.mro()",
        "Symbol('s0').name",
        "(lambda: 1)()",
        "[x for x in s0]",
        "Integer('__import__(\"os\")')",
        "Symbol('s0; import os')",
        "exec",
        "s0.__class__",
        "a__b",
        "f'{s0}'",
        "s0[0]",
        "1 if s0 else 2",
        "(",
        "",
        "print(1)",
        "Integer(b'1')",
    ],
)
def test_what_is_no_arithmetic_is_refused(text: str) -> None:
    """Shape expressions are evaluated as Python by sympy."""
    document = {"sizes": [{"as_expr": {"expr_str": text, "hint": None}}]}
    if text == "exec":
        check_exported_program(exported(document))  # a name alone is a symbol
        return
    with pytest.raises(ModelNotLoadable, match="no arithmetic"):
        check_exported_program(exported(document))


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"m__data__constants__opaque_obj_0": b"x"}, "no tensor"),
        ({"m__data__constants__custom_obj_0": b"x"}, "no tensor"),
        ({"m__data__aotinductor__model__wrapper.cpp": b"x"}, "compiled code"),
        ({"m__extra__evil.so": b"x"}, "compiled code"),
        ({"m__data__weights__model_weights_config.json": b"{"}, "no JSON"),
        ({"m__models__other.json": b'{"in_spec": "__enum__"}'}, "module to import"),
        ({"m__models__other.json": b'{"x": "default_factory_module"}'}, "module to import"),
        ({"m__models__other.json": b'[{"target": "torch.os.system"}]'}, "no operator"),
    ],
)
def test_every_member_is_looked_at(members: dict[str, bytes], words: str) -> None:
    """Objects, libraries, and descriptions beside the first."""
    with pytest.raises(ModelNotLoadable, match=words):
        check_exported_program(exported(None, **members))


def test_deep_nesting_does_not_escape() -> None:
    """Depth is the file's choice; the look does not recurse, and what JSON refuses is refused."""
    shallow: Any = {"target": "torch.os.system"}
    for _ in range(300):
        shallow = {"a": [shallow]}
    with pytest.raises(ModelNotLoadable, match="no operator"):
        check_exported_program(exported(shallow))

    with pytest.raises(ModelNotLoadable, match="no JSON"):
        check_exported_program(exported(None, **{"m__models__deep.json": b"[" * 200_000 + b"]" * 200_000}))


def test_a_huge_description_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size is looked at first."""
    monkeypatch.setattr(exported_check, "MAX_GRAPH_BYTES", 10)

    with pytest.raises(ModelNotLoadable, match="larger than 10 bytes"):
        check_exported_program(exported({"a": "b" * 100}))


def test_what_is_no_zip_is_refused() -> None:
    """By name."""
    with pytest.raises(ModelNotLoadable, match="no zip"):
        check_exported_program(io.BytesIO(b"not a zip at all"))
