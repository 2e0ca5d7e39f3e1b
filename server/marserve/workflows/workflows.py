"""Every registered workflow: its nodes as models of the registry, its engine, the calls that change it (contract 4.3).

A node is a version of its own in the registry, named `{workflow}__{node}`: models from their archives, functions from
the workflow's own folder. Nodes are registered and unregistered with the workflow, all or none. It knows no HTTP: it
takes and returns plain data, and raises typed errors.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from marserve.archive.contents.manifest import Manifest
from marserve.archive.contents.model_config import ModelConfig
from marserve.errors import (
    BadArchive,
    ClientError,
    Draining,
    LoadFailed,
    MarserveError,
    ModelNotFound,
    VersionNotFound,
    WorkflowConflict,
    WorkflowFailed,
    WorkflowNotFound,
)
from marserve.messages import Receiver, Request
from marserve.model_options import NOTHING, Said, say
from marserve.names import check_new_name
from marserve.registry.catalogue.describe import page_of
from marserve.registry.catalogue.plan import Unpacked
from marserve.registry.intake.registration import ModelPage, Registered, RegisterParameters
from marserve.registry.models import Registry
from marserve.store.addresses.fetch_guard import hide_query
from marserve.workflows.engine import Engine, Execution, RunnableNode
from marserve.workflows.intake import UnpackedWorkflow, WorkflowIntake
from marserve.workflows.spec import Node

log = logging.getLogger("marserve.workflows")

FUNCTION_VERSION = "1.0"
STOP_LIMIT_S = 60.0
# Each of them has a thread, for as long as a download takes.
PARALLEL_INTAKES = 4

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class WorkflowOptions:
    """The server's settings that concern workflows. `queue_size` is that of models which set none of their own."""

    queue_size: int = 100
    max_answer_bytes: int = 6_553_500
    unregister_timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class WorkflowParameters:
    """What a registration may say; None is not given. `options` are for its nodes, `warnings` as for a model's."""

    url: str
    workflow_name: str | None = None
    options: Said = NOTHING
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Workflow:
    """One registered workflow."""

    url: str
    unpacked: UnpackedWorkflow
    engine: Engine
    warnings: tuple[str, ...]


