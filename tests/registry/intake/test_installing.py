"""Tests for versions whose requirements are being installed: what they answer, and how they are given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from marserve.errors import BadArchive, DependencyFailed, Draining, LoadFailed, ModelNotFound, VersionConflict
from marserve.registry.changes.swap import SwapParameters
from marserve.registry.intake.registration import Registered, RegisterParameters
from marserve.settings import ModelToLoad
from support.echo_archives import manifest, write_mar
from support.fake_environments import FakeEnvironments
from support.fake_pool import Behaviour
from support.management_house import House as ManagementHouse
from support.processes import until

pytestmark = pytest.mark.anyio

WORDS = "Custom pip package installation failed for model m"


class House(ManagementHouse):
    """A house whose environments are fakes."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.environments = FakeEnvironments(root / "environments")
        super().__init__(root, environments=self.environments, **{"installs_requirements": True, **options})

    def put_needy(
        self,
        name: str = "m",
        version: str = "1.0",
        *,
        text: bytes | None = b"tiny\n",
        config: str | None = None,
        runtime: str = "python",
        **model: Any,
    ) -> str:
        """An archive with requirements in the store; its name there."""
        named = {} if text is None else {"requirementsFile": "needs.txt"}
        members = {} if text is None else {"needs__txt": text}
        document = {**manifest(name, version, **named, **model), "runtime": runtime}
        return write_mar(self.store / f"{name}-{version}.mar", document, config=config, **members).name

    async def add(self, archive: str, **parameters: Any) -> Registered:
        """Register an archive with a worker."""
        return await self.registry.register(RegisterParameters(archive, **{"initial_workers": 1, **parameters}))


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """After the test the registry is stopped, and holds on to nothing."""
    house = House(tmp_path, unregister_timeout_s=0.2)
    yield house
    await house.registry.stop()
    assert house.folders() == []
    assert all(environment.is_released for environment in house.environments.made)


# ------------------------------------------------------------------------------------------- installed


async def test_workers_are_told_where_the_packages_are(house: House) -> None:
    """Behind the archive and before everything installed; describe says what they are."""
    registered = await house.add(house.put_needy())

    pool = house.pools.of("m")
    [environment] = house.environments.made
    assert registered.message.endswith("registered with 1 initial workers")
    assert (pool.load.packages, pool.options.python) == (str(environment.packages), "")
    assert not pool.options.may_share_imports
    assert house.registry.describe("m")["requirements"] == {
        "status": "installed",
        "file": "needs.txt",
        "kind": "packages",
        "folder": str(environment.folder),
        "log": str(environment.log),
        "installed": ["tiny==1.0"],
        "seconds": 0.5,
        "wasInstalledBefore": False,
    }


async def test_an_environment_is_used_as_long_as_its_version_is_there(house: House) -> None:
    """Then it may be cleared away."""
    await house.add(house.put_needy())
    [environment] = house.environments.made
    assert not environment.is_released

    await house.registry.unregister("m")

    assert environment.is_released


@pytest.mark.parametrize("text", [b"tiny\n", None])
async def test_with_use_venv_workers_run_in_an_environment_of_their_own(house: House, text: bytes | None) -> None:
    """It is made for a model without requirements too, as TorchServe does."""
    await house.add(house.put_needy(text=text, config="useVenv: true\n"))

    pool = house.pools.of("m")
    [environment] = house.environments.made
    assert (pool.options.python, pool.load.packages) == (str(environment.python), "")
    assert house.registry.describe("m")["requirements"]["kind"] == "venv"


async def test_use_venv_is_for_the_runtime_python_alone(house: House) -> None:
    """With python3 packages go into a folder, and a warning says so."""
    await house.add(house.put_needy(config="useVenv: true\n", runtime="python3"))

    described = house.registry.describe("m")
    assert described["requirements"]["kind"] == "packages"
    assert any("useVenv" in warning and "python3" in warning for warning in described["warnings"])


