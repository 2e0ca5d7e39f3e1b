"""`marserve export` on real archives."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import shutil
import tempfile
import zipfile
from pathlib import Path

import pytest

from marserve.optimise import export as exporting
from support.command_line import marserve
from support.server import Server, make_archive

HANDLER = "from ts.torch_handler.base_handler import BaseHandler\n\nclass Handler(BaseHandler):\n    pass\n"
NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        {layers}

    def forward(self, rows):
        {body}
"""
NAMES = b'{"0": "cat", "1": "dog", "2": "cow"}'
GOOD = "return self.linear(rows)"
BRANCHES = "return self.linear(rows) * 3 if rows.shape[0] > 4 else self.linear(rows)"
COUNTS = "self.n = getattr(self, 'n', 0) + 1; return self.linear(rows) * self.n"
RANDOM = "return self.linear(rows) + torch.rand(rows.shape[0], 3)"


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """No file in the temporary folder, however the command ends; torch's cache of what it compiled stays."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert [path for path in folder.iterdir() if not path.name.startswith("torchinductor_")] == []


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Rows of four numbers."""
    folder = tmp_path / "inputs"
    folder.mkdir()
    for at in range(6):
        (folder / f"{at}.json").write_text(json.dumps([at, 1.0, -at / 2, 0.25]))
    return folder


def archive_of(
    folder: Path, body: str, layers: str = "self.linear = torch.nn.Linear(4, 3)", handler: str = HANDLER
) -> Path:
    """An eager model whose forward is this."""
    archive = make_archive(folder / "net.mar", handler, config="batchSize: 8\n", labels=b"cat\n")
    with zipfile.ZipFile(archive) as file:
        members = {name: file.read(name) for name in file.namelist()}
    manifest = json.loads(members["MAR-INF/MANIFEST.json"])
    manifest["model"]["modelFile"] = "net.py"
    members |= {
        "MAR-INF/MANIFEST.json": json.dumps(manifest).encode(),
        "net.py": NET.format(body=body, layers=layers).encode(),
    }
    members["index_to_name.json"] = NAMES
    with zipfile.ZipFile(archive, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)
    return archive


@pytest.mark.system
@pytest.mark.torch
@pytest.mark.onnx
@pytest.mark.parametrize("to", ["onnx", "pt2"])
def test_an_exported_archive_answers_as_its_parent_and_keeps_its_other_files(
    to: str, tmp_path: Path, inputs: Path
) -> None:
    """A file in the place of weights and model file; a version of its own; not twice without --force."""
    pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    archive = archive_of(tmp_path, GOOD)

    ran = marserve("export", archive, "--to", to, "--inputs", inputs, "-o", tmp_path, "--json")
    again = marserve("export", archive, "--to", to, "--inputs", inputs, "-o", tmp_path)

    assert ran.status == 0, ran.out + ran.err
    assert max(each["meanError"] for each in ran.document["outputs"]) < 1e-4
    assert {each["run"] for each in ran.document["outputs"]} >= {"alone", "in twos", "in batches of 8"}
    with zipfile.ZipFile(tmp_path / f"net-{to}.mar") as file:
        model = json.loads(file.read("MAR-INF/MANIFEST.json"))["model"]
        assert set(file.namelist()) == {
            "MAR-INF/MANIFEST.json", "handler.py", "index_to_name.json", "labels", "model-config.yaml", f"model.{to}",
        }  # fmt: skip
        # Names travel: of classes, and those that the author gave to what the model takes.
        assert (file.read("index_to_name.json"), file.read("labels")) == (NAMES, b"cat\n")
        if to == "onnx":
            onnx = pytest.importorskip("onnx")
            assert [each.name for each in onnx.load_from_string(file.read("model.onnx")).graph.input] == ["rows"]
    assert (model["modelVersion"], model["serializedFile"]) == (f"1.0-{to}", f"model.{to}")
    assert "modelFile" not in model
    assert again.status == 1
    assert "already exists" in again.err


@pytest.mark.system
@pytest.mark.torch
@pytest.mark.timeout(400)  # a compiler's work, on a busy machine
def test_a_package_of_native_code_is_exported_and_loaded_by_servers_that_trust_it(tmp_path: Path, inputs: Path) -> None:
    """Others refuse the load and say what is missing. Larger batches than it was compiled for are answered, too."""
    pytest.importorskip("torch")
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    archive = archive_of(tmp_path, GOOD)

    ran = marserve("export", archive, "--to", "aoti", "--inputs", inputs, "-o", tmp_path, "--json")

    assert ran.status == 0, ran.out + ran.err
    made = tmp_path / "net-aoti.mar"
    assert ran.document["trustedModels"] == hashlib.sha256(made.read_bytes()).hexdigest()
    compared = marserve("compare", archive, made, "--inputs", inputs, "--pairs", 0)
    assert compared.status == 1
    assert "which runs as soon as it is loaded, and its archive is not among trusted_models" in compared.err
    wish = {"trusted_models": ran.document["trustedModels"]}
    for settings, status in (({}, 500), (wish, 200)):
        with Server(tmp_path, entry="marserve", store=tmp_path, settings=settings) as server:
            answer = server.register("net-aoti.mar", batch_size=16, max_batch_delay=300)
            assert answer.status_code == status, answer.text
            if status == 500:
                assert "native code" in answer.json()["reason"]
                continue
            with concurrent.futures.ThreadPoolExecutor(16) as threads:
                rows = [json.dumps([at, 1.0, -at / 2, 0.25]) for at in range(16)]
                asked = [
                    threads.submit(server.predict, "net", row, **{"content-type": "application/json"}) for row in rows
                ]
                answers = [each.result().json() for each in asked]
    assert len({json.dumps(answer) for answer in answers}) == 16


