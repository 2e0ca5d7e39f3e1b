"""Workflows over a registry whose pools have no processes: registered whole or not at all, and gone without a trace."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from marserve.archive.reading.reader import Limits
from marserve.desired_state.dry_runs import DryRuns
from marserve.desired_state.policies import Changes
from marserve.errors import (
    BadDag,
    BadName,
    Draining,
    ModelNotFound,
    NodeInUse,
    VersionConflict,
    WorkflowArchiveNotFound,
    WorkflowBusy,
    WorkflowConflict,
    WorkflowFailed,
    WorkflowNotFound,
)
from marserve.messages import Answer, Part, Request
from marserve.registry.intake.registration import RegisterParameters
from marserve.workflows.intake import WorkflowIntake
from marserve.workflows.workflows import WorkflowOptions, WorkflowParameters, Workflows
from support.echo_archives import manifest, write_mar
from support.fake_pool import Behaviour
from support.management_house import House
from support.receivers import Waiting
from support.workflow_archives import THREE_NODES, war_manifest, write_war

pytestmark = pytest.mark.anyio

SEVERAL_WORKERS = """\
models:
  min-workers: 2
  max-workers: 3
  batch-size: 4
  max-batch-delay: 20
  middle: {url: middle.mar}
dag: {prepare: [middle]}
"""


class Workplace:
    """A registry, workflows over it, and their stores."""

    def __init__(self, root: Path, **options: bool) -> None:
        self.house = House(root, **options)
        self.pools = self.house.pools
        self.store = self.house.store
        self.scratch = root / "workflows"
        self.house.put("middle")
        (self.store / "middle-1.0.mar").rename(self.store / "middle.mar")
        write_war(self.store / "w.war")
        self.workflows = Workflows(
            self.house.registry,
            WorkflowIntake(self.store, self.scratch, Limits()),
            WorkflowOptions(queue_size=0, unregister_timeout_s=5.0),
        )

    async def register(self, url: str = "w.war", name: str | None = None) -> str:
        """Register a workflow."""
        return await self.workflows.register(WorkflowParameters(url, name))

    def submit(self, workflow: str = "w") -> Waiting:
        """Send one request."""
        receiver = Waiting()
        self.workflows.submit(workflow, Request("id", [Part("body", b"x")]), receiver)
        return receiver

    def models(self) -> list[str]:
        """The names of all registered versions, functions too."""
        return sorted(pool.options.model for pool in self.pools.made if not pool.is_stopped)

    def left(self) -> list[str]:
        """Folders on disk."""
        mine = [path.name for path in self.scratch.iterdir()] if self.scratch.exists() else []
        return mine + self.house.folders()


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    """A place of its own for each test."""
    return Workplace(tmp_path)


async def test_a_workflow_is_registered_with_a_version_for_each_node(place: Workplace) -> None:
    """Models from the store, functions from the workflow's folder, each with the values of the spec."""
    assert await place.register() == "w"

    assert place.models() == ["w__finish", "w__middle", "w__prepare"]
    load = place.pools.of("w__prepare").load
    assert (load.handler, load.version) == ("nodes.py:prepare", "1.0")
    assert load.manifest is not None
    assert load.manifest["model"]["modelName"] == "w__prepare"
    assert Path(load.model_dir).parent == place.scratch
    options = place.pools.of("w__prepare").options
    assert (options.min_workers, options.max_workers, options.batch_size, options.max_batch_delay_s) == (1, 1, 1, 0.0)
    assert (await place.submit().told()) == Answer(b"w__finish 1.0", headers=[("content-type", "application/json")])


@pytest.mark.parametrize("odd", ["a\x1b[2J", "a\u202eb", "a\u2028b", ".."])
async def test_no_workflow_is_newly_registered_under_a_name_that_misleads(place: Workplace, odd: str) -> None:
    """Whether the call or the archive gives it; a node's model is named after both, so its own name is judged too."""
    write_war(place.store / "odd.war", document=war_manifest(odd))

    for url, name in (("not_there.war", odd), ("odd.war", None)):
        with pytest.raises(BadName, match="The workflow name"):
            await place.register(url, name)

    assert (place.models(), place.left()) == ([], [])


async def test_a_node_cannot_have_a_name_that_misleads(place: Workplace) -> None:
    """Its author's mistake."""
    write_war(place.store / "odd.war", 'models: {"a\\e[2J": {url: middle.mar}}\ndag: {"a\\e[2J": [finish]}\n')

    with pytest.raises(WorkflowFailed, match="The model name") as failed:
        await place.register("odd.war")

    assert failed.value.is_authors
    assert place.models() == []


