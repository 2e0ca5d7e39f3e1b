"""Archives made by the archivers that TorchServe's users have, installed from the package index, are served here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.server import Server
from support.workflow_archives import THREE_NODES

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

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


@pytest.fixture(scope="module")
def archivers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with TorchServe's own two programs, in an environment of their own."""
    folder = tmp_path_factory.mktemp("archivers") / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=300)
    run = subprocess.run(
        [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *PACKAGES],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if run.returncode:
        pytest.skip(f"TorchServe's archivers cannot be installed here: {run.stderr.strip().splitlines()[-1:]}")
    return folder / "bin"


@pytest.fixture(scope="module")
def server(archivers: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose stores were filled by them, in every format that they know."""
    folder = tmp_path_factory.mktemp("served")
    for name, text in {
        "echo.py": HANDLER,
        "greeting.txt": "hello",
        "config.yaml": "handler:\n  step: 7\n",
        "nodes.py": FUNCTIONS,
        "workflow.yaml": THREE_NODES,
    }.items():
        (folder / name).write_text(text)
    store, workflows = folder / "store", folder / "workflows"
    store.mkdir()
    workflows.mkdir()

    def run(program: str, words: str) -> None:
        subprocess.run([str(archivers / program), *words.split()], cwd=folder, check=True, timeout=60)

    for name, archive_format in (
        ("middle", "default"),
        ("packed", "tgz"),
        ("stored", "zip-store"),
        ("plain", "no-archive"),
    ):
        run(
            "torch-model-archiver",
            f"--model-name {name} --version 1.0 --handler echo.py --extra-files greeting.txt --config-file config.yaml "
            f"--archive-format {archive_format} --export-path store",
        )
    run(
        "torch-workflow-archiver",
        "--workflow-name w --spec-file workflow.yaml --handler nodes.py --export-path workflows",
    )
    with Server(folder, store=store, arguments=["--workflow-store", str(workflows)]) as server:
        yield server


@pytest.mark.parametrize("url", ["middle.mar", "packed.tar.gz", "stored.mar", "plain"])
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
