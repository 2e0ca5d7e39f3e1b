"""A move, from the folder that TorchServe itself leaves: surveyed, started on its settings and snapshot, compared.

The archives are made by `torch-model-archiver` 0.12 with stock handlers, the old server is TorchServe 0.12.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from support.command_line import marserve
from support.real_torchserve import RealTorchServe, install_torchserve, register, running
from support.server import Server, poll

pytestmark = [pytest.mark.long, pytest.mark.torch, pytest.mark.timeout(900)]

CONTRACT = Path(__file__).parents[1] / "contract"
RECORDING = CONTRACT / "recorded" / "inference_basics.json"
# The stock base handler takes bare bodies, so an envelope unpacks them.
NUMBERS = [0.5, 1.5, 2.5, 3.5]
ENVELOPE = {"service_envelope": "body"}
SETTINGS = {"disable_token_authorization": "true", "enable_model_api": "true", "default_workers_per_model": "1"}
PICTURES = """\
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.pool = torch.nn.AdaptiveAvgPool2d(2)
        self.last = torch.nn.Linear(12, 3)

    def forward(self, pictures):
        return self.last(self.pool(pictures).flatten(1))
"""
WORDS = """\
import torch


class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.EmbeddingBag(8, 4)
        self.last = torch.nn.Linear(4, 2)

    def forward(self, text, offsets):
        return self.last(self.embedding(text, offsets))
"""
WEIGHTS = """\
import torch
from pictures import Net
from words import Words

torch.manual_seed(7)
torch.save(Net().state_dict(), "net.pt")
torch.save(Words().state_dict(), "words.pt")
torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU())).save("script.pt")
torch.save({word: at for at, word in enumerate("<unk> the a good bad film not very".split())}, "source_vocab.pt")
"""
ARCHIVES = (
    "--model-name pictures --handler image_classifier --model-file pictures.py --serialized-file net.pt "
    "--extra-files animals/index_to_name.json",
    "--model-name numbers --handler base_handler --serialized-file script.pt",
    "--model-name reviews --handler text_classifier --model-file words.py --serialized-file words.pt "
    "--extra-files source_vocab.pt,moods/index_to_name.json",
)


@dataclass(frozen=True, slots=True)
class Old:
    """TorchServe's folder after a run, and what it answered for `numbers`."""

    folder: Path
    settings: dict[str, str]
    answer: object


class Restored(Server):
    """This server, started in a folder of TorchServe's with nothing but the store: its snapshot says the rest."""

    def command(self) -> list[str]:
        """Neither a file of settings nor models are named."""
        program = [sys.executable, "-m", "marserve.cli.torchserve", "--start", "--foreground"]
        return [*program, "--model-store", str(self.store)]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TorchServe's programs."""
    return install_torchserve(tmp_path_factory.mktemp("torchserve") / "environment")


