"""Archives made by TorchServe's own archivers are served here, and archives made by ours by TorchServe itself.

Both are installed from the package index, into an environment of their own; TorchServe needs Java and torch besides.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from marserve.cli.torchserve import torch_model_archiver, torch_workflow_archiver
from support.real_torchserve import install, install_torchserve, running
from support.server import Server
from support.workflow_archives import THREE_NODES

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

FORMATS = {"middle": "default", "packed": "tgz", "stored": "zip-store", "plain": "no-archive"}
URLS = ["middle.mar", "packed.tar.gz", "stored.mar", "plain"]
PACKAGES = ("torch-model-archiver==0.12.0", "torch-workflow-archiver==0.2.15")
HANDLER = """\
import json

class Echo:
    def initialize(self, context):
        self.greeting = open("greeting.txt").read()
        self.step = context.model_yaml_config["handler"]["step"]

    def handle(self, data, context):
        return [f"{self.greeting} {self.step} {bytes(row['body']).decode()}" for row in data]
"""
FUNCTIONS = """\
def prepare(data, context):
    return None if data is None else [b"<" + bytes(row["body"]) for row in data]

def finish(data, context):
    return None if data is None else [bytes(row["body"]) + b">" for row in data]
"""


def write_sources(folder: Path) -> None:
    """What goes into the archives, and the folders that they go to."""
    for name, text in {
        "echo.py": HANDLER,
        "greeting.txt": "hello",
        "config.yaml": "handler:\n  step: 7\n",
        "nodes.py": FUNCTIONS,
        "workflow.yaml": THREE_NODES,
    }.items():
        (folder / name).write_text(text)
    for name in ("store", "workflows"):
        (folder / name).mkdir()


def model_words(name: str, archive_format: str) -> list[str]:
    """The arguments that make a model's archive."""
    return (
        f"--model-name {name} --version 1.0 --handler echo.py --extra-files greeting.txt --config-file config.yaml "
        f"--archive-format {archive_format} --export-path store"
    ).split()


WORKFLOW_WORDS = (
    "--workflow-name w --spec-file workflow.yaml --handler nodes.py --export-path workflows".split()  # noqa: SIM905
)


@pytest.fixture(scope="module")
def archivers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with TorchServe's own two programs."""
    return install(tmp_path_factory.mktemp("archivers") / "environment", *PACKAGES)


@pytest.fixture(scope="module")
def server(archivers: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose stores were filled by them, in every format that they know."""
    folder = tmp_path_factory.mktemp("served")
    write_sources(folder)
    # They gather files in the temporary folder under the archive's name, and delete what has that name there.
    environment = {**os.environ, "TMPDIR": str(tmp_path_factory.mktemp("gathered"))}
    for name, archive_format in FORMATS.items():
        words = [str(archivers / "torch-model-archiver"), *model_words(name, archive_format)]
        subprocess.run(words, cwd=folder, env=environment, check=True, timeout=60)
    words = [str(archivers / "torch-workflow-archiver"), *WORKFLOW_WORDS]
    subprocess.run(words, cwd=folder, env=environment, check=True, timeout=60)
    with Server(folder, store=folder / "store", arguments=["--workflow-store", "workflows"]) as server:
        yield server


@pytest.mark.parametrize("url", URLS)
def test_a_model_archive_of_torchserves_archiver_is_served(server: Server, url: str) -> None:
    """Whatever its format; what it carries is where the handler looks for it."""
    answer = server.register(url)
    assert answer.status_code == 200, answer.text

    told = server.predict(url.partition(".")[0], b"you")

    assert (told.status_code, told.text) == (200, "hello 7 you")


def test_a_workflow_archive_of_torchserves_archiver_is_served(server: Server) -> None:
    """A function, a model and a function."""
    answer = server.client.post(f"{server.management}/workflows", params={"url": "w.war"})
    assert answer.status_code == 200, answer.text

    told = server.client.post(f"{server.inference}/wfpredict/w", content=b"you")

    assert (told.status_code, told.text) == (200, "hello 7 <you>")


# ------------------------------------------------------------------------------------------- the other way


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """TorchServe itself, with archives of ours in its stores; its inference and management addresses."""
    folder = tmp_path_factory.mktemp("theirs")
    programs = install_torchserve(folder / "environment")
    write_sources(folder)
    with contextlib.chdir(folder):
        for name, archive_format in FORMATS.items():
            assert torch_model_archiver.main(model_words(name, archive_format)) == 0
        assert torch_workflow_archiver.main(WORKFLOW_WORDS) == 0
    settings = {"disable_token_authorization": "true", "enable_model_api": "true"}
    arguments = ["--ncs", "--model-store", "store", "--workflow-store", "workflows"]
    with running(programs, folder, settings, arguments) as server:
        yield server.inference, server.management


@pytest.mark.parametrize("url", URLS)
def test_a_model_archive_of_ours_is_served_by_torchserve(theirs: tuple[str, str], url: str) -> None:
    """In every format."""
    inference, management = theirs
    answer = httpx.post(
        f"{management}/models", params={"url": url, "initial_workers": 1, "synchronous": "true"}, timeout=120
    )
    assert answer.status_code == 200, answer.text

    told = httpx.post(f"{inference}/predictions/{url.partition('.')[0]}", content=b"you", timeout=60)

    assert (told.status_code, told.text) == (200, "hello 7 you")


def test_a_workflow_archive_of_ours_is_served_by_torchserve(theirs: tuple[str, str]) -> None:
    """A function, a model and a function."""
    inference, management = theirs
    answer = httpx.post(f"{management}/workflows", params={"url": "w.war"}, timeout=120)
    assert answer.status_code == 200, answer.text

    told = httpx.post(f"{inference}/wfpredict/w", content=b"you", timeout=60)

    assert (told.status_code, told.text) == (200, "hello 7 <you>")