async def test_nothing_is_installed_unless_the_operator_says_so(tmp_path: Path) -> None:
    """`install_py_dep_per_model` is off by default; a warning names what is not used."""
    house = House(tmp_path, installs_requirements=False)

    await house.add(house.put_needy(config="useVenv: true\n"))

    described = house.registry.describe("m")
    assert house.environments.asked == []
    assert described["requirements"] == {"status": "not installed", "file": "needs.txt"}
    assert described["warnings"] == [
        "needs.txt and useVenv of the archive is not used: install_py_dep_per_model is false"
    ]
    await house.registry.stop()


@pytest.mark.parametrize(
    ("members", "installed"),
    [
        ({"code/requirements.txt": "tiny\n"}, ["tiny==1.0"]),
        ({"code/requirements.txt": "# nothing yet\n"}, None),
        ({"requirements.txt": "tiny\n"}, None),
        ({"code/requirements.txt": "tiny\n", "MAR-INF/MANIFEST.json": '{"model": {"handler": "h.py"}}'}, None),
    ],
    ids=["there", "empty", "elsewhere", "with a manifest"],
)
async def test_the_settings_may_name_the_requirements_of_models_without_a_manifest(
    tmp_path: Path, members: dict[str, str], installed: list[str] | None
) -> None:
    """They get an environment of their own, whatever is said of archives, whose manifests speak for themselves."""
    house = House(
        tmp_path, installs_requirements=False, default_requirements="code/requirements.txt", default_handler="h.py"
    )
    for name, text in {"h.py": "", **members}.items():
        file = house.store / "m" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    await house.add("m", model_name="m")

    found = house.registry.describe("m").get("requirements")
    assert (found and found["installed"]) == installed
    if found:
        assert (found["kind"], found["file"]) == ("venv", "code/requirements.txt")
        assert house.pools.of("m").options.python == str(house.environments.made[0].python)
    await house.registry.stop()


async def test_requirements_that_the_settings_name_are_read_inside_the_model_alone(tmp_path: Path) -> None:
    """Whatever lies elsewhere on the machine."""
    (tmp_path / "elsewhere.txt").write_text("tiny\n")
    house = House(tmp_path, default_requirements=str(tmp_path / "elsewhere.txt"), default_handler="h.py")
    (house.store / "m").mkdir()
    (house.store / "m" / "h.py").touch()

    with pytest.raises(DependencyFailed, match="must be a path inside of the archive"):
        await house.add("m", model_name="m")

    await house.registry.stop()


async def test_who_misses_what_was_not_installed_is_told_why(tmp_path: Path) -> None:
    """The reason of the failed load names the setting; that of a model without requirements does not."""
    house = House(tmp_path, installs_requirements=False)
    house.pools.behaviours["m"] = Behaviour(load="missing")

    with pytest.raises(LoadFailed) as needy:
        await house.add(house.put_needy())
    with pytest.raises(LoadFailed) as plain:
        await house.add(house.put_needy(version="2.0", text=None))

    assert needy.value.cause == plain.value.cause == "missing_module"
    assert "install_py_dep_per_model is false" in needy.value.reason
    assert "install_py_dep_per_model" not in plain.value.reason
    await house.registry.stop()


async def test_a_handler_may_come_with_the_packages(house: House) -> None:
    """It is looked for there once they are installed."""
    house.environments.gate.clear()
    registration = asyncio.create_task(house.add(house.put_needy(handler="from_a_package")))
    await until(lambda: house.environments.asked, "the installation")
    packages = house.environments.root / "0" / "packages"
    packages.mkdir(parents=True)
    (packages / "from_a_package.py").touch()

    house.environments.gate.set()

    assert (await registration).progress == "done"


