"""The management API of workflows over HTTP (contract 4.3): from paths and parameters to calls, and answers back.

It decides nothing about workflows: `workflows` does.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from marserve.answers.management import StatusMessage, WorkflowDescription, WorkflowList
from marserve.api.parameters import (
    PAGE_PARAMETERS,
    WORKFLOW_PARAMETERS,
    Parameters,
    QueryParameters,
    read_options,
    read_parameters,
    sign,
)
from marserve.api.rest.application import PrettyJson
from marserve.api.rest.late_routes import new_router
from marserve.api.rest.models.management import Remarks
from marserve.api.rest.models.traffic import refuse_dry_run
from marserve.api.rest.schemas import Name, error_answers, takes
from marserve.errors import BadInput
from marserve.workflows.workflows import WorkflowParameters, Workflows


def workflow_router(workflows: Workflows, *, enable_model_api: bool) -> APIRouter:
    """The routes for workflows. Without `enable_model_api` none that registers or unregisters: as with models, these
    run the code of archives.
    """
    router = new_router(PrettyJson)
    _add_list(router, workflows)
    if enable_model_api:
        _add_changes(router, workflows)
    return router


def _add_list(router: APIRouter, workflows: Workflows) -> None:
    remarks = Remarks()

    @router.get(
        "/workflows",
        operation_id="listWorkflows",
        summary="List workflows",
        responses={200: {"model": WorkflowList}},
        openapi_extra=takes(PAGE_PARAMETERS),
    )
    async def list_workflows(request: Request) -> Response:
        query = QueryParameters(request.query_params, PAGE_PARAMETERS)
        page = workflows.list_workflows(query.integer("limit"), query.integer("next_page_token"))
        remarks.tell("GET /workflows", query.warnings)
        token = {} if page.next_offset is None else {"nextPageToken": str(page.next_offset)}
        return PrettyJson(
            {**token, "workflows": [{"workflowName": name, "workflowUrl": url} for name, url in page.models]}
        )

    @router.get(
        "/workflows/{workflow_name}",
        operation_id="describeWorkflow",
        summary="Describe a workflow",
        responses={200: {"model": list[WorkflowDescription]}, **error_answers(404)},
    )
    async def describe(workflow_name: Name) -> Response:
        return PrettyJson([workflows.describe(workflow_name)])


def _add_changes(router: APIRouter, workflows: Workflows) -> None:
    @router.post(
        "/workflows",
        operation_id="registerWorkflow",
        summary="Register a workflow's archive, and its nodes as models",
        responses={200: {"model": StatusMessage}, **error_answers(400, 404, 409, 500, 503, 507)},
        openapi_extra=takes(WORKFLOW_PARAMETERS, in_body=True),
    )
    async def register(request: Request) -> Response:
        parameters = await read_parameters(request, WORKFLOW_PARAMETERS)
        refuse_dry_run("The registration of a workflow", request, parameters)
        name = await workflows.register(read_workflow_registration(parameters))
        return PrettyJson({"status": f"Workflow {name} has been registered and scaled successfully."})

    @router.delete(
        "/workflows/{workflow_name}",
        operation_id="unregisterWorkflow",
        summary="Unregister a workflow, and its nodes",
        responses={200: {"model": StatusMessage}, **error_answers(400, 404, 408)},
    )
    async def unregister(request: Request, workflow_name: Name) -> Response:
        refuse_dry_run("The end of a workflow", request)
        await workflows.unregister(workflow_name)
        return PrettyJson({"status": f'Workflow "{workflow_name}" unregistered'})


def read_workflow_registration(parameters: Parameters) -> WorkflowParameters:
    """A registration's parameters, times in seconds. Raises BadInput if the URL, or a value in JSON, cannot be used."""
    url = parameters.text("url")
    if url is None:
        raise BadInput("Parameter url is required.")
    if parameters.flag("s3_sse_kms", False):
        url = sign(url)
    return WorkflowParameters(
        url=url,
        workflow_name=parameters.text("workflow_name") or None,
        options=read_options(parameters, "response_timeout", "startup_timeout"),
        warnings=tuple(parameters.warnings),
    )
