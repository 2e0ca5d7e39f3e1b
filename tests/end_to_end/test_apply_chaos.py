"""Random changes of many models under constant load: nobody who was there before and after notices anything.

Applies add, remove, scale and replace versions, name archives that are broken, cannot load or load slowly, and the
server is killed in the middle. After each the server has what the document says, or what was in force before.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from marserve.desired_state.document import DesiredState, read
from support.processes import left_of
from support.server import Server, make_archive, poll

pytestmark = pytest.mark.system

HANDLER = """
import time

class Handler:
    def initialize(self, context):
        time.sleep({slow})
        {raises}
        self.answer = context.manifest["model"]["modelVersion"].encode()

    def handle(self, data, context):
        return [self.answer] * len(data)
"""
NAMES = ("a", "b", "c", "d")
VERSIONS = ("1", "2", "3")
CLIENTS = 4


class World(Server):
    """A server whose document is changed at random."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(
            folder,
            entry="marserve",
            arguments=["--desired-state", "models.yaml"],
            settings={
                "log_location": str(folder / "logs"),
                "desired_state_interval": "0.2",
                "unregister_model_timeout": "20",
            },
        )
        self.random = random.Random(seed)
        self.document = folder / "models.yaml"
        for name in NAMES:
            for version in VERSIONS:
                for kind, slow, raises in (("", 0, "pass"), ("-b", 0, "pass"), ("-slow", 0.3, "pass")):
                    path = self.store / f"{name}-{version}{kind}.mar"
                    make_archive(path, HANDLER.format(slow=slow, raises=raises), name=name, version=version)
                path = self.store / f"{name}-{version}-fails.mar"
                make_archive(path, HANDLER.format(slow=0, raises="raise ValueError"), name=name, version=version)
                (self.store / f"{name}-{version}-cut.mar").write_bytes(path.read_bytes()[:-40])
        self.state = self.draw(is_right=True)
        self.write(self.state)

    def draw(self, *, is_right: bool) -> dict[str, Any]:
        """A document. One that is not right names an archive that cannot be had, or cannot load."""
        models: dict[str, Any] = {}
        names = self.random.sample(NAMES, self.random.randint(1, 3))
        for name in names:
            versions = self.random.sample(VERSIONS, self.random.randint(1, 2))
            told: dict[str, Any] = {"versions": {}, "default": versions[0]}
            for version in versions:
                kind = self.random.choice(["", "", "", "-b", "-slow"])
                bounds = self.random.randint(1, 2)
                told["versions"][version] = {"url": f"{name}-{version}{kind}.mar", "workers": bounds}
                if self.random.random() < 0.3:
                    told["versions"][version]["batchSize"] = self.random.choice([1, 4])
            if len(versions) == 2 and self.random.random() < 0.4:
                told["traffic"] = {"weights": {version: self.random.randint(1, 9) for version in versions}}
                told["labels"] = {"stable": versions[0]}
            models[name] = told
        if not is_right:
            name = self.random.choice(names)
            version = self.random.choice(list(models[name]["versions"]))
            kind = self.random.choice(["-fails", "-cut", "-none"])
            models[name]["versions"][version]["url"] = f"{name}-{version}{kind}.mar"
        return {"models": models}

    def write(self, state: dict[str, Any]) -> None:
        """Put the document in its place."""
        self.document.write_text(yaml.safe_dump(state))

    def wait_until_ready(self) -> None:
        """Return once the models of the start have loaded."""
        for _ in poll(60, "the server is ready"):
            try:
                if self.client.get(f"{self.inference}/readyz").status_code == 200:
                    return
            except httpx.TransportError:
                continue

    def kill(self) -> None:
        """End it as a fault would, and wait until its workers are gone too."""
        assert self.process is not None
        family = self.family()
        self.process.kill()
        self.process.wait()
        self.process = None
        assert not left_of(family, 20)

    def before(self) -> DesiredState:
        """What undoing would go back to; nothing where there is nothing."""
        entries = self.client.get(f"{self.management}/desired-state/history").json()["history"]
        target = next(entry["undoGoesTo"] for entry in entries if entry["isCurrent"])
        if target is None:
            return DesiredState()
        entry = self.client.get(f"{self.management}/desired-state/history/{target}").json()
        return read(entry["document"].encode())

    def check(self, wanted: DesiredState) -> None:
        """The server has exactly this: models, versions, defaults, workers, weights."""
        listed = {each["modelName"] for each in self.client.get(f"{self.management}/models").json()["models"]}
        assert listed == set(wanted.models)
        for name, model in wanted.models.items():
            described = self.client.get(f"{self.management}/models/{name}/all").json()
            assert {each["modelVersion"] for each in described} == set(model.versions)
            for each in described:
                version = model.versions[each["modelVersion"]]
                assert each["modelUrl"] == version.url
                assert (each["minWorkers"], each["maxWorkers"]) == version.workers
                assert each["batchSize"] == version.config.get("batchSize", 1)
                assert each["isDefault"] == (each["modelVersion"] == model.default)
                assert each["state"] == "ready"
            traffic = self.client.get(f"{self.management}/models/{name}/traffic").json()
            assert traffic.get("isDefault", False) == (model.traffic is None)
            if model.traffic is not None:
                assert traffic["weights"] == model.traffic["weights"]


