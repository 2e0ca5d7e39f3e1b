"""Tests for environments: installed once, whole or not at all, kept, cleared away, and never left running."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from marserve.environments import environments as environments_module
from marserve.environments.environments import (
    Environment,
    Environments,
    Kind,
    brings_shared,
    digest_of,
    prune,
    shared_closure,
)
from marserve.environments.pip_place import newest_wheel, wheel_folders
from marserve.environments.requirements import Requirements, read_requirements
from marserve.errors import DependencyFailed
from support.processes import descendants, until, until_blocking
from support.wheels import waiting_index, write_index, write_wheel

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are told by /proc"),
]


# In pip's place, for tests of what is done with an environment once it is made.
QUICK_PIP = """\
#!/bin/sh
while [ $# -gt 0 ]; do
    if [ "$1" = --target ]; then mkdir "$2"; echo "version = '1.0'" > "$2/tiny.py"; fi
    shift
done
"""


class House:
    """A cache folder, an archive to write requirements into, and environments over both."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "environments"
        self.fallback = root / "fallback"
        self.archive = root / "archive"
        self.archive.mkdir()
        self.used: list[Environment] = []
        # What the whole run has started, such as an object store's stand-in.
        self._there_before = descendants()

    def descendants(self) -> set[int]:
        """The processes that run because of the test."""
        return descendants() - self._there_before

    def build(self, **changes: Any) -> Environments:
        """Another server's environments on the same folder."""
        surroundings = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        values = {"environment": {**surroundings, "PIP_CONFIG_FILE": os.devnull}, **changes}
        return Environments(self.folder, self.fallback, **values)

    def build_quick(self, **changes: Any) -> Environments:
        """As `build`, with a program in pip's place that installs one module, whatever is asked for."""
        program = self.archive.parent / "quick-pip"
        if not program.exists():
            program.write_text(QUICK_PIP)
            program.chmod(0o755)
        return self.build(python=str(program), **changes)

    def read(self, text: str) -> Requirements:
        """The requirements of an archive that says this."""
        (self.archive / "requirements.txt").write_text(text)
        return read_requirements(self.archive, "requirements.txt", [".*"])

    async def obtain(self, environments: Environments, text: str, kind: Kind = "packages") -> Environment:
        """An environment with these requirements; released at the end of the test."""
        environment = await environments.obtain("m", self.read(text), kind)
        self.used.append(environment)
        return environment

    def names(self) -> list[str]:
        """What lies in the cache folder, logs and locks left out."""
        return sorted(path.name for path in self.folder.iterdir() if path.suffix not in (".log", ".lock"))


async def output_of(*command: str | Path) -> str:
    """What a program prints that must succeed."""
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
    return str(done.stdout)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """After the test nothing runs, and nothing half made is left."""
    house = House(tmp_path)
    yield house
    for environment in house.used:
        environment.release()
    assert not house.descendants()
    if house.folder.exists():
        assert not list(house.folder.glob("*.tmp"))


# ------------------------------------------------------------------------------------------- installing


async def test_what_lies_in_the_archive_is_installed_without_a_network(house: House) -> None:
    """Named by its file, or found by name in a folder of the archive; list and record say what it was, for people and
    for the next server, the list with its hash.
    """
    write_wheel(house.archive, "tiny")
    write_wheel(house.archive, "other", "2.0", requires=("tiny",))

    environment = await house.obtain(house.build(), "--no-index\n--find-links .\nother\n")

    assert environment.packages is not None
    assert (environment.packages / "tiny.py").is_file()
    assert [(package.name, package.version) for package in environment.installed] == [("other", "2.0"), ("tiny", "1.0")]
    lock_list = (environment.folder / "requirements.lock").read_text().splitlines()
    assert all("==" in line and "--hash=sha256:" in line for line in lock_list)
    assert "Successfully installed" in environment.log.read_text()
    assert (environment.kind, environment.python, environment.was_there) == ("packages", None, False)
    assert environment.may_share_imports
    record = json.loads((environment.folder / "environment.json").read_text())
    assert record["kind"] == "packages"
    assert record["bytes"] > 0
    assert 0 < record["seconds"] <= time.monotonic()
    assert [installed[:2] for installed in record["installed"]] == [["other", "2.0"], ["tiny", "1.0"]]


async def test_the_operators_index_is_asked(house: House) -> None:
    """By pip's own configuration, here its variables."""
    shop = house.archive.parent / "shop"
    shop.mkdir()
    index = write_index(shop / "simple", write_wheel(shop, "tiny", "1.0"), write_wheel(shop, "tiny", "1.5"))
    environments = house.build(environment={**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index})

    environment = await house.obtain(environments, "tiny\n")

    assert [package.version for package in environment.installed] == ["1.5"]


async def test_the_same_is_installed_once_for_two_models_and_two_servers(house: House) -> None:
    """Whoever comes while it is made waits for it; whoever comes later finds it."""
    write_wheel(house.archive, "tiny")
    text = "--no-index\n./tiny-1.0-py3-none-any.whl\n"
    one, two = house.build_quick(), house.build_quick()

    made = await asyncio.gather(*(house.obtain(each, text) for each in (one, one, two)))
    later = await house.obtain(house.build_quick(), text)

    assert [environment.was_there for environment in made].count(False) == 1
    assert later.was_there
    assert len({environment.folder for environment in [*made, later]}) == 1
    assert house.names() == [later.folder.name]


async def test_a_virtual_environment_adds_to_what_the_server_has(house: House) -> None:
    """Its own packages first; the server's are behind, are not installed again and are not touched."""
    write_wheel(house.archive, "tiny", requires=("msgspec",))

    environment = await house.obtain(house.build(), "--no-index\n./tiny-1.0-py3-none-any.whl\n", "venv")

    assert environment.python is not None
    script = "import sys, tiny, msgspec, marserve.worker.loop; print(tiny.__file__, msgspec.__file__, sys.prefix)"
    ours, servers, prefix = (await output_of(environment.python, "-P", "-c", script)).split()
    assert ours.startswith(str(environment.folder))
    assert not servers.startswith(str(environment.folder))
    assert prefix == str(environment.folder / "venv")
    assert [package.name for package in environment.installed] == ["tiny"]
    assert await output_of(environment.python.parent / "tiny-says") == "1.0\n"
    assert not environment.may_share_imports


async def test_a_virtual_environment_needs_no_requirements(house: House) -> None:
    """As TorchServe, which makes one for `useVenv` alone."""
    environment = await house.build().obtain("m", Requirements(), "venv")

    assert environment.python is not None
    assert environment.python.exists()
    assert environment.installed == ()
    environment.release()


async def test_a_folder_of_source_is_built_outside_of_the_archive(house: House) -> None:
    """Building writes into the folder, and an archive may be a folder of the store. Its failure is pip's to tell."""
    source = house.archive / "source"
    source.mkdir()
    (source / "pyproject.toml").write_text('[build-system]\nrequires = []\nbuild-backend = "b"\nbackend-path = ["."]\n')
    (source / "b.py").write_text("open('written', 'w').close()\nraise SystemExit('the backend says no')\n")

    with pytest.raises(DependencyFailed) as failed:
        await house.obtain(house.build(), "--no-index\n./source\n")

    assert "the backend says no" in failed.value.reason
    assert sorted(path.name for path in source.iterdir()) == ["b.py", "pyproject.toml"]


# ------------------------------------------------------------------------------------------- failing


async def test_a_failure_is_told_in_torchserves_words_with_pips_behind_them(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    """The client gets the one, the log and describe the other; pip's whole output stays in a file, and nothing else."""
    with pytest.raises(DependencyFailed) as failed, caplog.at_level(logging.ERROR):
        await house.obtain(house.build(), "--no-index\nno-such-package-anywhere==9.9\n")

    assert failed.value.message == "Custom pip package installation failed for model m"
    assert "No matching distribution found for no-such-package-anywhere==9.9" in failed.value.reason
    assert "No matching distribution found" in caplog.text
    [left] = house.folder.iterdir()
    assert left.suffix == ".log"
    assert "No matching distribution found" in left.read_text()


async def test_a_package_with_another_hash_is_not_installed(house: House) -> None:
    """The file's word is kept to."""
    write_wheel(house.archive, "tiny")

    with pytest.raises(DependencyFailed) as failed:
        await house.obtain(house.build(), f"--no-index\n./tiny-1.0-py3-none-any.whl --hash=sha256:{'0' * 64}\n")

    assert "DO NOT MATCH THE HASHES" in failed.value.reason


async def test_a_failure_is_tried_again_by_the_next_one(house: House) -> None:
    """What failed is not remembered: an index may be back."""
    with pytest.raises(DependencyFailed):
        await house.obtain(house.build(python="/bin/false"), "tiny\n")

    environment = await house.obtain(house.build_quick(), "tiny\n")

    assert not environment.was_there


async def test_an_installation_that_takes_too_long_is_ended(house: House) -> None:
    """With everything that it started."""
    with waiting_index() as index, pytest.raises(DependencyFailed) as failed:
        await house.obtain(house.build(timeout_s=1.0), f"--index-url {index}\ntiny\n")

    assert "environment_timeout, 1 s" in failed.value.reason
    assert house.names() == []
    assert not house.descendants()


async def test_a_cancelled_installation_leaves_nothing(house: House) -> None:
    """Neither a process nor a folder; who waited for it makes it itself."""
    write_wheel(house.archive, "tiny")
    with waiting_index() as index:
        environments = house.build()
        first = asyncio.create_task(house.obtain(environments, f"--index-url {index}\ntiny\n"))
        await until(house.descendants, "pip runs", timeout_s=30)

        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first

        assert not house.descendants()
        assert house.names() == []


# ------------------------------------------------------------------------------------------- killed servers

MAKES_ONE = """
import asyncio, os, sys
from pathlib import Path
from marserve.environments.requirements import read_requirements
from marserve.environments.environments import Environments

async def main():
    root = Path(sys.argv[1])
    environments = Environments(root / "environments", root / "fallback", dict(os.environ))
    await environments.obtain("m", read_requirements(root / "archive", "requirements.txt", [".*"]), sys.argv[2])

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["packages", pytest.param("venv", marks=pytest.mark.long)])
async def test_a_killed_server_leaves_nothing_half_installed(house: House, kind: Kind) -> None:
    """pip ends with it; what it had begun is deleted by the next one, which begins anew."""
    write_wheel(house.archive, "tiny")
    (house.archive / "slow").mkdir()
    with waiting_index() as index:
        house.read(f"--index-url {index}\ntiny\n")
        command = [sys.executable, "-c", textwrap.dedent(MAKES_ONE), str(house.archive.parent), kind]
        surroundings = {**os.environ, "PIP_CONFIG_FILE": os.devnull}
        server = await asyncio.to_thread(subprocess.Popen, command, env=surroundings)
        until_blocking(lambda: list(house.folder.glob("*.tmp/requirements.txt")), "it has begun", timeout_s=30)
        until_blocking(lambda: descendants(server.pid), "pip runs", timeout_s=30)
        pips = descendants(server.pid)

        server.send_signal(signal.SIGKILL)
        server.wait()
        until_blocking(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pips), "pip has ended", timeout_s=30)

        [left] = house.folder.glob("*.tmp")
        making = asyncio.create_task(house.obtain(house.build(), f"--index-url {index}\ntiny\n", kind))
        await until(lambda: set(house.folder.glob("*.tmp/requirements.txt")) - {left / "requirements.txt"}, "the next")
        assert not left.exists()
        making.cancel()
        await asyncio.wait([making])
    assert house.names() == []


# ------------------------------------------------------------------------------------------- where they are kept


async def test_a_folder_that_cannot_be_written_gives_way_with_one_line(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    """What is needed is installed into a folder of the server's own."""
    write_wheel(house.archive, "tiny")
    house.folder.write_text("a file where the folder should be")
    environments = house.build_quick()

    with caplog.at_level(logging.WARNING):
        one = await house.obtain(environments, "--no-index\n./tiny-1.0-py3-none-any.whl\n")
        two = await house.obtain(environments, "--no-index\n./tiny-1.0-py3-none-any.whl\n# the same\n")

    assert one.folder.parent == two.folder.parent == house.fallback
    assert caplog.text.count("is not used to install into") == 1
    house.folder.unlink()


async def test_a_folder_that_anybody_may_write_is_not_used(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """Who may write there could have workers run what they like."""
    write_wheel(house.archive, "tiny")
    text = "--no-index\n./tiny-1.0-py3-none-any.whl\n"
    await house.obtain(house.build_quick(), text)
    house.folder.chmod(0o777)

    environment = await house.obtain(house.build_quick(), text)

    assert environment.folder.parent == house.fallback
    assert not environment.was_there
    assert "others on this machine may write there" in caplog.text


async def test_a_folder_that_is_only_read_gives_what_it_holds(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image may bring its environments along."""
    write_wheel(house.archive, "tiny")
    text = "--no-index\n./tiny-1.0-py3-none-any.whl\n"
    made = await house.obtain(house.build_quick(), text)
    monkeypatch.setattr(environments_module, "_find_defect", lambda folder: "it cannot be written")

    found = await house.obtain(house.build_quick(), text)

    assert found.was_there
    assert found.folder == made.folder


async def test_a_private_folder_is_made(house: House) -> None:
    """Packages are code: nobody else may put some there."""
    await house.obtain(house.build(), "# nothing\n")

    assert house.folder.stat().st_mode & 0o077 == 0


# ------------------------------------------------------------------------------------------- clearing away


async def test_the_longest_unused_go_first_and_what_is_used_stays(house: House) -> None:
    """Only while all together hold too much."""
    environments = house.build_quick()
    made = [
        await house.obtain(environments, f"# {name}\n--no-index\n./{name}-1.0-py3-none-any.whl\n")
        for name in _three(house)
    ]
    for age, environment in enumerate(made):
        os.utime(house.folder / f"{environment.folder.name}.lock", (1000 + age, 1000 + age))
    in_use, oldest, newest = made
    oldest.release()
    newest.release()

    assert prune(house.folder, 1 << 30) == []
    total = sum(json.loads(path.read_text())["bytes"] for path in house.folder.glob("*/environment.json"))
    assert prune(house.folder, total - 1) == [oldest.folder.name]
    assert prune(house.folder, 1) == [newest.folder.name]

    assert house.names() == [in_use.folder.name]
    assert not (house.folder / f"{oldest.folder.name}.lock").exists()
    assert not (house.folder / f"{oldest.folder.name}.log").exists()


def _three(house: House) -> list[str]:
    names = ["one", "two", "three"]
    for name in names:
        write_wheel(house.archive, name)
    return names


async def test_a_new_one_makes_room(house: House) -> None:
    """Over its bound the folder loses those that nobody uses."""
    environments = house.build_quick(limit_bytes=1)
    one, two, _ = _three(house)
    first = await house.obtain(environments, f"--no-index\n./{one}-1.0-py3-none-any.whl\n")
    first.release()

    second = await house.obtain(environments, f"--no-index\n./{two}-1.0-py3-none-any.whl\n")

    assert house.names() == [second.folder.name]


async def test_of_failures_the_latest_logs_are_kept(house: House) -> None:
    """Not all of them for ever."""
    house.folder.mkdir(mode=0o700)
    for number in range(30):
        path = house.folder / f"{number:032x}.log"
        path.touch()
        os.utime(path, (number, number))

    prune(house.folder, 0)

    assert sorted(path.name for path in house.folder.iterdir()) == [f"{number:032x}.log" for number in range(10, 30)]


async def test_what_is_in_the_making_is_not_cleared_away(house: House) -> None:
    """Its lock is held; only what a killed server left is."""
    (house.folder / "dead.x.tmp").mkdir(parents=True, mode=0o700)
    with waiting_index() as index:
        making = asyncio.create_task(house.obtain(house.build(), f"--index-url {index}\ntiny\n"))
        await until(lambda: list(house.folder.glob("*.tmp/requirements.txt")), "it is begun", timeout_s=30)

        prune(house.folder, 1)

        [left] = house.folder.glob("*.tmp")
        assert left.name != "dead.x.tmp"
        making.cancel()
        await asyncio.wait([making])


# ------------------------------------------------------------------------------------------- what pip is not told


async def test_the_surroundings_do_not_say_where_to_install(house: House, tmp_path: Path) -> None:
    """Variables that would lead pip elsewhere are taken off; a requirement of a virtual environment is too."""
    write_wheel(house.archive, "tiny")
    elsewhere = {"PIP_TARGET": str(tmp_path / "x"), "PIP_PREFIX": str(tmp_path / "x"), "PIP_REQUIRE_VIRTUALENV": "1"}
    environments = house.build(environment={**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_USER": "1", **elsewhere})

    environment = await house.obtain(environments, "--no-index\n./tiny-1.0-py3-none-any.whl\n")

    assert [package.name for package in environment.installed] == ["tiny"]
    assert not (tmp_path / "x").exists()


async def test_an_index_password_is_not_shown(house: House) -> None:
    """pip's words reach the log and describe."""
    (house.archive / "simple").mkdir()
    surroundings = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://me:secret@127.0.0.1:9/simple"}
    surroundings |= {"PIP_RETRIES": "0"}

    with pytest.raises(DependencyFailed) as failed:
        await house.obtain(house.build(environment=surroundings), "tiny\n")

    assert "secret" not in failed.value.reason


# ------------------------------------------------------------------------------------------- pure rules


def test_the_name_follows_everything_that_the_content_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requirements, kind, interpreter; of a virtual environment what the server has too."""
    one, two = Requirements(digest="1"), Requirements(digest="2")
    names = {digest_of(one, "packages"), digest_of(two, "packages"), digest_of(one, "venv")}
    assert len(names) == 3
    assert digest_of(one, "packages") == digest_of(Requirements(file="other.txt", digest="1"), "packages")

    monkeypatch.setattr(environments_module, "_distributions", lambda place: [("more", "1.0")])
    assert digest_of(one, "packages") in names
    assert digest_of(one, "venv") not in names


def test_what_was_imported_for_many_is_told_by_names() -> None:
    """The heavy distributions and all that they require; names are compared as packaging does."""
    requires = {"torch": ["sympy", "Typing_Extensions"], "sympy": ["mpmath"], "mpmath": ["torch"]}
    closure = shared_closure(["torch"], lambda name: requires.get(name, []))

    assert closure == {"torch", "sympy", "typing-extensions", "mpmath"}
    assert brings_shared(["mine", "typing.extensions"], closure)
    assert not brings_shared(["mine", "torchvision"], closure)


def test_the_real_heavy_ones_are_among_them() -> None:
    """numpy in a model's requirements must not meet the server's."""
    assert brings_shared(["NumPy"])
    assert brings_shared(["torch"])
    assert not brings_shared(["contractkit-tiny"])


async def test_an_environment_whose_record_is_damaged_is_made_anew(house: House) -> None:
    """Whatever befell the disk: what cannot be read is not used."""
    write_wheel(house.archive, "tiny")
    text = "--no-index\n./tiny-1.0-py3-none-any.whl\n"
    first = await house.obtain(house.build_quick(), text)
    first.release()
    (first.folder / "environment.json").write_text("{")

    again = await house.obtain(house.build_quick(), text)

    assert (again.folder, again.was_there) == (first.folder, False)
    assert (again.folder / "packages" / "tiny.py").is_file()


WHEELS_PIP = """
import pathlib, sys, sysconfig
words = sys.argv
modules = pathlib.Path(words[words.index("--target") + 1] if "--target" in words else sysconfig.get_path("purelib"))
(modules / "tiny-1.0.dist-info").mkdir(parents=True)
(modules / "tiny-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\\nName: tiny\\nVersion: 1.0\\n")
(modules / "tiny.py").write_text("version = '1.0'")
"""


@pytest.mark.parametrize("kind", ["packages", "venv"])
async def test_without_pip_it_is_run_from_a_wheel(house: House, monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    """What the wheel holds is run with pip's words; nothing of the wheel is installed."""
    shelf = house.archive.parent / "shelf"
    shelf.mkdir()
    wheel = write_wheel(shelf, "pip", "99.0", modules={"pip/__init__.py": "", "pip/__main__.py": WHEELS_PIP})
    await check_that_pip_is_run_from(str(wheel), house, monkeypatch, kind)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["packages", "venv"])
async def test_without_pip_it_is_run_from_the_wheel_that_python_brings(
    house: House, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    """The same with the real one, which takes seconds: nothing of a wheel is compiled ahead."""
    wheel = newest_wheel(file for folder in wheel_folders() for file in folder.glob("pip-*.whl"))
    if wheel is None:
        pytest.skip("this Python brings no wheel of pip (ensurepip)")
    await check_that_pip_is_run_from(wheel, house, monkeypatch, kind)


async def check_that_pip_is_run_from(wheel: str, house: House, monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    """Install a distribution with the pip that this wheel holds."""
    monkeypatch.setattr(environments_module, "find_pip", lambda: wheel)
    write_wheel(house.archive, "tiny")

    environment = await house.obtain(house.build(), "--no-index\n./tiny-1.0-py3-none-any.whl\n", kind)

    assert [str(package).partition(" ")[0] for package in environment.installed] == ["tiny==1.0"]
    assert (environment.modules / "tiny.py").is_file()
    assert not list(environment.modules.glob("pip*"))


async def test_without_pip_and_its_wheel_the_sentence_says_how_to_get_it(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian parts them from Python."""
    monkeypatch.setattr(environments_module, "find_pip", lambda: None)

    with pytest.raises(DependencyFailed) as failed:
        await house.obtain(house.build(), "tiny\n")

    assert f"the server's Python, {sys.executable}, has neither pip" in failed.value.reason
    assert "python3-venv" in failed.value.reason