async def test_the_specs_numbers_win_over_those_of_the_models_own_configuration(place: Workplace) -> None:
    """As in TorchServe, which scales the nodes after it has registered them."""
    write_war(place.store / "s.war", SEVERAL_WORKERS)

    await place.register("s.war")

    pool = place.pools.of("s__middle")
    assert pool.scaled == [(3, 3)]
    assert (pool.options.batch_size, pool.options.max_batch_delay_s) == (4, 0.02)


async def test_a_model_whose_workers_follow_the_need_has_between_the_two_numbers(place: Workplace) -> None:
    """Others have as many as there may be, as in TorchServe."""
    write_mar(place.store / "middle.mar", manifest("middle"), config="autoscale: true\n")
    write_war(place.store / "s.war", SEVERAL_WORKERS)

    await place.register("s.war")

    assert place.pools.of("s__middle").scaled == [(2, 3)]


async def test_the_list_of_models_has_the_models_of_a_workflow_and_not_its_functions(place: Workplace) -> None:
    """Functions can be described by their names all the same."""
    await place.register()

    assert place.house.registry.list_models().models == [("w__middle", "middle.mar")]
    assert place.house.registry.describe("w__finish")["modelUrl"] == "w.war"


async def test_workflows_are_listed_and_described(place: Workplace) -> None:
    """TorchServe's members, then the nodes."""
    await place.register()
    await place.register(name="v")

    page = place.workflows.list_workflows(limit=1)
    described = place.workflows.describe("w")

    assert (page.models, page.next_offset) == ([("v", "w.war")], 1)
    assert {key: described[key] for key in ("workflowName", "workflowUrl", "minWorkers", "maxBatchDelay")} == {
        "workflowName": "w",
        "workflowUrl": "w.war",
        "minWorkers": 1,
        "maxBatchDelay": 50,
    }
    assert described["workflowDag"] == "{prepare=[middle], middle=[finish]}"
    assert [(node["nodeName"], node["nodeType"], node["modelName"]) for node in described["nodes"]] == [
        ("prepare", "function", "w__prepare"),
        ("middle", "model", "w__middle"),
        ("finish", "function", "w__finish"),
    ]
    assert [(node["retryAttempts"], node["timeoutMs"]) for node in described["nodes"]] == [(1, 5000)] * 3


async def test_a_name_can_be_taken_once(place: Workplace) -> None:
    """Also while its first registration is still waiting for workers."""
    place.pools.behaviours["w__middle"] = Behaviour(load="wait")
    first = asyncio.create_task(place.register())
    while "w__middle" not in place.models():
        await asyncio.sleep(0.001)

    with pytest.raises(WorkflowConflict, match=r"^Workflow w is already registered\.$"):
        await place.register()
    place.pools.of("w__middle").finish_load()
    await first
    with pytest.raises(WorkflowConflict):
        await place.register()

    assert len(place.left()) == 2


async def test_when_one_node_fails_none_is_left(place: Workplace) -> None:
    """An archive that is not there is its author's mistake; one whose workers cannot load is not."""
    write_war(place.store / "lost.war", THREE_NODES.replace("middle.mar", "gone.mar"))
    place.pools.behaviours["w__finish"] = Behaviour(load="fail")

    with pytest.raises(WorkflowFailed) as lost:
        await place.register("lost.war")
    with pytest.raises(WorkflowFailed) as broken:
        await place.register("w.war")

    assert (lost.value.message, lost.value.is_authors) == (
        "Workflow lost has failed to register. Failures: [Workflow Node lost__middle failed to register. Details: "
        "Model not found at: gone.mar]",
        True,
    )
    assert broken.value.failures == ["Failed to start workers for model w__finish version: 1.0"]
    assert broken.value.reason == "the handler raised"
    assert not broken.value.is_authors
    assert (place.models(), place.left()) == ([], [])
    assert place.workflows.list_workflows().models == []


async def test_a_model_that_was_there_before_stays_when_a_workflow_wants_its_name(place: Workplace) -> None:
    """Only what the workflow itself registered is rolled back."""
    await place.house.registry.register(RegisterParameters("middle.mar", model_name="w__middle", initial_workers=1))

    with pytest.raises(WorkflowFailed, match="already registered for model w__middle"):
        await place.register()

    assert place.models() == ["w__middle"]
    with pytest.raises(VersionConflict):
        await place.house.registry.register(RegisterParameters("middle.mar", model_name="w__middle"))


async def test_a_bad_archive_registers_nothing(place: Workplace) -> None:
    """It is found before any node is begun."""
    write_war(place.store / "loop.war", THREE_NODES + "  finish: [middle]\n")

    with pytest.raises(BadDag):
        await place.register("loop.war")
    with pytest.raises(WorkflowArchiveNotFound):
        await place.register("gone.war")

    assert (place.pools.made, place.left()) == ([], [])