@pytest.mark.parametrize(("synchronous", "error"), [(True, LoadFailed), (False, BadArchive)])
async def test_a_handler_that_came_with_nothing_fails_the_registration(
    house: House, synchronous: bool, error: type[Exception]
) -> None:
    """As one that is nowhere without requirements."""
    with pytest.raises(error):
        await house.add(house.put_needy(handler="nowhere_at_all"), synchronous=synchronous)

    assert house.environments.made[0].is_released
    with pytest.raises(ModelNotFound):
        house.registry.describe("m")


# ------------------------------------------------------------------------------------------- failing


@pytest.mark.parametrize("synchronous", [True, False])
async def test_a_failed_installation_fails_the_registration_and_leaves_nothing(house: House, synchronous: bool) -> None:
    """Whether it waits for workers or not; the version is gone, which TorchServe's is not."""
    house.environments.fails = "No matching distribution"

    with pytest.raises(DependencyFailed) as failed:
        await house.add(house.put_needy(), synchronous=synchronous)

    assert failed.value.message == WORDS
    assert house.folders() == []
    with pytest.raises(ModelNotFound):
        house.registry.describe("m")


async def test_a_version_that_remains_says_what_befell_the_other(house: House) -> None:
    """In pip's words, in describe."""
    await house.add(house.put_needy())
    house.environments.fails = "line\nNo matching distribution"

    with pytest.raises(DependencyFailed):
        await house.add(house.put_needy(version="2.0"))

    [warning] = house.registry.describe("m")["warnings"]
    assert "version 2.0 was not registered" in warning
    assert "No matching distribution" in warning


async def test_what_is_not_allowed_is_never_given_to_pip(house: House) -> None:
    """The answer begins with TorchServe's words and says which line it is."""
    with pytest.raises(DependencyFailed) as failed:
        await house.add(house.put_needy(text=b"tiny\n--target /\n"))

    assert failed.value.message.startswith(f"{WORDS}: needs.txt, line 2: the option --target is not allowed")
    assert house.environments.asked == []


# ------------------------------------------------------------------------------------------- meanwhile


async def test_a_version_that_is_being_installed_is_not_found_and_its_name_is_taken(house: House) -> None:
    """A second registration of it is a conflict; one of another version goes on."""
    house.environments.gate.clear()
    first = asyncio.create_task(house.add(house.put_needy()))
    await until(lambda: house.environments.asked, "the installation")

    with pytest.raises(ModelNotFound):
        house.registry.describe("m")
    with pytest.raises(VersionConflict):
        await house.add(house.put_needy())
    await house.add(house.put_needy(version="2.0", text=None))

    house.environments.gate.set()
    await first
    assert [each["modelVersion"] for each in house.registry.describe_all("m")] == ["2.0", "1.0"]
    assert len(house.environments.asked) == 1


async def test_a_version_that_is_registered_is_not_installed_again(house: House) -> None:
    """The conflict is found first."""
    await house.add(house.put_needy())

    with pytest.raises(VersionConflict):
        await house.add(house.put_needy())

    assert len(house.environments.asked) == 1


@pytest.mark.parametrize("version", [None, "1.0"])
async def test_unregistering_ends_the_installation(house: House, version: str | None) -> None:
    """When it returns nothing is left; who registered is told."""
    house.environments.gate.clear()
    registration = asyncio.create_task(house.add(house.put_needy()))
    await until(lambda: house.environments.asked, "the installation")

    await house.registry.unregister("m", version)

    assert house.environments.cancelled == 1
    assert house.folders() == []
    with pytest.raises(DependencyFailed, match=WORDS):
        await registration


async def test_unregistering_a_model_leaves_the_installation_of_its_next_version_alone(house: House) -> None:
    """Without a version the one that is there is meant."""
    await house.add(house.put_needy())
    house.environments.gate.clear()
    registration = asyncio.create_task(house.add(house.put_needy(version="2.0")))
    await until(lambda: len(house.environments.asked) == 2, "the installation")

    await house.registry.unregister("m")
    house.environments.gate.set()

    assert (await registration).version == "2.0"