class Workflows:
    """All workflows of a server. Every method is called on the event loop.

    A change runs to its end even when the caller is cancelled, as in the registry.
    """

    def __init__(self, registry: Registry, intake: WorkflowIntake, options: WorkflowOptions) -> None:
        self._registry = registry
        self._intake = intake
        self._options = options
        self._workflows: dict[str, _Workflow] = {}
        self._coming: set[str] = set()
        self._engines: set[Engine] = set()  # those that end, too
        self._changes: set[asyncio.Task[Any]] = set()
        self._intakes = asyncio.Semaphore(PARALLEL_INTAKES)
        self._is_draining = False

    # ------------------------------------------------------------------------------------------- requests

    def submit(self, workflow: str, request: Request, receiver: Receiver) -> Execution:
        """Begin a request; its answer comes to `receiver`. Raises Draining, WorkflowNotFound, WorkflowBusy."""
        if self._is_draining:
            raise Draining
        return self._find(workflow).engine.submit(request, receiver)

    # ------------------------------------------------------------------------------------------- register

    async def register(self, parameters: WorkflowParameters) -> str:
        """Take an archive in, register its nodes and wait until they are loaded. Returns the workflow's name.

        Raises BadName, WorkflowArchiveNotFound, BadWorkflow, BadDag, WorkflowConflict, Draining, and WorkflowFailed
        when a node could not be registered. After any error nothing of the registration is left.
        """
        return await self._carry_through(self._register(parameters))

    async def _register(self, parameters: WorkflowParameters) -> str:
        if self._is_draining:
            raise Draining
        if parameters.workflow_name:
            check_new_name("workflow", parameters.workflow_name)
        async with self._intakes:
            if self._is_draining:
                raise Draining
            unpacked = await asyncio.to_thread(self._intake.take_in, parameters.url)
        try:
            name = parameters.workflow_name or unpacked.manifest.workflow_name
            check_new_name("workflow", name)
            if name in self._workflows or name in self._coming:
                raise WorkflowConflict(name)
            self._coming.add(name)
            try:
                self._workflows[name] = await self._build(name, parameters, unpacked)
            finally:
                self._coming.discard(name)
        except BaseException:
            await asyncio.to_thread(unpacked.discard)
            raise
        for warning in self._workflows[name].warnings:
            log.warning("Workflow %s: %s", name, warning)
        log.info("Workflow %s is registered: %s", name, unpacked.spec.dag)
        return name

    async def _build(self, name: str, parameters: WorkflowParameters, unpacked: UnpackedWorkflow) -> _Workflow:
        """Register every node, or none, and make the engine."""
        nodes = unpacked.spec.nodes
        ends = await asyncio.gather(
            *(self._register_node(name, node, parameters, unpacked) for node in nodes.values()), return_exceptions=True
        )
        registered = {node: end for node, end in zip(nodes, ends, strict=True) if isinstance(end, Registered)}
        failed = {node: end for node, end in zip(nodes, ends, strict=True) if isinstance(end, BaseException)}
        if failed or self._is_draining:
            await self._unregister_nodes(registered.values())
            for error in failed.values():
                if not isinstance(error, MarserveError):
                    raise error
            if self._is_draining:
                raise Draining
            failures = [_sentence(_model_of(name, node), error) for node, error in failed.items()]
            reasons = [error.reason for error in failed.values() if isinstance(error, LoadFailed) and error.reason]
            raise WorkflowFailed(
                name,
                failures,
                is_authors=all(isinstance(error, ClientError | BadArchive) for error in failed.values()),
                reason="; ".join(reasons),
            )
        runnable = {
            node: RunnableNode(
                registered[node].model,
                registered[node].version,
                each.options.retry_attempts,
                each.options.timeout_s,
            )
            for node, each in nodes.items()
        }
        engine = Engine(
            name,
            unpacked.spec.dag,
            runnable,
            self._registry.data_plane,
            # The capacity of its queues and workers: the requests that could wait or run, each at another node.
            most_running=sum(
                self._options.queue_size + node.options.max_workers * node.options.batch_size for node in nodes.values()
            ),
            max_answer_bytes=self._options.max_answer_bytes,
        )
        self._engines.add(engine)
        return _Workflow(parameters.url, unpacked, engine, (*parameters.warnings, *unpacked.warnings))

    async def _register_node(
        self, workflow: str, node: Node, parameters: WorkflowParameters, unpacked: UnpackedWorkflow
    ) -> Registered:
        """Register one node and wait for its workers; after any error it is not registered."""
        options = node.options
        asked = RegisterParameters(
            url=node.url or parameters.url,
            model_name=_model_of(workflow, node.name),
            options=Said(
                parameters.options, say(batch_size=options.batch_size, max_batch_delay_s=options.max_batch_delay_s)
            ),
            initial_workers=options.max_workers,
            workflow=workflow,
            is_function=node.is_function,
        )
        if node.is_function:
            return await self._registry.register_unpacked(asked, _as_model(asked.model_name, node, unpacked))
        registered = await self._registry.register(asked)
        try:
            # The spec's numbers win over those of the model's own configuration. As in TorchServe there are as many
            # workers as there may be, unless their number follows the need.
            least, most = min(options.min_workers, options.max_workers), options.max_workers
            await self._registry.scale(
                registered.model,
                registered.version,
                min_workers=least if self._registry.is_autoscaled(registered.model, registered.version) else most,
                max_workers=most,
                synchronous=True,
            )
        except BaseException:
            await self._unregister_nodes([registered])
            raise
        return registered

    # ------------------------------------------------------------------------------------------- list, describe

    def list_workflows(self, limit: int | None = None, offset: int | None = None) -> ModelPage:
        """One page of the workflows in order of their names."""
        names = [(name, hide_query(workflow.url)) for name, workflow in self._workflows.items()]
        return ModelPage(*page_of(names, limit=limit, offset=offset))

    def describe(self, workflow: str) -> dict[str, Any]:
        """A workflow's description: TorchServe's members, then marserve's. Raises WorkflowNotFound."""
        found = self._find(workflow)
        spec, engine = found.unpacked.spec, found.engine
        described: dict[str, Any] = {
            "workflowName": workflow,
            "workflowUrl": hide_query(found.url),
            "minWorkers": spec.defaults.min_workers,
            "maxWorkers": spec.defaults.max_workers,
            "batchSize": spec.defaults.batch_size,
            "maxBatchDelay": round(spec.defaults.max_batch_delay_s * 1000),
            "workflowDag": str(spec.dag),
            "nodes": [
                {
                    "nodeName": node.name,
                    "nodeType": "function" if node.is_function else "model",
                    "modelName": engine.nodes[node.name].model,
                    "modelVersion": engine.nodes[node.name].version,
                    "retryAttempts": node.options.retry_attempts,
                    "timeoutMs": round(node.options.timeout_s * 1000),
                }
                for node in spec.nodes.values()
            ],
            "runningRequests": engine.running,
        }
        if found.warnings:
            described["warnings"] = list(found.warnings)
        return described

    # ------------------------------------------------------------------------------------------- unregister

    async def unregister(self, workflow: str) -> None:
        """Take a workflow off the list, answer what it had accepted, unregister its nodes, delete its folder.

        Raises WorkflowNotFound, and what unregistering a node raises when all were tried.
        """
        found = self._find(workflow)
        del self._workflows[workflow]
        # Until its nodes are gone no registration may take their names.
        self._coming.add(workflow)
        await self._carry_through(self._retire(workflow, found))

    async def _retire(self, name: str, workflow: _Workflow) -> None:
        engine = workflow.engine
        try:
            left = await engine.wait_until_idle(self._options.unregister_timeout_s)
            if left:
                log.warning("Workflow %s: %d requests given up", name, left)
                engine.give_up()
            await self._unregister_nodes(engine.nodes.values())
        finally:
            self._engines.discard(engine)
            self._coming.discard(name)
            await asyncio.to_thread(workflow.unpacked.discard)

    async def _unregister_nodes(self, nodes: Iterable[Registered | RunnableNode]) -> None:
        """Unregister all of these (with `model` and `version`), then raise the first error; a missing one is fine."""
        ends = await asyncio.gather(
            *(self._registry.unregister(node.model, node.version) for node in nodes), return_exceptions=True
        )
        for end in ends:
            if isinstance(end, BaseException) and not isinstance(end, ModelNotFound | VersionNotFound):
                raise end

    # ------------------------------------------------------------------------------------------- the end

    def refuse_new(self) -> None:
        """Take no more requests and registrations from now on; what was accepted goes on."""
        self._is_draining = True

    @property
    def under_way(self) -> int:
        """How many requests are on their way."""
        return sum(engine.running for engine in self._engines)

    async def drain(self, limit_s: float) -> int:
        """Wait until no request is on its way, at most `limit_s` seconds in all. Returns how many are left."""
        return sum(await asyncio.gather(*(engine.wait_until_idle(limit_s) for engine in self._engines)))

    def refuse_accepted(self) -> list[tuple[str, list[str]]]:
        """Refuse all requests that are on their way, as Draining; returns workflow and ids where there were any."""
        given_up = [(engine.workflow, engine.give_up()) for engine in list(self._engines)]
        return [(workflow, ids) for workflow, ids in given_up if ids]

    async def stop(self) -> None:
        """Give up what still runs, and let changes end. The nodes' models end with the registry, after this."""
        self.refuse_new()
        self._intake.stop_taking_in()
        for engine in list(self._engines):
            engine.give_up()
        if self._changes:
            await asyncio.wait(self._changes, timeout=STOP_LIMIT_S)
        for change in self._changes:
            log.error("A change of the workflows did not end in %s s and is given up: %s", STOP_LIMIT_S, change)
            change.cancel()
        for workflow in self._workflows.values():
            await asyncio.to_thread(workflow.unpacked.discard)
        self._workflows.clear()
        await asyncio.to_thread(self._intake.clear)

    # ------------------------------------------------------------------------------------------- inside

    def _find(self, workflow: str) -> _Workflow:
        found = self._workflows.get(workflow)
        if found is None:
            raise WorkflowNotFound(workflow)
        return found

    async def _carry_through(self, change: Coroutine[Any, Any, Result]) -> Result:
        """Await a change that goes on even when the caller is cancelled; `stop` waits for it."""
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, MarserveError):
            log.error("A change of the workflows failed", exc_info=error)


