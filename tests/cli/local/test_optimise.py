"""`marserve optimise` on real archives. Builds that take long are in `test-system`; `tests/optimise` has the rest."""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
from pathlib import Path

import psutil
import pytest
from rich.table import Table

from marserve.cli.local.optimise import _lines
from marserve.errors import BadArchive
from marserve.optimise import optimise as searching
from marserve.optimise import subject
from marserve.optimise.comparison import Bounds
from marserve.optimise.inputs import find_inputs
from marserve.optimise.optimise import Report, Row, Wish, optimise
from marserve.optimise.ratio import Ratio
from marserve_handlers.optimising.machine import cpu_flags
from support.command_line import marserve
from support.server import Server, make_archive, poll

PLAIN = "def handle(data, context):\n    return [row['body'] for row in data or []]\n"
# Large enough to be no slower in bfloat16, by one thread.
NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(1, 64, 3, padding=1), torch.nn.ReLU(),
            torch.nn.Conv2d(64, 128, 3, padding=1), torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(2048, 10),
        )

    def forward(self, pixels):
        return self.layers(pixels)
"""
HANDLER = (
    "from ts.torch_handler.base_handler import BaseHandler\n\nclass Handler(BaseHandler):\n    names_classes = True\n"
)
OWN_CLASS = """
import torch

class Handler:
    def initialize(self, context):
        self.net = context.load_model()

    def handle(self, data, context):
        with torch.inference_mode():
            return self.net(torch.tensor([row["body"] for row in data])).tolist()
"""
OWN_FUNCTION = """
import torch

net = None

def handle(data, context):
    global net
    if data is None:
        net = context.load_model()
        return None
    with torch.inference_mode():
        return net(torch.tensor([row["body"] for row in data])).tolist()
"""
OWN_DECLARED = """
import torch
from marserve_handlers import Tensor, model


@model(inputs={"body": Tensor("float32", ["batch", 1, 24, 24])}, outputs={"out": Tensor("float32", ["batch", 10])})
class Declared:
    def load(self, context):
        self.net = context.load_model()

    def predict(self, body: torch.Tensor):
        with torch.inference_mode():
            return {"out": self.net(body)}
"""
BY_ITSELF = """
    def initialize(self, context):
        import torch
        from net import Net

        self.device, self.model, self.initialized = torch.device("cpu"), Net().eval(), True
"""


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Neither a process nor a file, however the command ends; torch's cache of what it compiled stays."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert [path for path in folder.iterdir() if not path.name.startswith("torchinductor_")] == []
    assert not [child for child in psutil.Process().children(recursive=True) if "compared" in str(child.cmdline())]


def pictures(folder: Path, count: int) -> Path:
    """So many pictures as JSON."""
    folder.mkdir()
    for at in range(count):
        rows = [[((x * y + at * 7) % 23) / 23 for x in range(24)] for y in range(24)]
        (folder / f"{at:03}.json").write_text(json.dumps([rows]))
    return folder


NET_FLOPS = 2 * (24 * 24 * 64 * 9 * (1 + 128) + 2048 * 10)
"""Of one picture: two convolutions and a layer."""


def net_archive(
    folder: Path, handler: str = HANDLER, net: str = NET, more: str = "", inputs: dict[str, bytes] | None = None
) -> Path:
    """An eager model, with `more` in its configuration and these request bodies."""
    archive = make_archive(folder / "net.mar", handler, config=f"batchSize: 4\n{more}")
    with zipfile.ZipFile(archive) as file:
        members = {name: file.read(name) for name in file.namelist()}
    manifest = json.loads(members["MAR-INF/MANIFEST.json"])
    manifest["model"]["modelFile"] = "net.py"
    members |= {"MAR-INF/MANIFEST.json": json.dumps(manifest).encode(), "net.py": net.encode()}
    members |= inputs or {}
    with zipfile.ZipFile(archive, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)
    return archive


def test_a_model_that_nothing_can_be_made_of_is_told_in_a_sentence(tmp_path: Path) -> None:
    """Exit 1, and no archive."""
    archive = make_archive(tmp_path / "m.mar", PLAIN)

    ran = marserve("optimise", archive, "--inputs", pictures(tmp_path / "in", 4), "-o", tmp_path)

    assert ran.status == 1
    assert "m 1.0 cannot be built anew: the handler holds no module of torch" in ran.err
    assert not (tmp_path / "m-optimised.mar").exists()


def test_a_log_without_a_terminal_has_a_line_for_each_step_of_the_search(tmp_path: Path) -> None:
    """A search takes minutes, which would be silent ones; scripts' documents stay alone."""
    words = ("optimise", make_archive(tmp_path / "m.mar", PLAIN), "--inputs", pictures(tmp_path / "in", 4))

    ran, document = marserve(*words, "-o", tmp_path), marserve(*words, "-o", tmp_path, "--json")

    first, last = ran.err.splitlines()
    assert first == "loading m 1.0"
    assert last.startswith("marserve: m 1.0 cannot be built anew")
    assert document.err == ""