@pytest.mark.system
@pytest.mark.torch
@pytest.mark.onnx
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            BRANCHES,
            "net 1.0 cannot be exported as onnx: torch.export refuses it: a branch depends on a size, "
            f"it would hold for batch = Dim('batch', max=4) alone: net.py, line 11: {BRANCHES}",
        ),
        (COUNTS, f"forward changes state, which runs once, at the export, and never again: net.py, line 11: {COUNTS}"),
        (RANDOM, "net does not answer as onnx as it does now"),
    ],
)
def test_what_cannot_be_exported_or_is_not_equal_leaves_no_archive(
    body: str, words: str, tmp_path: Path, inputs: Path
) -> None:
    """A branch on the batch size is not baked; what is random is not equal."""
    pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    archive = archive_of(tmp_path, body)

    ran = marserve("export", archive, "--to", "onnx", "--inputs", inputs, "-o", tmp_path)

    assert ran.status == 1
    assert words in ran.err
    assert not (tmp_path / "net-onnx.mar").exists()


OTHER_EACH_TIME = HANDLER.replace(
    "    pass\n",
    "    def postprocess(self, data):\n        return [{'at': __import__('time').monotonic_ns()} for _ in data]\n",
)


@pytest.mark.system
@pytest.mark.torch
@pytest.mark.onnx
def test_answers_that_differ_leave_no_archive_however_equal_the_models_are(tmp_path: Path, inputs: Path) -> None:
    """An archive is exported if it answers as its parent does."""
    pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    archive = archive_of(tmp_path, GOOD, handler=OTHER_EACH_TIME)

    ran = marserve("export", archive, "--to", "onnx", "--inputs", inputs, "-o", tmp_path)

    assert ran.status == 1
    assert "net does not answer as onnx as it does now: 6 of 6 answers differ (by more than 0.001)" in ran.err
    assert not (tmp_path / "net-onnx.mar").exists()


LAYERS = "torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)"
PICTURES = (
    "torch.nn.Unflatten(1, (1, 8, 8)), torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), "
    "torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(32, 10)"
)
ATTENTION = (
    "torch.nn.Unflatten(1, (8, 8)), torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.nn.Flatten(), "
    "torch.nn.Linear(64, 10)"
)


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.onnx
@pytest.mark.timeout(600)
@pytest.mark.parametrize("to", ["onnx", "pt2", "aoti"])
@pytest.mark.parametrize("layers", [LAYERS, PICTURES, ATTENTION], ids=["layers", "pictures", "attention"])
def test_a_thousand_inputs_have_the_same_best_class_in_the_exported_archive(
    layers: str, to: str, tmp_path: Path
) -> None:
    """Alone, in twos, in full batches and beside a loud mate; no single output is off by more than 0.0001."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    if to == "aoti" and shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    archive = archive_of(tmp_path, GOOD.replace("linear", "layers"), f"self.layers = torch.nn.Sequential({layers})")
    folder = tmp_path / "inputs"
    folder.mkdir()
    torch.manual_seed(7)
    for number, row in enumerate(torch.rand(1000, 64).tolist()):
        (folder / f"{number:04}.json").write_text(json.dumps(row))
    assert marserve("export", archive, "--to", to, "--inputs", folder, "-o", tmp_path).status == 0

    trust = ["--trust"] if to == "aoti" else []
    ran = marserve("compare", archive, tmp_path / f"net-{to}.mar", "--inputs", folder, "--pairs", 0, "--json", *trust)

    assert ran.status == 0, ran.out + ran.err
    outputs = ran.document["outputs"]
    assert {each["run"] for each in outputs} == {"alone", "in twos", "in batches of 8", "beside a loud mate"}
    assert (ran.document["inputs"], [each["top1"] for each in outputs]) == (1000, [1.0] * 4)
    assert max(each["largestError"] for each in outputs) < 1e-4


def test_a_model_that_is_no_module_of_torch_is_told_so(tmp_path: Path, inputs: Path) -> None:
    """In a sentence."""
    archive = make_archive(tmp_path / "m.mar", "def handle(data, context):\n    return [1 for row in data or []]\n")

    ran = marserve("export", archive, "--to", "onnx", "--inputs", inputs, "-o", tmp_path)

    assert ran.status == 1
    assert "m 1.0 cannot be exported as onnx: the handler holds no module of torch" in ran.err


def test_wrong_words_are_refused_before_anything_runs(tmp_path: Path, inputs: Path) -> None:
    """Exit 2."""
    archive = make_archive(tmp_path / "m.mar", "def handle(data, context): ...")

    runs = [
        marserve("export", archive, "--to", "onnx", "--inputs", tmp_path / "none"),
        marserve("export", tmp_path / "none.mar", "--to", "onnx", "--inputs", inputs),
        marserve("export", archive, "--to", "tflite", "--inputs", inputs),
        marserve("export", archive, "--to", "onnx", "--inputs", inputs, "-o", tmp_path / "none"),
    ]

    assert [ran.status for ran in runs] == [2, 2, 2, 2]


def test_weights_beside_the_serialized_file_go_with_it() -> None:
    """And a build that the archive held is none of the exported model's."""
    document = {"model": {"modelName": "m", "serializedFile": "weights.pth", "modelFile": "net.py", "handler": "h.py"}}

    assert exporting._replaced(document) == {"weights.pth", "weights.safetensors", "net.py"}
    assert json.loads(exporting._manifest(document, "model.onnx", "2")) == {
        "model": {"modelName": "m", "serializedFile": "model.onnx", "handler": "h.py", "modelVersion": "2"}
    }