@dataclass
class Load:
    """Requests without end to models that are there before and after each change; every answer is judged."""

    world: World
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    models: tuple[str, ...] = ()
    is_over: bool = False

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._asking: Counter[int] = Counter()
        self._turn = 0
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def ask_for(self, models: set[str]) -> None:
        """Ask for these models from now on; returns when no request for others is under way."""
        with self._lock:
            self.models = tuple(sorted(models))
            before, self._turn = self._turn, self._turn + 1
            ended = self._idle.wait_for(lambda: not any(self._asking[turn] for turn in range(before + 1)), 30)
            assert ended

    def end(self) -> None:
        """Ask no more."""
        self.is_over = True
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()

    def _run(self, number: int) -> None:
        chance = random.Random(number)
        with httpx.Client(timeout=30) as client:
            while not self.is_over:
                with self._lock:
                    models, turn = self.models, self._turn
                    self._asking[turn] += bool(models)
                if not models:
                    time.sleep(0.002)  # nobody to ask; the server is being killed
                    continue
                try:
                    self._ask(client, chance.choice(models))
                finally:
                    with self._lock:
                        self._asking[turn] -= 1
                        self._idle.notify_all()

    def _ask(self, client: httpx.Client, model: str) -> None:
        try:
            answer = client.post(f"{self.world.inference}/predictions/{model}", content=b"x")
        except httpx.TransportError as error:
            with self._lock:
                self.wrong.append(f"{model}: {error!r}")
            return
        with self._lock:
            self.statuses[answer.status_code] += 1
            if answer.status_code != 200 or answer.text not in VERSIONS:
                self.wrong.append(f"{model}: {answer.status_code} {answer.text[:200]}")


def run_chaos(folder: Path, applies: int, seed: int) -> Counter[str]:
    """So many applies; what became of them."""
    world = World(folder, seed)
    ends: Counter[str] = Counter()
    with world:
        world.wait_until_ready()
        current = read(world.document.read_bytes())
        world.check(current)
        load = Load(world)
        try:
            for number in range(applies):
                chance = world.random.random()
                state = world.draw(is_right=chance < 0.75)
                wanted = read(yaml.safe_dump(state).encode())
                undoes = chance > 0.95 and number % 20 != 13
                after = world.before() if undoes else wanted
                load.ask_for(set(current.models) & set(after.models))
                if number % 20 == 13:
                    current = kill_in_the_middle(world, load, state, current, wanted)
                    ends["killed"] += 1
                    continue
                if undoes:
                    answer = world.client.post(f"{world.management}/desired-state/undo")
                    assert answer.status_code in (200, 400, 409, 500), answer.text
                else:
                    answer = world.client.put(
                        f"{world.management}/desired-state", content=yaml.safe_dump(state), timeout=60
                    )
                    assert answer.status_code == 200 or not chance < 0.75, answer.text
                ends[str(answer.status_code)] += 1
                current = read(world.document.read_bytes())
                if answer.status_code == 200:
                    assert current == after
                assert world.client.get(f"{world.management}/desired-state").json()["digest"] == current.digest
                world.check(current)
                load.ask_for(set(current.models))
        finally:
            load.end()
        assert load.wrong == [], f"seed {seed}: {load.wrong[:10]}"
        assert load.statuses[200] > applies
        assert not list(folder.glob(".*.part"))
    return ends


def kill_in_the_middle(
    world: World, load: Load, state: dict[str, Any], current: DesiredState, wanted: DesiredState
) -> DesiredState:
    """Kill the server while it applies; it comes back with exactly the document, which is one of the two."""
    load.ask_for(set())  # who is killed cannot answer
    applying = threading.Thread(target=apply_in_vain, args=(world, state))
    applying.start()
    time.sleep(world.random.random() * 0.4)
    world.kill()
    applying.join(30)
    found = read(world.document.read_bytes())
    assert found in (current, wanted)
    world.start()
    world.wait_until_ready()
    reached = world.client.get(f"{world.management}/desired-state").json()["digest"]
    if reached == current.digest and found == wanted:
        # The document was declared, and its archives are broken: what was in force before is.
        found = current
        world.write({"models": current.document()["models"]})
    assert reached == found.digest
    world.check(found)
    load.ask_for(set(found.models))
    return found


def apply_in_vain(world: World, state: dict[str, Any]) -> None:
    """Apply, whatever comes of it."""
    try:
        with httpx.Client(timeout=30) as client:
            client.put(f"{world.management}/desired-state", content=yaml.safe_dump(state))
    except httpx.TransportError:
        return


@pytest.mark.timeout(300)
def test_nobody_notices_changes_of_many_models(tmp_path: Path) -> None:
    """Twenty applies, one kill: every request to a model that is there before and after is answered with 200."""
    ends = run_chaos(tmp_path, 20, seed=20261122)

    assert ends["killed"] == 1
    assert ends["200"] >= 7
    assert ends["400"] + ends["500"] >= 1


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2])
def test_nobody_notices_five_hundred_changes(tmp_path: Path, seed: int) -> None:
    """As above, five hundred applies and twenty-five kills."""
    ends = run_chaos(tmp_path, 500, seed=seed)

    assert ends["killed"] == 25
    assert ends["200"] >= 250