@pytest.fixture(scope="module")
def old(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Old:
    """Three archives with stock handlers, of which TorchServe served one and wrote snapshots of it."""
    folder = tmp_path_factory.mktemp("old")
    sources = folder / "sources"
    for name, text in {
        "pictures.py": PICTURES,
        "words.py": WORDS,
        "weights.py": WEIGHTS,
        "animals/index_to_name.json": '{"0": "cat", "1": "dog", "2": "fish"}',
        "moods/index_to_name.json": '{"0": "bad", "1": "good"}',
    }.items():
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        (sources / name).write_text(text)
    (folder / "store").mkdir()
    weights = [sys.executable, "-W", "ignore", "weights.py"]
    subprocess.run(weights, cwd=sources, check=True, capture_output=True, timeout=120)
    for words in ARCHIVES:
        command = [
            str(programs / "torch-model-archiver"),
            *words.split(),
            "--version",
            "1.0",
            "--export-path",
            "../store",
        ]
        subprocess.run(command, cwd=sources, check=True, timeout=60)
    with running(
        programs, folder, SETTINGS | ENVELOPE, ["--model-store", "store", "--models", "numbers.mar"]
    ) as server:
        answer = httpx.post(f"{server.inference}/predictions/numbers", json=NUMBERS, timeout=60)
        if answer.status_code == 503:  # its worker is still on its way
            register(server, "numbers.mar", model_name="again")
            answer = httpx.post(f"{server.inference}/predictions/numbers", json=NUMBERS, timeout=60)
        assert answer.status_code == 200, answer.text
    lines = (folder / "config.properties").read_text().splitlines()
    return Old(folder, dict(line.split("=", 1) for line in lines), answer.json())


def test_the_folder_that_torchserve_leaves_needs_nothing(old: Old) -> None:
    """Settings, snapshots, logs, and what its archiver made with stock handlers."""
    ran = marserve("migrate", old.folder, "--json")

    assert ran.document["counts"]["action"] == 0, ran.out
    works = {each["file"] for each in ran.document["findings"] if each["verdict"] == "works"}
    assert {"store/pictures.mar", "store/numbers.mar", "store/reviews.mar"} <= works
    assert any(name.startswith("logs/config/") for name in works)


def test_the_three_archives_are_served_here(old: Old, tmp_path: Path) -> None:
    """With the handlers that they name and nothing else; numbers are answered as TorchServe did."""
    from PIL import Image

    for name in ("plain", "enveloped"):
        (tmp_path / name).mkdir()
    Image.new("RGB", (32, 32), (200, 10, 10)).save(tmp_path / "red.png")
    with Server(tmp_path / "plain", store=old.folder / "store") as server:
        for name in ("pictures", "reviews"):
            answer = server.register(f"{name}.mar")
            assert answer.status_code == 200, answer.text

        picture = server.predict("pictures", (tmp_path / "red.png").read_bytes())
        review = server.predict("reviews", "a very good film")
    with Server(tmp_path / "enveloped", store=old.folder / "store", settings=ENVELOPE) as server:
        assert server.register("numbers.mar").status_code == 200

        numbers = server.client.post(f"{server.inference}/predictions/numbers", json=NUMBERS)

    assert set(picture.json()) == {"cat", "dog", "fish"}
    assert numbers.json() == pytest.approx(old.answer, rel=1e-5)
    assert set(review.json()) == {"bad", "good"}


def test_the_snapshot_that_torchserve_wrote_is_restored(old: Old, tmp_path: Path) -> None:
    """Its addresses, settings and models, with `torchserve --start` in that folder and no more."""
    folder = tmp_path / "moved"
    shutil.copytree(old.folder, folder, ignore=shutil.ignore_patterns("tmp", "config.properties"))
    server = Restored(folder)
    server.inference, server.management = old.settings["inference_address"], old.settings["management_address"]

    with server:
        for _ in poll(60, "the model of the snapshot is ready"):
            if any(worker["status"] == "READY" for worker in server.describe("numbers")["workers"]):
                break
        answer = server.client.post(f"{server.inference}/predictions/numbers", json=NUMBERS)

    assert answer.json() == pytest.approx(old.answer, rel=1e-5)


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contract's archives that need no torch to be made."""
    folder = tmp_path_factory.mktemp("fixtures")
    command = [sys.executable, CONTRACT / "fixtures" / "make_fixtures.py", folder, "--no-torch"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def both(
    programs: Path, fixtures: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RealTorchServe, Server]]:
    """TorchServe and this server, with the archives of a recording registered at each."""
    folder = tmp_path_factory.mktemp("both")
    recording = json.loads(RECORDING.read_text())
    for name in ("old", "new", "store"):
        (folder / name).mkdir()
    for name in recording["server"]["store"]:
        shutil.copy(fixtures / name, folder / "store" / name)
    settings = recording["server"]["config"]
    arguments = ["--ncs", "--model-store", str(folder / "store")]
    with (
        running(programs, folder / "old", settings, arguments) as torchserve,
        Server(folder / "new", store=folder / "store", settings=settings) as server,
    ):
        for case in recording["cases"]:
            if case.get("setup"):
                assert httpx.post(f"{torchserve.management}{case['path']}", timeout=120).status_code == 200
                assert server.client.post(f"{server.management}{case['path']}").status_code == 200
        yield torchserve, server


def test_a_recordings_requests_are_answered_alike_but_for_quirks(both: tuple[RealTorchServe, Server]) -> None:
    """The recording as it is; only what it calls a quirk is answered otherwise."""
    torchserve, server = both
    quirks = {case["id"] for case in json.loads(RECORDING.read_text())["cases"] if case.get("quirk")}

    ran = marserve(
        *("migrate", "--compare", torchserve.inference, "--requests", RECORDING),
        *("--inference", server.inference, "--json"),
    )

    assert ran.document["cases"] > 60
    assert {each["case"] for each in ran.document["differences"]} <= quirks, ran.document["differences"]


def test_a_folder_of_requests_is_answered_alike(both: tuple[RealTorchServe, Server], tmp_path: Path) -> None:
    """Status 0: the move is proven for these."""
    torchserve, server = both
    for name, body in {"echo/a.txt": b"words", "echo/b.bin": os.urandom(1000), "inspect/c.json": b'{"x": 1}'}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(body)

    ran = marserve(
        *("migrate", "--compare", torchserve.inference, "--requests", tmp_path, "--inference", server.inference)
    )

    assert (ran.status, ran.out) == (0, "3 requests: 3 answered alike, 0 not.\n")
