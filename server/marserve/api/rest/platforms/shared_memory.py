"""The Open Inference Protocol's REST routes about shared memory: regions are registered, shown and unregistered.

An address for inference shows what is registered, and takes changes only if it is open to them. A region is
`api/open_inference/regions`'s. Memory of CUDA devices is not taken: its status is empty.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from marserve.api.open_inference.regions import NO_CUDA, Regions, no_cuda_region
from marserve.api.rest.application import PrettyJson
from marserve.api.rest.late_routes import new_router
from marserve.api.rest.platforms.open_inference_control import read_settings
from marserve.api.rest.schemas import Name, body_like, error_answers
from marserve.errors import BadInput, ControlClosed

# A region's name may have slashes: tritonclient leaves them as they are.
ONE: Final = "/region/{name:path}"
ROUTES: Final = (
    ("GET", "/status", "regions", "The registered regions"),
    ("GET", f"{ONE}/status", "region", "One registered region"),
    ("POST", f"{ONE}/register", "register_region", "Register a region"),
    ("POST", "/unregister", "unregister_regions", "Unregister all regions"),
    ("POST", f"{ONE}/unregister", "unregister_region", "Unregister a region"),
)

# What the API description says of a registration.
REGION: Final = body_like(
    {
        "key": {"type": "string"},
        "offset": {"type": "integer", "minimum": 0},
        "byte_size": {"type": "integer", "minimum": 1},
    },
    required=("key", "byte_size"),
)

# Of each route, in their order.
Endpoints = tuple[Callable[..., Awaitable[Response]], ...]


def shared_memory_router(regions: Regions, *, is_open: bool) -> APIRouter:
    """The routes; unless `is_open` changes are refused."""
    router = new_router(PrettyJson)

    def check_open(call: str) -> None:
        if not is_open:
            raise ControlClosed(call)

    async def show() -> Response:
        return PrettyJson([region.document() for region in regions.status()])

    async def show_one(name: Name) -> Response:
        return PrettyJson([region.document() for region in regions.status(name)])

    async def register(request: Request, name: Name) -> Response:
        check_open("Registering shared memory")
        given = await read_settings(request, "a registration of shared memory")
        regions.register(name, given.get("key"), given.get("offset", 0), given.get("byte_size"))
        return PrettyJson({})

    async def unregister() -> Response:
        check_open("Unregistering shared memory")
        regions.unregister_all()
        return PrettyJson({})

    async def unregister_one(name: Name) -> Response:
        check_open("Unregistering shared memory")
        regions.unregister(name)
        return PrettyJson({})

    async def show_cuda() -> Response:
        return PrettyJson([])

    async def show_one_cuda(name: Name) -> Response:
        raise no_cuda_region(name)

    async def register_cuda(name: Name) -> Response:
        raise BadInput(NO_CUDA)

    async def unregister_cuda() -> Response:
        check_open("Unregistering shared memory")
        return PrettyJson({})

    async def unregister_one_cuda(name: Name) -> Response:
        check_open("Unregistering shared memory")
        return PrettyJson({})

    system: Endpoints = (show, show_one, register, unregister, unregister_one)
    cuda: Endpoints = (show_cuda, show_one_cuda, register_cuda, unregister_cuda, unregister_one_cuda)
    for at, of, endpoints in (("system", "", system), ("cuda", "_cuda", cuda)):
        for endpoint, (method, path, word, summary) in zip(endpoints, ROUTES, strict=True):
            router.add_api_route(
                f"/v2/{at}sharedmemory{path}",
                endpoint,
                methods=[method],
                operation_id=f"oip_{word}{of}",
                summary=f"{summary} of {at} shared memory (Open Inference)",
                responses=error_answers(400) if method == "GET" else error_answers(400, 403),
                openapi_extra=REGION if word == "register_region" else None,
            )
    return router
