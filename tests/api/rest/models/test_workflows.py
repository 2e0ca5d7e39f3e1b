"""The management API of workflows over HTTP, and the inference route of one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from marserve.answers.management import WorkflowDescription, WorkflowList
from marserve.api.http.inference import InferenceSurface, Route, read_route
from marserve.api.parameters import WORKFLOW_PARAMETERS, JsonParameters, QueryParameters
from marserve.api.rest.application import build_app
from marserve.api.rest.models.workflows import read_workflow_registration, workflow_router
from marserve.archive.reading.reader import Limits
from marserve.errors import BadInput, WorkflowNotFound
from marserve.model_options import say
from marserve.workflows.intake import WorkflowIntake
from marserve.workflows.workflows import WorkflowOptions, WorkflowParameters, Workflows
from support.documents import document_of
from support.fake_data_plane import FakeDataPlane
from support.fake_pool import Behaviour
from support.management_house import House, client_of
from support.receivers import Told
from support.workflow_archives import THREE_NODES, write_war


class WorkflowPlane:
    """A plane of workflows over a data plane."""

    def __init__(self, plane: FakeDataPlane) -> None:
        self._plane = plane

    def submit(self, workflow: str, request: object, receiver: object) -> object:
        """Take a request."""
        return self._plane.submit(workflow, None, request, receiver)  # type: ignore[arg-type]


@pytest.fixture
def house(tmp_path: Path) -> House:
    """A registry, and a store with a workflow of three nodes."""
    house = House(tmp_path)
    house.put("middle")
    (house.store / "middle-1.0.mar").rename(house.store / "middle.mar")
    write_war(house.store / "w.war")
    return house


@pytest.fixture
def workflows(house: House, tmp_path: Path) -> Workflows:
    """The workflows over it."""
    return Workflows(house.registry, WorkflowIntake(house.store, tmp_path / "workflows", Limits()), WorkflowOptions())


@pytest.fixture
async def client(workflows: Workflows, anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the management listener."""
    async with client_of(build_app([workflow_router(workflows, enable_model_api=True)], title="t")) as client:
        yield client


@pytest.mark.anyio
async def test_a_workflow_lives_from_registration_to_removal(client: httpx.AsyncClient) -> None:
    """Sentences and statuses are TorchServe's; the answers have the shapes of the API description."""
    assert (await client.get("/workflows")).json() == {"workflows": []}

    registered = await client.post("/workflows", params={"url": "w.war"})
    listed, described = await client.get("/workflows"), await client.get("/workflows/w")
    gone = await client.delete("/workflows/w")

    assert registered.status_code == 200
    assert registered.json() == {"status": "Workflow w has been registered and scaled successfully."}
    assert listed.json() == {"workflows": [{"workflowName": "w", "workflowUrl": "w.war"}]}
    document_of(WorkflowList, listed.json())
    assert len(described.json()) == 1
    document_of(WorkflowDescription, described.json()[0])
    assert gone.json() == {"status": 'Workflow "w" unregistered'}
    for call in (client.get, client.delete):
        answer = await call("/workflows/w")
        assert answer.status_code == 404
        assert answer.json() == {"code": 404, "type": "WorkflowNotFoundException", "message": "Workflow not found: w"}


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["dry_run", "dryRun"])
async def test_what_cannot_be_tried_is_not_done_instead(client: httpx.AsyncClient, name: str) -> None:
    """Workflows have no dry runs: a registration, also as JSON, and an end are refused."""
    body = {"url": "w.war", name: True}
    refused = [
        await client.post("/workflows", params={"url": "w.war", name: "true"}),
        await client.post("/workflows", json=body),
        await client.post("/workflows", json={"url": "w.war"}, params={name: "true"}),
    ]
    assert (await client.get("/workflows")).json() == {"workflows": []}
    await client.post("/workflows", params={"url": "w.war"})
    refused.append(await client.delete("/workflows/w", params={name: "true"}))

    assert (await client.get("/workflows/w")).status_code == 200
    for answer in refused:
        assert (answer.status_code, "cannot be tried" in answer.json()["message"]) == (400, True)