@pytest.mark.system
@pytest.mark.torch
def test_an_archive_that_is_there_is_refused_before_a_build_is_tried(tmp_path: Path) -> None:
    """Exit 1 in no time, rather than after the search, whose findings would be lost."""
    pytest.importorskip("torch")
    archive, folder = net_archive(tmp_path), pictures(tmp_path / "in", 4)
    (tmp_path / "net-optimised.mar").write_bytes(b"of before")

    ran = marserve("optimise", archive, "--inputs", folder, "-o", tmp_path, "--candidate", "channels-last")

    assert ran.status == 1
    assert "net-optimised.mar already exists. Use --force (-f) to overwrite it" in ran.err
    assert "channels-last" not in ran.err
    assert (tmp_path / "net-optimised.mar").read_bytes() == b"of before"


def test_wrong_words_are_refused_before_anything_runs(tmp_path: Path) -> None:
    """Exit 2."""
    archive = make_archive(tmp_path / "m.mar", PLAIN)
    folder = pictures(tmp_path / "in", 1)

    runs = [
        marserve("optimise", archive, "--inputs", tmp_path / "none"),
        marserve("optimise", tmp_path / "none.mar", "--inputs", folder),
        marserve("optimise", archive, "--inputs", folder, "-o", tmp_path / "none"),
        marserve("optimise", archive, "--inputs", folder, "--goal", "beauty"),
        marserve("optimise", archive, "--inputs", folder, "--page", tmp_path / "none" / "page.html"),
        marserve("optimise", archive, "--inputs", folder, "--page", tmp_path),
        marserve("optimise", archive, "--inputs", folder, "--candidate", "onnx", "--candidate", "fp16"),
    ]

    assert [ran.status for ran in runs] == [2] * 7
    assert "for the page." in runs[4].err
    assert "there is no candidate 'fp16'; there are channels-last, bf16" in runs[6].err
    assert "loading m" not in runs[6].err


