"""What the wheel and the source distribution hold: what is needed, and nothing else."""

from __future__ import annotations

import configparser
import email
import re
import subprocess
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from support.distributions import ROOT, build, sdist_members, unpack_sdist, wheel_members

PACKAGES = {"marserve": ROOT / "server" / "marserve", "marserve_handlers": ROOT / "handlers" / "marserve_handlers"}
SECOND_WHEEL = ("ts_compat/outside/", "ts_compat/pyproject.toml")
"""What belongs to `marserve-ts` alone."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of this checkout."""
    return build("sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    """The wheel's METADATA."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def sources() -> set[str]:
    """The files of both packages, as git has or would have them."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", *map(str, PACKAGES.values())],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout: which files belong to the packages is not known")
    return {name.partition("/")[2] for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}


def test_the_wheel_holds_both_packages_the_manual_page_what_watches_it_and_nothing_else(wheel: Path) -> None:
    """No tests, no examples, no model store, no file that only the repository needs."""
    version = wheel.name.split("-")[1]
    info = f"marserve-{version}.dist-info"
    around = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    data = f"marserve-{version}.data/data/share"
    around.add(f"{data}/man/man1/marserve.1")
    monitoring = ROOT / "docker/monitoring"
    around.add(f"{data}/marserve/monitoring/marserve.rules.yml")
    around |= {f"{data}/marserve/monitoring/dashboards/{path.name}" for path in (monitoring / "dashboards").iterdir()}

    packages = {name for name in sources() if not any(part in name for part in SECOND_WHEEL)}

    assert wheel_members(wheel) == packages | around


def test_the_wheel_holds_the_proto_files_of_every_service(wheel: Path) -> None:
    """Where docs/grpc.md has clients' stubs compiled from, with the messages that the server reads."""
    protos = "marserve/api/grpc/protos/"
    noted = (PACKAGES["marserve"] / "api" / "grpc" / "protos" / "messages.sha256").read_text().split()[1::2]

    assert "inference/open_inference.proto" in noted
    assert {protos + name for name in (*noted, "messages.binpb")} <= wheel_members(wheel)


def test_the_wheel_is_for_every_machine(wheel: Path) -> None:
    """It has no compiled part: one file serves every Python 3 and every platform."""
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_wheel_is_small_and_holds_no_file_that_a_build_makes(wheel: Path) -> None:
    """Sources, pages and a manual page: no caches, and less than 2.5 MB."""
    assert wheel.stat().st_size < 2_500_000
    assert not [name for name in wheel_members(wheel) if "__pycache__" in name or name.endswith((".pyc", ".so"))]


def test_only_extras_ask_for_runtimes_and_nothing_asks_for_cuda(metadata: Message) -> None:
    """`pip install marserve` brings no torch; even with the extra it is torch's own build that chooses."""
    required = metadata.get_all("Requires-Dist") or []
    plain = [line for line in required if "extra ==" not in line]

    assert plain
    assert not [line for line in plain if re.match(r"(torch|onnx|onnxruntime|h2|nvidia|ray|obstore)\b", line)]
    assert not [line for line in required if re.match(r"(nvidia-c|triton|cupy|torch-)", line)]


def test_pythons_that_are_declared_are_one_list(metadata: Message) -> None:
    """3.11 to 3.13 as classifiers; pip refuses older ones."""
    classifiers = metadata.get_all("Classifier") or []
    versions = [line.rpartition(" ")[2] for line in classifiers if re.search(r"Python :: 3\.\d+$", line)]

    assert versions == ["3.11", "3.12", "3.13"]
    assert metadata["Requires-Python"] == ">=3.11"


def test_the_wheel_brings_the_four_commands(wheel: Path) -> None:
    """marserve's own and TorchServe's three."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        entries = configparser.ConfigParser()
        entries.read_string(archive.read(name).decode())

    assert set(entries["console_scripts"]) == {
        "marserve",
        "torchserve",
        "torch-model-archiver",
        "torch-workflow-archiver",
    }


@pytest.mark.system
def test_the_source_distribution_holds_what_building_needs(sdist: Path) -> None:
    """The two folders of sources, what watches a server, what stands in the metadata, and the changelog."""
    members = sdist_members(sdist)
    above = {name for name in members if not name.startswith(("server/", "handlers/", "docker/monitoring/"))}

    assert above == {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "PKG-INFO", ".gitignore"}
    assert not [name for name in members if "__pycache__" in name]


def test_the_source_distribution_builds_the_same_wheel(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    """Byte for byte: whoever installs from source has what others have, and a build can be done again."""
    again = build("wheel", tmp_path / "built", source=unpack_sdist(sdist, tmp_path / "unpacked"))

    assert again.name == wheel.name
    assert again.read_bytes() == wheel.read_bytes()