def test_workflows_do_not_claim_dry_runs(workflows: Workflows) -> None:
    """Their answers are described as what was done."""
    paths = build_app([workflow_router(workflows, enable_model_api=True)], title="t").openapi()["paths"]

    for call in (paths["/workflows"]["post"], paths["/workflows/{workflow_name}"]["delete"]):
        schema = call["responses"]["200"]["content"]["application/json"]["schema"]
        assert schema["$ref"].endswith("/StatusMessage")


@pytest.mark.anyio
async def test_pages_and_names_are_as_for_models(client: httpx.AsyncClient) -> None:
    """A name in JSON, a page of one, and where the next begins."""
    for name in ("b", "a"):
        answer = await client.post("/workflows", json={"url": "w.war", "workflow_name": name})
        assert answer.status_code == 200, answer.text

    page = (await client.get("/workflows", params={"limit": 1})).json()
    rest = (await client.get("/workflows", params={"limit": 1, "next_page_token": page["nextPageToken"]})).json()

    assert (page["nextPageToken"], page["workflows"][0]["workflowName"]) == ("1", "a")
    assert rest == {"workflows": [{"workflowName": "b", "workflowUrl": "w.war"}]}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("POST", "/workflows", 400, "BadRequestException"),
        ("POST", "/workflows?url=gone.war", 404, "WorkflowNotFoundException"),
        ("POST", "/workflows?url=w.war&response_timeout=0", 400, "BadRequestException"),
        ("POST", "/workflows?url=loop.war", 400, "InvalidDAGException"),
        ("POST", "/workflows?url=yaml.war", 400, "InvalidWorkflowException"),
        ("POST", "/workflows?url=lost.war", 400, "WorkflowException"),
        ("POST", "/workflows?url=broken.war", 500, "WorkflowException"),
        ("PUT", "/workflows/w", 405, "MethodNotAllowedException"),
        ("DELETE", "/workflows", 405, "MethodNotAllowedException"),
    ],
)
async def test_what_cannot_be_done_is_said_in_torchserves_words(
    house: House, client: httpx.AsyncClient, method: str, path: str, status: int, kind: str
) -> None:
    """What the archive's author wrote is 400; what the server could not do is 500."""
    write_war(house.store / "loop.war", THREE_NODES + "  finish: [middle]\n")
    write_war(house.store / "yaml.war", "models: [\n")
    write_war(house.store / "lost.war", THREE_NODES.replace("middle.mar", "gone.mar"))
    write_war(house.store / "broken.war")
    house.pools.behaviours["broken__finish"] = Behaviour(load="fail")

    answer = await client.request(method, path)

    assert (answer.status_code, answer.json()["type"]) == (status, kind)
    assert answer.json()["code"] == status


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (THREE_NODES.replace("middle.mar", "gone.mar"), ("gone.mar",)),
        (THREE_NODES.replace("models:", "models:\n  min-workers: many", 1), ("workflow.yaml", "min-workers", "many")),
        ("models: {m: {url: m.mar}}\n", ("workflow.yaml", "dag")),
    ],
    ids=["an archive", "a value", "a graph"],
)
async def test_what_its_author_has_to_mend_is_named(
    house: House, client: httpx.AsyncClient, spec: str, words: tuple[str, ...]
) -> None:
    """The file with the key, and the archive that is missing, where TorchServe names a class of Java's."""
    write_war(house.store / "odd.war", spec)

    answer = await client.post("/workflows?url=odd.war")

    assert answer.status_code == 400
    assert [word for word in words if word not in answer.json()["message"]] == []
    assert "Exception" not in answer.json()["message"]


@pytest.mark.anyio
async def test_a_workflow_of_functions_alone_is_registered(house: House, client: httpx.AsyncClient) -> None:
    """Its spec has no section `models`."""
    write_war(house.store / "functions.war", "dag:\n  prepare: [finish]\n")

    assert (await client.post("/workflows?url=functions.war")).status_code == 200

    (described,) = (await client.get("/workflows/functions")).json()
    assert {node["nodeType"] for node in described["nodes"]} == {"function"}