def test_only_a_wrong_name_of_a_build_asks_for_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails in another way is no matter of names."""
    archive, folder = make_archive(tmp_path / "m.mar", PLAIN), pictures(tmp_path / "in", 4)

    def search(*_: object, **given: object) -> None:
        raise ValueError("math domain error")

    monkeypatch.setattr(searching, "optimise", search)
    ran = marserve("optimise", archive, "--inputs", folder, "-o", tmp_path, "--candidate", "fast")

    assert ran.status == 2
    assert "there is no candidate 'fast'; there are channels-last, bf16," in ran.err
    assert "Name one of them with --candidate." in ran.err
    with pytest.raises(ValueError, match="math domain error"):
        marserve("optimise", archive, "--inputs", folder, "-o", tmp_path)


@pytest.mark.system
@pytest.mark.torch
def test_without_inputs_the_archive_brings_its_own_or_is_told_what_is_missing(tmp_path: Path) -> None:
    """Exit 1 for one that has none; a folder that its key names; samples, of which there are too few for bfloat16."""
    pytest.importorskip("torch")
    none = marserve("optimise", make_archive(tmp_path / "m.mar", PLAIN), "-o", tmp_path)
    assert none.status == 1
    assert "m 1.0: the archive has no samples, and no signature that inputs can be drawn from" in none.err

    bodies = {f"in/{each.name}": each.read_bytes() for each in pictures(tmp_path / "in", 12).iterdir()}
    named = net_archive(tmp_path, more="optimise: {candidates: [bf16], inputs: in}\n", inputs=bodies)
    ran = marserve("optimise", named, "-o", tmp_path, "--json")
    assert [row["name"] for row in ran.document["builds"]] == ["bf16"]
    assert ran.document["notes"] == ["the inputs are the 12 of in in the archive"]
    assert "more inputs are needed" in ran.document["builds"][0]["whyNot"]

    files = ", ".join(f"{{file: {name}}}" for name in sorted(bodies))
    samples = net_archive(tmp_path, more=f"samples: [{files}]\n", inputs=bodies)
    ran = marserve("optimise", samples, "-o", tmp_path, "--json", "--candidate", "bf16")
    assert (ran.document["calibrated"], ran.document["compared"]) == (6, 6)
    assert "the 12 samples of the archive, which can hold 64" in ran.document["notes"][0]

    unknown = net_archive(tmp_path, more="optimise: {candidates: [none], inputs: in}\n", inputs=bodies)
    refused = marserve("optimise", unknown, "-o", tmp_path)
    assert refused.status == 1
    assert "it must be a map whose candidates are auto or a list of channels-last, bf16" in refused.err


@pytest.mark.system
@pytest.mark.torch
def test_a_build_is_measured_alone_and_in_full_batches_with_one_thread_and_with_a_workers_share(
    tmp_path: Path,
) -> None:
    """The share is what decides, and what the page shows; with one thread alone nothing is measured twice."""
    pytest.importorskip("torch")
    archive, folder = net_archive(tmp_path), pictures(tmp_path / "in", 8)
    words = ["--candidate", "channels-last", "--min-agreement", "0.1", "-o", tmp_path, "--force", "--json"]

    both = marserve("optimise", archive, "--inputs", folder, *words, "--threads", 2, "--page", tmp_path / "r.html")
    one = marserve("optimise", archive, "--inputs", folder, *words, "--threads", 1)

    row = both.document["builds"][0]
    assert [(each["rows"], each["threads"]) for each in row["ratios"]] == [(1, 2), (4, 2), (1, 1), (4, 1)], row
    assert both.document["threads"] == 2
    assert "times as fast at 4 rows, 2 threads" in (tmp_path / "r.html").read_text()
    assert [(each["rows"], each["threads"]) for each in one.document["builds"][0]["ratios"]] == [(1, 1), (4, 1)]


@pytest.mark.system
@pytest.mark.torch
def test_with_one_input_builds_that_calibrate_nothing_are_made_and_compared_all_the_same(tmp_path: Path) -> None:
    """It is their example, too; one in INT8 says what is missing."""
    pytest.importorskip("torch")
    archive, folder = net_archive(tmp_path, HANDLER.replace("True", "False")), pictures(tmp_path / "in", 1)
    names = ["--candidate", "channels-last", "--candidate", "bf16", "--candidate", "onnx-int8"]

    ran = marserve("optimise", archive, "--inputs", folder, *names, "-o", tmp_path, "--json")

    rows = {row["name"]: row for row in ran.document["builds"]}
    assert (ran.document["calibrated"], ran.document["compared"]) == (0, 1)
    assert rows["channels-last"]["passed"], rows["channels-last"]
    assert rows["onnx-int8"]["whyNot"].startswith(("1 more input is needed: one calibrates", "onnx"))
    assert "calibration" not in str(rows["bf16"]["whyNot"])


@pytest.mark.system
@pytest.mark.torch
def test_a_search_whose_time_is_over_while_its_parent_is_recorded_lets_nothing_pass(tmp_path: Path) -> None:
    """The parent had no time for its batches, so that nothing shows how builds fare in them."""
    pytest.importorskip("torch")
    inputs = find_inputs(pictures(tmp_path / "in", 8))
    wish = Wish("memory", Bounds(min_agreement=0.1), ("channels-last",), threads=1, within_s=0.1)

    report = optimise(net_archive(tmp_path), inputs, wish, tmp_path)

    why = "not finished: 0.1 s were over before the parent had run all its batches"
    assert [(row.why_not, row.may_change, row.has_passed) for row in report.rows] == [(why, True, False)]
    assert (report.winner, report.compared) == ("", 1)
    assert report.notes[0] == "1 of 4 inputs were tried: the time was over"


@pytest.mark.system
@pytest.mark.torch
def test_an_archive_that_is_exchanged_during_the_search_gets_no_build_of_what_it_was(tmp_path: Path) -> None:
    """The new weights would be answered for by a build of the old ones, which passes its own check at each load."""
    pytest.importorskip("torch")
    archive = net_archive(tmp_path)
    inputs = find_inputs(pictures(tmp_path / "in", 8))
    wish = Wish("memory", Bounds(min_agreement=0.1), ("bf16",), threads=1)

    def exchange(step: str) -> None:
        if "measuring" in step:
            shutil.copy(archive, tmp_path / "new")
            (tmp_path / "new").replace(archive)

    with pytest.raises(BadArchive, match="was changed meanwhile"):
        optimise(archive, inputs, wish, tmp_path, on_step=exchange)

    assert not (tmp_path / "net-optimised.mar").exists()


@pytest.mark.system
@pytest.mark.torch
@pytest.mark.onnx
def test_the_best_equal_build_is_archived_and_serves_and_refused_ones_say_why(tmp_path: Path) -> None:
    """A build that is not equal enough, one that is, and the winner, which answers as its parent."""
    pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    archive, folder = net_archive(tmp_path), pictures(tmp_path / "in", 24)
    names = ["channels-last", "bf16", "onnx"]
    options = [word for name in names for word in ("--candidate", name)]
    goal = ["--goal", "memory", "--max-error", "0.00001", "--min-agreement", "0.5"]

    refused = marserve("optimise", archive, "--inputs", folder, "-o", tmp_path, *options, *goal, "--json")

    assert refused.status in (0, 3), refused.err
    rows = {row["name"]: row for row in refused.document["builds"]}
    assert not rows["bf16"]["passed"]
    assert rows["onnx"]["passed"], rows["onnx"]
    assert rows["onnx"]["outputs"][0]["meanError"] < 1e-5

    small = ["--goal", "memory", "--candidate", "bf16", "--min-agreement", "0.5", "--threads", 1]
    ran = marserve("optimise", archive, "--inputs", folder, "-o", tmp_path, "--force", *small)

    assert ran.status == 0, ran.out + ran.err
    assert "bf16 is in " in ran.out
    assert "1 of 1, bf16: building" in ran.err.splitlines()
    made = tmp_path / "net-optimised.mar"
    with zipfile.ZipFile(made) as file:
        assert json.loads(file.read("MAR-INF/MANIFEST.json"))["model"]["modelVersion"] == "1.0-optimised"
        proof = json.loads(file.read("MAR-INF/optimised.json"))
    assert (proof["build"], proof["goal"], proof["samples"]) == ("bf16", "memory", 12)
    assert (proof["flops"]["perBatch"], proof["flops"]["perRequest"]) == (0.0, NET_FLOPS)
    compared = marserve("compare", archive, made, "--inputs", folder, "--pairs", 0, "--json")
    assert compared.document["passed"], compared.document["faults"]
    assert compared.document["outputs"][0]["meanError"] > 0  # it is not the parent that answers
    again = marserve("optimise", made, "--inputs", folder, "-o", tmp_path)
    assert "serves the build bf16 already" in again.err


@pytest.mark.system
@pytest.mark.torch
def test_the_archive_is_registered_or_rolled_out_and_a_server_that_is_away_costs_no_search(tmp_path: Path) -> None:
    """It is asked first; afterwards the build serves beside its parent, or takes over."""
    pytest.importorskip("torch")
    archive, folder = net_archive(tmp_path, more="peakFlops: 1e12\n"), pictures(tmp_path / "in", 8)
    goal = ["--goal", "memory", "--candidate", "bf16", "--min-agreement", "0.1", "--threads", 1]
    words = [*goal, "-o", tmp_path, "--force", "--json"]

    away = marserve("optimise", archive, "--inputs", folder, *words, "--register", "--management", "http://127.0.0.1:9")
    assert away.status == 1
    assert not (tmp_path / "net-optimised.mar").exists()

    (tmp_path / "store").mkdir()
    with Server(tmp_path, entry="marserve", store=tmp_path / "store") as server:
        shutil.copy(archive, tmp_path / "store" / "net.mar")
        server.register("net.mar").raise_for_status()
        to_server = ["--management", server.management]
        told = marserve("optimise", archive, "--inputs", folder, *words, "--register", *to_server)
        picture, version = (folder / "000.json").read_bytes(), "net/1.0-optimised"
        for _ in poll(30, "the parent's FLOPs"):
            server.predict(version, picture, **{"content-type": "application/json"}).raise_for_status()
            described = server.client.get(f"{server.management}/models/{version}").json()[0]
            if "flops" in described:
                break
        page = server.client.get(f"{server.metrics}/metrics").text
        server.client.delete(f"{server.management}/models/net/1.0-optimised").raise_for_status()
        rolled = marserve("optimise", archive, "--inputs", folder, *words, "--rollout", *to_server)
        course = server.client.get(f"{server.management}/models/net/rollout").json()

    assert told.status == 0, told.out + told.err
    assert told.document["registered"][0]["version"] == "1.0-optimised"
    assert [worker["computesOn"] for worker in described["workers"]] == ["bf16"]
    assert (described["flops"]["perRequest"], described["flops"]["peakPerSecond"]) == (NET_FLOPS, 1e12)
    assert 'marserve_workers_computing{model="net",version="1.0-optimised",on="bf16"} 1.0' in page
    assert rolled.status == 0, rolled.out + rolled.err
    assert "1.0-optimised" in json.dumps(course)


@pytest.mark.system
@pytest.mark.torch
@pytest.mark.parametrize("handler", [OWN_CLASS, OWN_FUNCTION, OWN_DECLARED], ids=["class", "function", "declared"])
def test_a_handler_of_its_own_gets_builds_by_way_of_the_context(handler: str, tmp_path: Path) -> None:
    """A class, a function with a variable of its module, and a class that declares its tensors."""
    pytest.importorskip("torch")
    archive, folder = net_archive(tmp_path, handler), pictures(tmp_path / "in", 8)
    goal = ["--goal", "memory", "--candidate", "bf16", "--threads", 1]
    words = [*goal, "--scores", "output", "--min-agreement", "0.1", "-o", tmp_path]

    ran = marserve("optimise", archive, "--inputs", folder, *words, "--json")

    assert ran.status == 0, ran.out + ran.err
    assert ran.document["winner"] == "bf16"


SENTENCES = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.embedding = torch.nn.Embedding(50, 16)
        self.encoder = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.out = torch.nn.Linear(16, 3)

    def forward(self, ids):
        return self.out(self.encoder(self.embedding(ids.long())).mean(1))
"""


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.onnx
def test_a_build_that_a_library_made_wrong_without_a_word_is_refused(tmp_path: Path) -> None:
    """NNCF smooths a small encoder so that a third of the mean output is off. OpenVINO's float32 build is equal."""
    for package in ("torch", "openvino", "nncf", "onnxscript"):
        pytest.importorskip(package)
    folder = tmp_path / "in"
    folder.mkdir()
    for at in range(48):
        (folder / f"{at:03}.json").write_text(json.dumps([(at * 7 + place * 11) % 50 for place in range(6)]))
    archive = net_archive(tmp_path, net=SENTENCES)
    candidates = ["--candidate", "openvino", "--candidate", "openvino-int8", "--min-agreement", "0.5"]

    ran = marserve("optimise", archive, "--inputs", folder, *candidates, "-o", tmp_path, "--json")

    exact, rounded = ran.document["builds"]
    assert (exact["name"], exact["passed"], exact["whyNot"]) == ("openvino", True, None)
    assert (rounded["name"], rounded["passed"], rounded["whyNot"]) == ("openvino-int8", False, None)
    assert "has a mean error of 0." in rounded["faults"][0]
    assert ran.document["winner"] in (None, "openvino")


