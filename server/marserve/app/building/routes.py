"""The routes of a listener, by its APIs, and the key that each of them needs."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence

from starlette.requests import Request
from starlette.routing import Router

from marserve.api.rest.declared_paths import DeclaredVersion
from marserve.api.rest.description import describe_once, description_router
from marserve.api.rest.guard import token_router
from marserve.api.rest.logs import logs_router
from marserve.api.rest.models.archives import archives_router
from marserve.api.rest.models.desired_state import desired_state_router
from marserve.api.rest.models.downloads import downloads_router
from marserve.api.rest.models.events import EventSecrets, events_router, watches_router
from marserve.api.rest.models.management import management_router
from marserve.api.rest.models.optimising import optimising_router
from marserve.api.rest.models.profiles import profile_router
from marserve.api.rest.models.replays import replay_router
from marserve.api.rest.models.rollouts import rollout_router
from marserve.api.rest.models.statistics import statistics_router
from marserve.api.rest.models.workflows import workflow_router
from marserve.api.rest.pages.router import links_of, offers_router, pages_router
from marserve.api.rest.platforms.health import health_router
from marserve.api.rest.platforms.kserve import kserve_router
from marserve.api.rest.platforms.metrics import metrics_router
from marserve.api.rest.platforms.open_inference import open_inference_router
from marserve.api.rest.platforms.open_inference_control import open_inference_control_router
from marserve.api.rest.platforms.open_inference_models import add_index, open_inference_models_router
from marserve.api.rest.platforms.plugin_endpoints import check_patterns, endpoint_router
from marserve.api.rest.platforms.sagemaker import sagemaker_router
from marserve.api.rest.platforms.shared_memory import shared_memory_router
from marserve.api.rest.requests import requests_router
from marserve.api.tokens import Access, authorization_of
from marserve.app.building.devices import device_activities
from marserve.app.building.from_settings import error_rules, sagemaker_endpoint, speaks_all_open_inference
from marserve.app.building.parts import Parts
from marserve.errors import ModelNotFound
from marserve.profiling.session import Profiles

log = logging.getLogger("marserve.app")

Routers = list[tuple[Router, Access]]


def own_access(names: Sequence[str]) -> Access:
    """The key that a listener with these APIs needs for paths of no router."""
    if "Management" in names:
        return "either" if "Inference" in names else "management"
    return "inference"


def build_routes(names: Sequence[str], parts: Parts) -> Routers:
    """The routers of a listener with these APIs ("Inference", "Management", "Metrics"), in order of precedence.

    Raises BadSettings for an installed endpoint whose pattern is taken.
    """
    settings, registry = parts.settings, parts.registry
    has_inference, has_management = "Inference" in names, "Management" in names
    own = own_access(names)
    apis = {"has_inference": has_inference, "has_management": has_management}
    described = {**apis, "has_open_inference": speaks_all_open_inference(settings)}
    written = describe_once(**described)
    routers: Routers = [(description_router(registry, **described, written=written), own)]
    if settings.enable_docs:
        # First, so that `GET /` needs no key.
        has_dashboard = has_management and settings.entry == "marserve"  # TorchServe's routes alone would not fill it
        links = links_of(**apis, has_metrics="Metrics" in names, has_dashboard=has_dashboard)
        further = [_declared_for(parts, own)] if has_inference else []
        routers.insert(0, (pages_router(links, written, *further), "open"))
    if settings.enable_docs and has_inference:
        routers.append((offers_router(registry, parts.workflows), own))
    if has_inference and settings.sagemaker_endpoints:
        routers.append((sagemaker_router(registry.data_plane, sagemaker_endpoint(settings, os.environ)), own))
    if has_inference or has_management:
        health = health_router(
            registry,
            has_ping=has_inference,
            platform_route=settings.health_route,
            last_stall=lambda: parts.loop_lag.last_stall(time.monotonic(), settings.livez_after_stall),
        )
        routers.append((health, own))
    if speaks_all_open_inference(settings):
        _add_open_inference(routers, parts, has_inference=has_inference, has_management=has_management)
    elif has_inference and settings.ts_open_inference_protocol:
        routers.append((open_inference_router(), "inference"))
    if settings.entry == "marserve" and (has_inference or has_management):
        routers.append((kserve_router(registry), own))
    if has_management:
        _add_management(routers, parts)
    for installed in parts.endpoints:
        if not (has_inference if installed.endpoint.listener == "inference" else has_management):
            continue
        check_patterns(installed, [router for router, _ in routers])
        routers.insert(0, (endpoint_router(installed, registry), installed.endpoint.access))
        log.info("/%s is answered by %s", installed.endpoint.pattern, installed.origin)
    if has_management and parts.access.tokens is not None:
        routers.append((token_router(parts.access.tokens), "open"))  # checks the API key itself
    if "Metrics" in names:
        routers.append((metrics_router(parts.scrapes), "open"))
    return routers


def _declared_for(parts: Parts, access: Access) -> Callable[[Request], list[DeclaredVersion]]:
    """The versions that declare their input, for requests with the key of a listener with that access."""

    def declared(request: Request) -> list[DeclaredVersion]:
        if not parts.access.has_key(access, authorization_of(request.scope["headers"])):
            return []
        return [
            DeclaredVersion(model.name, each.version, each.isDefault, document)
            for model in parts.registry.all_offered()
            for each in model.versions
            if (document := parts.registry.declaration_of(model.name, each.version)) is not None
        ]

    return declared


def _add_open_inference(routers: Routers, parts: Parts, *, has_inference: bool, has_management: bool) -> None:
    """Add the protocol in full. What changes the server is taken where management is, or with a setting elsewhere."""
    if not (has_inference or has_management):
        return
    registry = parts.registry
    is_open = has_management or parts.settings.open_inference_control
    repository = parts.repository if is_open else None
    if has_inference:
        models = open_inference_models_router(registry, repository, shares_memory=parts.regions.is_on)
        routers.append((models, "inference"))
    control = open_inference_control_router(
        parts.repository,
        parts.log_settings,
        registry.data_plane.check_exists,
        parts.trace_settings,
        is_open=is_open,
    )
    if not has_inference:
        add_index(control, registry, repository)
    memory = shared_memory_router(parts.regions, is_open=is_open)
    routers.extend((router, "management" if is_open else "inference") for router in (control, memory))


def _add_management(routers: Routers, parts: Parts) -> None:
    """Add the routes for models, workflows, roll-outs, the desired state, downloads and watches."""
    settings, registry, desired = parts.settings, parts.registry, parts.desired
    allows = settings.enable_model_api
    changes = desired.changes(registry)
    models = management_router(
        registry,
        enable_model_api=allows,
        changes=changes,
        rollouts=parts.rollouts,
        has_readiness=settings.entry != "marserve",
        as_recorded=settings.entry != "marserve",
    )
    routers.append((models, "management"))
    routers.append((desired_state_router(desired.reconciler, enable_model_api=allows), "management"))
    routers.append((downloads_router(parts.downloads, enable_model_api=allows), "management"))
    if parts.uploads is not None:
        routers.append((archives_router(parts.uploads, parts.access.upload_check()), "management"))
    routers.append((watches_router(parts.watches), "management"))
    if settings.entry == "marserve":
        data_plane = registry.data_plane

        def versions_of(model: str) -> list[str]:
            with contextlib.suppress(ModelNotFound):
                return data_plane.version_names(model)
            return []

        watch = parts.device_watch
        devices = tuple if watch is None else lambda: device_activities(watch)
        statistics = statistics_router(registry, devices, loop_lag=parts.loop_lag)
        routers.insert(0, (statistics, "management"))  # first, as its paths look like those of versions
        logs = logs_router(parts.logs.book, parts.log_levels, versions_of, data_plane.check_exists)
        routers.append((logs, "management"))
        if parts.recorder is not None:
            routers.append((requests_router(parts.recorder, parts.happenings), "management"))
        routers.insert(0, (profile_router(Profiles(registry)), "management"))
        if parts.optimising is not None:
            routers.insert(0, (optimising_router(parts.optimising), "management"))
        rules = error_rules(settings, parts.logs.with_own_paths)
        routers.append((replay_router(registry, parts.keeper, parts.recorder, rules), "management"))
    # This router checks the management key, or the source's own secret, itself.
    secrets = EventSecrets(settings.event_secrets, parts.access.authorize("management"), os.environ)
    events = events_router(parts.watches, secrets, parts.watches.count_events)
    routers.append((events, "management" if settings.management_is_kept_here else "open"))
    routers.insert(0, (rollout_router(registry, parts.rollouts, desired.guard(registry), changes), "management"))
    routers.append((workflow_router(parts.workflows, enable_model_api=allows), "management"))