@pytest.mark.anyio
async def test_why_a_spec_cannot_be_used_is_told_beside_torchserves_words(
    house: House, client: httpx.AsyncClient
) -> None:
    """In the header that carries the reason of a failed load too."""
    write_war(house.store / "yaml.war", "models:\n  - [\n")

    answer = await client.post("/workflows?url=yaml.war")

    assert answer.headers["x-marserve-reason"] == "workflow.yaml is no YAML (line 3)"


@pytest.mark.anyio
async def test_why_a_node_could_not_be_loaded_is_told_beside_torchserves_words(
    house: House, client: httpx.AsyncClient
) -> None:
    """The message is TorchServe's; the reason stands where that of a model's failed load does."""
    house.pools.behaviours["w__finish"] = Behaviour(load="fail")

    answer = await client.post("/workflows?url=w.war")

    assert answer.json()["message"] == (
        "Workflow w has failed to register. Failures: [Failed to start workers for model w__finish version: 1.0]"
    )
    assert answer.headers["x-marserve-reason"] == "the handler raised"


@pytest.mark.anyio
async def test_without_the_model_api_workflows_can_be_looked_at_only(workflows: Workflows) -> None:
    """A workflow's archive runs code as a model's does."""
    async with client_of(build_app([workflow_router(workflows, enable_model_api=False)], title="t")) as client:
        assert (await client.post("/workflows?url=w.war")).status_code == 405
        assert (await client.delete("/workflows/w")).status_code == 405
        assert (await client.get("/workflows")).status_code == 200


def test_a_registration_is_read_from_words_and_from_json() -> None:
    """Seconds, -1 for none of the client's own, and what is not known among the warnings."""
    query = QueryParameters(
        {"url": "w.war", "response_timeout": "7", "startup_timeout": "-1", "s3_sse_kms": "false", "batch_size": "3"},
        WORKFLOW_PARAMETERS,
    )
    body = JsonParameters(b'{"url": "w.war", "workflow_name": "v", "startup_timeout": 9}', WORKFLOW_PARAMETERS)

    read = read_workflow_registration(query)

    assert (read.url, read.options) == ("w.war", say(response_timeout_s=7))
    assert len(read.warnings) == 1
    assert read_workflow_registration(body) == WorkflowParameters("w.war", "v", say(startup_timeout_s=9))
    with pytest.raises(BadInput, match="Parameter url is required"):
        read_workflow_registration(QueryParameters({}, WORKFLOW_PARAMETERS))
    with pytest.raises(BadInput, match="s3_sse_kms=true"):
        read_workflow_registration(QueryParameters({"url": "w.war", "s3_sse_kms": "true"}, WORKFLOW_PARAMETERS))


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (b"/wfpredict/w", "w"),
        (b"/WfPredict/w/", "w"),
        (b"/wfpredict/a%2Fb?x=1", "a/b"),
        (b"/wfpredict/predict", "predict"),
        (b"/wfpredict", None),
        (b"/wfpredict/w/more", "w"),
        (b"/wfpredict//more", None),
    ],
)
def test_the_route_of_a_workflow_is_read_from_its_target(target: bytes, name: str | None) -> None:
    """The word in any case, then the name; the query is no input."""
    assert read_route(target) == (None if name is None else Route(name, None, [], [], is_workflow=True))


def test_a_request_for_a_workflow_goes_to_the_workflows_with_its_parts_deadline_and_priority() -> None:
    """Without the headers that predictions add."""
    models, plane = FakeDataPlane(), FakeDataPlane()
    surface = InferenceSurface(models, WorkflowPlane(plane))
    route = surface.match(b"/wfpredict/w?ignored=1")
    assert route is not None

    surface.predict(route, "id", [(b"A", b"b")], "text/plain", b"x", Told(), 5.0, 3)

    assert models.submitted == []
    given = plane.submitted[0]
    assert (given.model, given.body, given.request.headers) == ("w", b"x", [(b"A", b"b")])
    assert (given.request.deadline, given.request.priority, given.request.server_headers) == (5.0, 3, [])


def test_a_listener_without_workflows_finds_none() -> None:
    """In the words of the others."""
    surface = InferenceSurface(FakeDataPlane())
    route = surface.match(b"/wfpredict/w")
    assert route is not None

    with pytest.raises(WorkflowNotFound, match="Workflow not found: w"):
        surface.predict(route, "id", [], None, b"", Told())