BAD_WHEN_ROUNDED = """
import os

import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.conv = torch.nn.Conv2d(1, 10, 3)

    def forward(self, pixels):
        if self.conv.weight.dtype is torch.bfloat16:
            {fault}
        return self.conv(pixels).mean((2, 3))
"""


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("os._exit(7)", "its process ended with status 7"),
        ("while True: pass", "did not answer within"),
        ("self.held = bytearray(64 << 30)", "MemoryError"),
        ("raise RuntimeError('no kernel')", "RuntimeError: no kernel"),
    ],
)
def test_a_build_that_crashes_hangs_or_takes_too_much_is_a_row_and_the_others_go_on(
    fault: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent stays where the others are no better; exit 3."""
    pytest.importorskip("torch")
    monkeypatch.setattr(subject, "GRACE_S", 10.0)
    archive = net_archive(tmp_path, net=BAD_WHEN_ROUNDED.format(fault=fault))
    folder = pictures(tmp_path / "in", 8)
    words_typed = ["--candidate", "bf16", "--candidate", "channels-last", "--min-agreement", "0.1", "--within", "60"]
    goal = ["--goal", "memory", "--memory", "4", "-o", tmp_path, "--json"]

    ran = marserve("optimise", archive, "--inputs", folder, *words_typed, *goal)

    assert ran.status == 3, ran.out + ran.err
    layout, rounded = ran.document["builds"]
    assert layout["passed"], layout
    assert words in json.dumps(rounded), rounded
    assert not rounded["passed"]


COMPARES = """
    names_classes = False

    def compare(self, primary, shadow):
        return {verdict}
"""


@pytest.mark.system
@pytest.mark.torch
@pytest.mark.timeout(300)
def test_without_class_scores_the_handlers_compare_says_how_many_inputs_agree(tmp_path: Path) -> None:
    """What is rounded needs enough inputs then, and is refused where the handler says that answers differ."""
    pytest.importorskip("torch")
    if not {"avx512_bf16", "amx_bf16", "bf16"} & set(cpu_flags()):
        pytest.skip("no build that is rounded is tried on this processor")
    folder = pictures(tmp_path / "in", 12)
    words = ["--inputs", folder, "--candidate", "bf16", "-o", tmp_path, "--json", "--force"]

    def rows(verdict: bool, *more: object) -> list[dict[str, object]]:
        archive = net_archive(tmp_path, HANDLER + COMPARES.format(verdict=verdict))
        return list(marserve("optimise", archive, *words, *more).document["builds"])

    (too_few,) = rows(True)
    exact, rounded = rows(False, "--candidate", "channels-last", "--min-agreement", 0.3)

    assert too_few["whyNot"] == "143 more inputs are needed to show the agreement that is asked for"
    assert exact["passed"], exact  # by its error alone, which float32 bounds
    assert exact["agreement"]["by"] == rounded["agreement"]["by"] == "the handler's compare"  # type: ignore[index]
    assert "0 of 6 inputs agree by the handler's compare" in rounded["faults"][0]  # type: ignore[index]


@pytest.mark.system
@pytest.mark.torch
def test_a_wrong_name_for_scores_ends_before_a_build_is_tried(tmp_path: Path) -> None:
    """Exit 2: no minutes are spent on builds of which nothing says whether they agree."""
    pytest.importorskip("torch")
    archive, folder = net_archive(tmp_path), pictures(tmp_path / "in", 8)

    ran = marserve("optimise", archive, "--inputs", folder, "-o", tmp_path, "--scores", "logits")

    assert ran.status == 2
    assert "there is no output logits; there are output" in ran.err
    assert "building" not in ran.err


@pytest.mark.torch
def test_a_handler_that_loads_its_model_by_itself_is_told_what_to_do(tmp_path: Path) -> None:
    """Nothing is built, and no archive is left."""
    pytest.importorskip("torch")
    archive, folder = net_archive(tmp_path, HANDLER + BY_ITSELF), pictures(tmp_path / "in", 8)

    ran = marserve("optimise", archive, "--inputs", folder, "-o", tmp_path)

    assert ran.status == 1
    assert "one that extends BaseHandler, or calls context.load_model(), can be given another build" in ran.err
    assert not (tmp_path / "net-optimised.mar").exists()


def test_the_heads_of_the_table_say_what_a_ratio_is_and_of_how_many_rows_and_threads() -> None:
    """The first has the words that hold for all."""
    ratios = {size: Ratio(2.0, 1.53, 2.6) for size in (1, 16)}
    row = Row("channels-last", why_not="equal", ratios=ratios, ratios_of_one=ratios, seconds=12.8, size=200_000)
    report = Report("m", "1.0", "latency", 16, 24, 16, [row], 200_000, [])

    (found,) = (each for each in _lines(report) if isinstance(each, Table))
    assert [str(each.header) for each in found.columns[:3]] == ["build", "times as fast at 1 row", "at 16 rows"]
    report.threads = 2
    (found,) = (each for each in _lines(report) if isinstance(each, Table))
    heads = ["times as fast at 1 row, 1 thread", "at 16 rows, 1 thread", "at 1 row, 2 threads", "at 16 rows, 2 threads"]
    assert [str(each.header) for each in found.columns[1:5]] == heads
