"""Models of Triton's, imported and served: clients get by Triton's names what the models themselves give."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.command_line import marserve
from support.pages import block
from support.server import Server
from support.triton_models import write_config, write_negative, write_onnx, write_torchscript

onnxruntime: Any = pytest.importorskip("onnxruntime")
torch: Any = pytest.importorskip("torch")
pytest.importorskip("onnx")

pytestmark = pytest.mark.system

PAGE = "docs/migrating.md"
NEGATIVE = """
name: "negative"
platform: "onnxruntime_onnx"
max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "size" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "labels.txt" },
         { name: "minus" data_type: TYPE_FP32 dims: [ 2 ] } ]
version_policy { all {} }
instance_group { kind: KIND_CPU }
model_warmup { name: "zeros" inputs { key: "x" value { data_type: TYPE_FP32 dims: 2 zero_data: true } } }
"""
SORTED = """
input [ { name: "in.1" data_type: TYPE_INT64 dims: [ -1 ] reshape { shape: [ 1, -1 ] } } ]
output [ { name: "out.1" data_type: TYPE_INT64 dims: [ -1 ] reshape { shape: [ 1, -1 ] } } ]
"""
PAIR = """
platform: "pytorch_libtorch"
max_batch_size: 8
input [ { name: "INPUT__1" data_type: TYPE_FP32 dims: [ 2 ] }, { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 2 ] },
         { name: "OUTPUT__1" data_type: TYPE_FP32 dims: [ 1 ] } ]
dynamic_batching { max_queue_delay_microseconds: 1000 }
"""


def write_models(root: Path) -> None:
    """ONNX in two versions, ONNX without a batch axis under a reshape, and TorchScript."""
    write_negative(root)
    sizes: list[int | str] = ["n", 2]
    ends: Any = {"size": ("FLOAT", sizes), "minus": ("FLOAT", sizes)}
    nodes = [("Exp", ["x"], ["size"]), ("Neg", ["x"], ["minus"])]
    write_onnx(root / "negative" / "10" / "model.onnx", nodes, {"x": ("FLOAT", sizes)}, ends)
    write_config(root, "negative", NEGATIVE)
    (root / "negative" / "labels.txt").write_text("cat\ndog\n")
    whole: list[int | str] = [1, "m"]
    mean = [("Abs", ["in.1"], ["out.1"])]
    write_onnx(root / "sorted" / "1" / "model.onnx", mean, {"in.1": ("INT64", whole)}, {"out.1": ("INT64", whole)})
    write_config(root, "sorted", SORTED)
    write_torchscript(
        root / "pair" / "1" / "model.pt",
        lambda a, b: (a - 2 * b, (a * b).sum(1, keepdim=True)),
        *[torch.ones(2, 2)] * 2,
    )
    write_config(root, "pair", PAIR)


def load_list(folder: Path) -> str:
    """What the written settings load."""
    lines = (folder / "config.properties").read_text().splitlines()
    return next(line.removeprefix("load_models=") for line in lines if line.startswith("load_models="))


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server with all of them, and the repository."""
    folder = tmp_path_factory.mktemp("triton")
    root = folder / "models"
    write_models(root)
    ran = marserve("migrate", "triton", root, "-o", folder / "migrated")
    assert ran.status == 0, ran.out + ran.err
    models = load_list(folder / "migrated")
    assert models == "negative-10.mar,negative-1.mar,pair-1.mar,sorted-1.mar"
    settings = {"load_models": models}
    with Server(folder, entry="marserve", store=folder / "migrated" / "model_store", settings=settings) as server:
        for line in ("negative/versions/10", "negative/versions/1", "pair", "sorted"):
            wait_ready(server, line)
        yield server, root


def wait_ready(server: Server, model: str) -> None:
    """Wait until a model answers."""
    from support.server import poll  # late: beside its only use

    for _ in poll(60, f"{model} is ready"):
        if server.client.get(f"{server.inference}/v2/models/{model}/ready").status_code == 200:
            return


