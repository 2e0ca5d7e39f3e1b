"""Claims of `marserve.registry.intake.plan`: which interpreter a version gets, and which wishes are refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from marserve.environments.interpreters import Interpreters
from marserve.errors import InterpreterRefused, MarserveError
from marserve.registry.intake.registration import RegisterParameters
from marserve.settings.interpreters import AllowedInterpreter
from support.echo_archives import manifest, write_mar
from support.management_house import House as ManagementHouse
from support.other_python import make_environment

pytestmark = pytest.mark.anyio


class House(ManagementHouse):
    """A house that allows two interpreters, of which the second is unfit."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.good = make_environment(root / "good", "msgspec")
        self.bare = make_environment(root / "bare")
        allowed = [AllowedInterpreter(self.good, "good"), AllowedInterpreter(self.bare, "bare")]
        interpreters = Interpreters(allowed, folder=root / "packages")
        super().__init__(root, interpreters=interpreters, installs_requirements=True, **options)

    def put_with(self, config: str, version: str = "1.0", **model: Any) -> str:
        """An archive with this configuration in the store; its name there."""
        files = {"needs__txt": b"tiny\n"} if "requirementsFile" in model else {}
        path = self.store / f"m-{version}.mar"
        return write_mar(path, manifest("m", version, **model), config=config, **files).name

    async def refusal(self, archive: str, **parameters: Any) -> MarserveError:
        """Why a registration is refused; nothing of it is left."""
        with pytest.raises(InterpreterRefused) as error:
            await self.registry.register(RegisterParameters(archive, initial_workers=1, **parameters))
        assert self.registry.list_models(limit=None, offset=None).models == []
        return error.value


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """After the test the registry is stopped, and holds on to nothing."""
    house = House(tmp_path)
    yield house
    await house.registry.stop()
    assert house.folders() == []


@pytest.mark.parametrize("by_name", [True, False])
async def test_a_version_gets_the_interpreter_that_its_archive_names(house: House, by_name: bool) -> None:
    """By name or by path; describe shows which, and its Python's version."""
    archive = house.put_with("environment: good\n" if by_name else f"python: {house.good}\n")

    await house.registry.register(RegisterParameters(archive, initial_workers=1))

    interpreter = house.pools.of("m").options.interpreter
    assert interpreter is not None
    assert interpreter.path == str(house.good)
    shown = {"path": str(house.good), "version": interpreter.version, "name": "good"}
    assert house.registry.describe("m")["interpreter"] == shown


async def test_a_version_that_names_none_has_no_such_member(house: House) -> None:
    """It runs under the server's interpreter."""
    await house.registry.register(RegisterParameters(house.put_with("batchSize: 2\n"), initial_workers=1))

    assert house.pools.of("m").options.interpreter is None
    assert "interpreter" not in house.registry.describe("m")


async def test_the_handler_may_be_installed_in_that_interpreter(house: House) -> None:
    """So one that is unknown to the server is not refused before its worker looks for it."""
    archive = house.put_with("environment: good\n", handler="known_there_alone:handle")

    await house.registry.register(RegisterParameters(archive, initial_workers=1))

    assert house.pools.of("m").load.handler == "known_there_alone:handle"


async def test_one_that_is_not_allowed_or_not_fit_is_refused(house: House) -> None:
    """With its sentence; a registration that would not have waited hears it too."""
    assert "environment: godo, which is none of allowed_interpreters (did you mean good?)" in str(
        await house.refusal(house.put_with("environment: godo\n"))
    )
    assert f'{house.bare} -m pip install "msgspec>=0.21"' in str(
        await house.refusal(house.put_with("environment: bare\n"), synchronous=False)
    )


async def test_a_server_that_allows_none_leaves_the_word_environment_to_the_handler(tmp_path: Path) -> None:
    """An archive for TorchServe may have a key of that name: it is served, with a warning. A path is refused."""
    house = ManagementHouse(tmp_path)
    try:
        for name, line in (("own", "environment: production"), ("path", "python: /opt/x/bin/python")):
            write_mar(house.store / f"{name}.mar", manifest(name, "1.0"), config=f"{line}\n")

        await house.registry.register(RegisterParameters("own.mar", initial_workers=1))
        with pytest.raises(InterpreterRefused, match="python: /opt/x/bin/python, which is none of"):
            await house.registry.register(RegisterParameters("path.mar", initial_workers=1))

        assert house.pools.of("own").options.interpreter is None
        [warning] = house.registry.describe("own")["warnings"]
        assert "environment: production is left to the handler" in warning
        assert "allowed_interpreters=production=/path/to/bin/python" in warning
    finally:
        await house.registry.stop()


async def test_one_word_of_a_document_stands_for_both_of_the_archive(house: House) -> None:
    """A desired state moves a model to another interpreter, by whichever key."""
    archive = house.put_with("environment: bare\n")
    declared = {"python": str(house.good), "minWorkers": 1, "maxWorkers": 1}

    await house.registry.register(RegisterParameters(archive, model_name="m", declared=declared))

    interpreter = house.pools.of("m").options.interpreter
    assert interpreter is not None
    assert interpreter.path == str(house.good)


@pytest.mark.parametrize(
    ("config", "model", "what"),
    [
        ("", {"requirementsFile": "needs.txt"}, "needs.txt"),
        ("useVenv: true\n", {"requirementsFile": "needs.txt"}, "needs.txt"),
        ("useVenv: true\n", {}, "useVenv"),
    ],
)
async def test_requirements_are_not_installed_for_another_interpreter(
    house: House, config: str, model: dict[str, Any], what: str
) -> None:
    """The refusal says what to do instead; the interpreter, which is unfit, is not started for it."""
    said = str(await house.refusal(house.put_with(f"environment: bare\n{config}", **model)))

    assert f"it names the interpreter {house.bare}, and the server installs {what}" in said.replace(
        "an environment of its own (useVenv)", "useVenv"
    )
    assert f"Install what the model needs by {house.bare} -m pip, and remove {what} from the archive." in said


async def test_a_cluster_has_interpreters_of_its_own(house: House) -> None:
    """The nodes choose theirs, so both together are refused, and nothing is started."""
    said = str(await house.refusal(house.put_with("environment: bare\nlauncher: ray\n")))

    assert "launcher: ray" in said
    assert "Remove one of the two." in said