async def test_a_client_that_hangs_up_does_not_end_the_installation(house: House) -> None:
    """What changes something runs to its end."""
    house.environments.gate.clear()
    registration = asyncio.create_task(house.add(house.put_needy()))
    await until(lambda: house.environments.asked, "the installation")

    registration.cancel()
    await asyncio.wait([registration])
    house.environments.gate.set()

    await until(lambda: house.registry.list_models().models, "the model")


async def test_the_end_of_the_server_ends_the_installation(house: House) -> None:
    """It does not wait for pip."""
    house.environments.gate.clear()
    registration = asyncio.create_task(house.add(house.put_needy()))
    await until(lambda: house.environments.asked, "the installation")

    await asyncio.wait_for(house.registry.stop(), 10)

    assert house.environments.cancelled == 1
    with pytest.raises(Draining):
        await registration


# ------------------------------------------------------------------------------------------- at the start


async def test_at_the_start_others_do_not_wait_for_an_installation(house: House) -> None:
    """They serve meanwhile; the start has been tried when all have ended."""
    house.environments.gate.clear()
    models = (ModelToLoad(house.put_needy()), ModelToLoad(house.put("n")))
    loading = asyncio.create_task(house.registry.load_at_start(models))

    await until(lambda: house.registry.list_models().models, "the model that needs nothing")

    assert [name for name, _ in house.registry.list_models().models] == ["n"]
    assert not loading.done()
    house.environments.gate.set()
    await loading
    assert [name for name, _ in house.registry.list_models().models] == ["m", "n"]


async def test_at_the_start_versions_of_a_model_keep_their_order(house: House) -> None:
    """The first one is the default, however long its requirements take."""
    house.environments.gate.clear()
    models = (ModelToLoad(house.put_needy()), ModelToLoad(house.put_needy(version="2.0", text=None)))
    loading = asyncio.create_task(house.registry.load_at_start(models))
    await until(lambda: house.environments.asked, "the installation")

    house.environments.gate.set()
    await loading

    assert [each["modelVersion"] for each in house.registry.describe_all("m")] == ["1.0", "2.0"]
    assert house.registry.describe("m")["modelVersion"] == "1.0"


async def test_at_the_start_a_failed_installation_costs_only_its_model(house: House) -> None:
    """The server goes on with the others, and readiness says what is missing."""
    house.environments.fails = "No matching distribution"

    await house.registry.load_at_start((ModelToLoad(house.put_needy()), ModelToLoad(house.put("n"))))

    assert [name for name, _ in house.registry.list_models().models] == ["n"]
    assert any(WORDS in reason for reason in house.registry.readiness().startup_reasons)


async def test_a_dry_run_sees_that_a_version_is_being_installed(house: House) -> None:
    """It is refused as the call is, of a registration and of a swap; a version of another name is not."""
    await house.add(house.put("m", "1.0"))
    house.environments.gate.clear()
    url, other = house.put_needy(version="2.0"), house.put_needy(version="3.0")
    installing = asyncio.create_task(house.add(url))
    async with asyncio.timeout(5):
        while not house.environments.asked:
            await asyncio.sleep(0.001)

    with pytest.raises(VersionConflict):
        await house.add(url)
    with pytest.raises(VersionConflict):
        await house.registry.rehearsal.register(RegisterParameters(url))
    with pytest.raises(VersionConflict):
        await house.registry.swap(SwapParameters("m", RegisterParameters(url), dry_run=True))
    told = await house.registry.rehearsal.register(RegisterParameters(other))
    swapped = await house.registry.swap(SwapParameters("m", RegisterParameters(other), dry_run=True))

    house.environments.gate.set()
    await installing
    for notes in (told.notes, swapped.notes):
        assert "what it requires would be installed first (needs.txt); whether that can be is not tried" in notes