async def test_a_registration_goes_on_when_its_client_hangs_up(place: Workplace) -> None:
    """Nothing is left half done."""
    place.pools.behaviours["w__middle"] = Behaviour(load="wait")
    call = asyncio.create_task(place.register())
    while "w__middle" not in place.models():
        await asyncio.sleep(0.001)

    call.cancel()
    await asyncio.wait([call])
    place.pools.of("w__middle").finish_load()
    async with asyncio.timeout(10):
        while not place.workflows.list_workflows().models:
            await asyncio.sleep(0.001)

    assert (await place.submit().told()).body == b"w__finish 1.0"  # type: ignore[union-attr]


async def test_a_workflow_that_goes_answers_what_it_had_accepted_and_takes_its_nodes_along(place: Workplace) -> None:
    """It is not found from the first moment; its nodes live until its last request is answered."""
    place.pools.behaviours["w__middle"] = Behaviour(holds=True)
    await place.register()
    receiver = place.submit()

    going = asyncio.create_task(place.workflows.unregister("w"))
    await asyncio.sleep(0.01)
    with pytest.raises(WorkflowNotFound, match=r"^Workflow not found: w$"):
        place.submit()
    with pytest.raises(WorkflowConflict):
        await place.register()
    assert place.models() == ["w__finish", "w__middle", "w__prepare"]
    place.pools.of("w__middle").held[0].answer(Answer(b"held"))
    await going

    assert receiver.body == b"w__finish 1.0"
    assert (place.models(), place.left()) == ([], [])
    with pytest.raises(WorkflowNotFound):
        await place.workflows.unregister("w")
    assert await place.register() == "w"


async def test_a_node_that_somebody_unregistered_does_not_keep_the_workflow_from_going(place: Workplace) -> None:
    """Its requests fail meanwhile, with the node's name."""
    await place.register()
    await place.house.registry.unregister("w__middle")

    end = await place.submit().told()
    await place.workflows.unregister("w")

    assert str(end) == "Error executing middle"
    assert (place.models(), place.left()) == ([], [])


async def test_a_request_for_a_node_is_taken_while_the_server_drains_and_a_new_one_is_not(place: Workplace) -> None:
    """What was accepted goes through all its nodes."""
    place.pools.behaviours["w__middle"] = Behaviour(holds=True)
    await place.register()
    receiver = place.submit()

    place.house.registry.refuse_new()
    place.workflows.refuse_new()
    with pytest.raises(Draining):
        place.submit()
    with pytest.raises(Draining):
        await place.register("w.war", "other")
    assert await place.workflows.drain(0.01) == 1
    place.pools.of("w__middle").held[0].answer(Answer(b"held"))

    assert await place.workflows.drain(5.0) == 0
    assert receiver.body == b"w__finish 1.0"


async def test_the_end_of_the_server_gives_up_what_still_runs_and_leaves_no_folder(place: Workplace) -> None:
    """Workflows first, then the registry."""
    place.pools.behaviours["w__middle"] = Behaviour(holds=True)
    await place.register()
    receiver = place.submit()

    await place.workflows.stop()
    await place.house.registry.stop()

    assert isinstance(receiver.end, Draining)
    assert (place.models(), place.left()) == ([], [])
    assert not place.scratch.exists()


async def test_a_workflow_has_so_many_requests_at_a_time_and_no_more(place: Workplace) -> None:
    """As its queues and workers can hold: here there are no queues, and three workers."""
    place.pools.behaviours["w__middle"] = Behaviour(holds=True)
    await place.register()
    for _ in range(3):
        place.submit()

    with pytest.raises(WorkflowBusy):
        place.submit()

    assert place.workflows.describe("w")["runningRequests"] == 3
    await place.workflows.stop()
    await place.house.registry.stop()


async def test_a_node_is_not_unregistered_beside_its_workflow(place: Workplace) -> None:
    """Unless it is forced; TorchServe lets it go, and the workflow's own end takes it along."""
    await place.workflows.register(WorkflowParameters("w.war"))
    registry = place.house.registry
    changes = Changes(registry)

    for call in (changes.unregister("w__middle"), changes.unregister("w__middle", "1.0")):
        with pytest.raises(NodeInUse, match=r"Model w__middle is a node of workflow w, .* DELETE /workflows/w "):
            await call
    with pytest.raises(NodeInUse):
        DryRuns(registry, changes).unregister("w__middle")
    assert DryRuns(registry, changes).unregister("w__middle", force=True)
    with pytest.raises(ModelNotFound):
        await changes.unregister("w__nobody")
    await place.workflows.unregister("w")
    with pytest.raises(ModelNotFound):
        registry.describe("w__middle")


async def test_as_recorded_a_node_can_be_unregistered(tmp_path: Path) -> None:
    """As in TorchServe."""
    place = Workplace(tmp_path, as_torchserve=True)
    await place.workflows.register(WorkflowParameters("w.war"))

    await Changes(place.house.registry).unregister("w__middle")

    with pytest.raises(ModelNotFound):
        place.house.registry.describe("w__middle")