def infer(server: Server, model: str, arrays: Mapping[str, Any], *, is_binary: bool) -> dict[str, Any]:
    """The outputs of an inference, sent and asked for as JSON or as raw tensors."""
    types = {"float32": "FP32", "int64": "INT64"}
    back = {name: np.dtype(dtype) for dtype, name in types.items()}
    described, raw = [], b""
    for name, array in arrays.items():
        tensor = {"name": name, "datatype": types[str(array.dtype)], "shape": list(array.shape)}
        if is_binary:
            described.append({**tensor, "parameters": {"binary_data_size": array.nbytes}})
            raw += array.tobytes()
        else:
            described.append({**tensor, "data": array.reshape(-1).tolist()})
    head = json.dumps({"inputs": described, "parameters": {"binary_data_output": is_binary}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))} if is_binary else {"Content-Type": "application/json"}
    url = f"{server.inference}/v2/models/{model}/infer"
    answer = server.client.post(url, content=head + raw, headers=headers)
    assert answer.status_code == 200, answer.text
    length = int(answer.headers.get("inference-header-content-length", len(answer.content)))
    rest, found = answer.content[length:], {}
    for output in json.loads(answer.content[:length])["outputs"]:
        dtype, size = back[output["datatype"]], output.get("parameters", {}).get("binary_data_size", 0)
        values = np.frombuffer(rest[:size], dtype) if is_binary else np.array(output["data"], dtype)
        found[output["name"]] = values.reshape(output["shape"])
        rest = rest[size:]
    return found


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("is_binary", [False, True])
def test_answers_are_those_of_the_models_themselves(imported: tuple[Server, Path], is_binary: bool) -> None:
    """Of both versions of an ONNX model, of one without a batch axis, and of TorchScript; by JSON and raw."""
    server, root = imported
    random = np.random.default_rng(7)
    x, y = (random.normal(size=(3, 2)).astype("float32") for _ in range(2))
    whole = random.integers(-9, 9, 5)

    for version, model in (("10", "negative"), ("10", "negative/versions/10"), ("1", "negative/versions/1")):
        session = onnxruntime.InferenceSession(root / "negative" / version / "model.onnx")
        size, minus = session.run(["size", "minus"], {"x": x})
        found = infer(server, model, {"x": x}, is_binary=is_binary)
        assert list(found) == ["size", "minus"]
        np.testing.assert_array_equal(found["size"], size)
        np.testing.assert_array_equal(found["minus"], minus)
    session = onnxruntime.InferenceSession(root / "sorted" / "1" / "model.onnx")
    found = infer(server, "sorted", {"in.1": whole}, is_binary=is_binary)
    np.testing.assert_array_equal(found["out.1"], session.run(None, {"in.1": whole[None]})[0][0])
    program = torch.jit.load(str(root / "pair" / "1" / "model.pt"))
    one, other = program(torch.from_numpy(x), torch.from_numpy(y))
    found = infer(server, "pair", {"INPUT__0": x, "INPUT__1": y}, is_binary=is_binary)
    np.testing.assert_array_equal(found["OUTPUT__0"], one.numpy())
    np.testing.assert_array_equal(found["OUTPUT__1"], other.numpy())


def test_metadata_and_classes_are_as_tritons_clients_know_them(imported: tuple[Server, Path]) -> None:
    """Shapes with the batch axis or without, the default version first, labels beside the classes."""
    server, _ = imported
    asked = [
        {"name": "minus", "parameters": {"classification": 1}},
        {"name": "size", "parameters": {"classification": 2}},
    ]
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [0, 1]}

    negative, whole = (
        server.client.get(f"{server.inference}/v2/models/{name}").json() for name in ("negative", "sorted")
    )
    config = server.client.get(f"{server.inference}/v2/models/sorted/config").json()
    answer = server.client.post(
        f"{server.inference}/v2/models/negative/versions/1/infer", json={"inputs": [tensor], "outputs": asked}
    )

    assert (negative["versions"], negative["inputs"][0]["shape"]) == (["10", "1"], [-1, 2])
    assert (whole["inputs"], config["max_batch_size"]) == ([{"name": "in.1", "datatype": "INT64", "shape": [-1]}], 0)
    assert [each["data"] for each in answer.json()["outputs"]] == [
        ["-0.000000:0"],
        ["1.000000:1:dog", "0.000000:0:cat"],
    ]


def test_what_triton_refuses_is_refused_by_name(imported: tuple[Server, Path]) -> None:
    """Another shape, another type, an unknown input; and a form, which is no JSON."""
    server, _ = imported
    tensor = {"name": "in.1", "datatype": "INT64", "shape": [2], "data": [1, 2]}
    url = f"{server.inference}/v2/models/sorted/infer"

    answers = [
        server.client.post(url, json={"inputs": [{**tensor, **change}]})
        for change in ({"shape": [1, 2]}, {"datatype": "FP32"}, {"name": "in"})
    ]
    form = server.client.post(url, data={"inputs": "x"})

    assert [answer.status_code for answer in (*answers, form)] == [400] * 4
    assert answers[0].json()["error"] == "in.1: expected int64 [in_1_size_1], got [1, 2]"


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_the_pages_example_works_as_it_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model, its configuration, the import with its report, and the request."""
    monkeypatch.chdir(tmp_path)
    exec(block(PAGE, "triton-model"), {})
    Path("models/doubled/config.pbtxt").write_text(block(PAGE, "triton-config"))
    command, request = shlex.split(block(PAGE, "triton-import")), block(PAGE, "triton-commands").splitlines()[1]

    ran = marserve(*command[1:])
    settings = {"load_models": load_list(Path("migrated"))}
    with Server(tmp_path, entry="marserve", store=tmp_path / "migrated" / "model_store", settings=settings) as server:
        wait_ready(server, "doubled")
        words = shlex.split(request.replace("http://127.0.0.1:8080", server.inference))
        headers = {"Content-Type": "application/json"}
        answer = server.client.post(words[-1], content=words[words.index("-d") + 1], headers=headers)

    assert (ran.status, ran.out) == (0, block(PAGE, "triton-report"))
    assert answer.json() == json.loads(block(PAGE, "triton-answer"))