def _model_of(workflow: str, node: str) -> str:
    return f"{workflow}__{node}"


def _sentence(model: str, error: BaseException) -> str:
    """Why a node could not be registered, as TorchServe writes it."""
    if isinstance(error, LoadFailed):
        return error.message
    why = error.message if isinstance(error, MarserveError) else type(error).__name__
    return f"Workflow Node {model} failed to register. Details: {why}"


def _as_model(model: str | None, node: Node, unpacked: UnpackedWorkflow) -> Unpacked:
    """A function as an archive that was taken in: the workflow's folder, and a handler that is this function.

    The folder stays the workflow's, which is what `is_private` says.
    """
    manifest = unpacked.manifest
    handler = f"{manifest.handler}:{node.name}"
    document = {
        "createdOn": manifest.created_on,
        "archiverVersion": manifest.archiver_version,
        "runtime": "python",
        "model": {"modelName": model, "modelVersion": FUNCTION_VERSION, "handler": handler},
    }
    read = Manifest(
        created_on=manifest.created_on,
        archiver_version=manifest.archiver_version,
        runtime="python",
        model_name=model,
        model_version=FUNCTION_VERSION,
        handler=handler,
        document=document,
    )
    return Unpacked(unpacked.folder, read, ModelConfig(), is_private=False)
