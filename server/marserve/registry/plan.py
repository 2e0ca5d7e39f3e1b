"""From an unpacked archive, and what was asked for, to what a version's pool is built from.

Knows nothing of other versions. It looks at the archive's folder once, to find the handler, so it runs in a thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from marserve.errors import BadArchive, BadInput, LoadFailed
from marserve.messages import Load
from marserve.registry.calls import MOST_WORKERS, RegisterParameters, RegistryOptions
from marserve.registry.describe import Facts
from marserve.registry.effective_options import (
    RUNTIMES,
    OptionDefaults,
    RequestedOptions,
    effective_options,
    effective_runtime,
)
from marserve.registry.handler_check import find_defect
from marserve.registry.intake import Unpacked
from marserve.registry.startup import name_from_file
from marserve.settings import ModelDefaults


@dataclass(frozen=True, slots=True)
class Plan:
    """A version that could be: what describe says of it, what its workers are told, and what it was unpacked to."""

    facts: Facts
    load: Load
    unpacked: Unpacked


def check_parameters(parameters: RegisterParameters) -> None:
    """Raise BadInput for what no registration can mean."""
    runtime = parameters.runtime
    if runtime == "LSP":
        raise BadInput("The runtime LSP (TorchServe's C++ backend) is not supported; use python.")
    if runtime is not None and runtime not in RUNTIMES:
        raise BadInput(f"Invalid RuntimeType value: {runtime}")
    for name, value, least in (
        ("batch_size", parameters.batch_size, 1),
        ("max_batch_delay", parameters.max_batch_delay_s, 0),
        ("response_timeout", parameters.response_timeout_s, 1),
        ("startup_timeout", parameters.startup_timeout_s, 1),
        ("initial_workers", parameters.initial_workers, 0),
    ):
        if value is not None and value < least:
            raise BadInput(f"{name} must be {least} or more.")
    if parameters.initial_workers is not None and parameters.initial_workers > MOST_WORKERS:
        raise BadInput(f"initial_workers must be {MOST_WORKERS} or less.")


def make_plan(
    parameters: RegisterParameters, unpacked: Unpacked, options: RegistryOptions, *, is_at_startup: bool
) -> Plan:
    """Work out name, version and the values that win, and see that a worker could find the handler.

    Raises BadArchive when the archive says too little, or its handler is nowhere; LoadFailed for the latter where the
    caller would have waited for workers; NotEnoughDevices.
    """
    model, version = _name(parameters, unpacked, is_at_startup)
    facts = _facts(model, version, parameters, unpacked, options, is_at_startup)
    handler = parameters.handler or unpacked.manifest.handler or options.default_handler
    defect = find_defect(
        handler, unpacked.folder, installs_requirements=unpacked.manifest.requirements_file is not None
    )
    if defect is not None:
        if parameters.synchronous and facts.options.min_workers:
            raise LoadFailed(model, version, reason=defect, cause="missing_module")
        raise BadArchive(f"Model {model} cannot be loaded: {defect}.")
    return Plan(facts, _load(facts, handler or "", unpacked, options), unpacked)


def _name(parameters: RegisterParameters, unpacked: Unpacked, is_at_startup: bool) -> tuple[str, str]:
    manifest = unpacked.manifest
    if not manifest.has_model_entry:
        raise BadArchive("Missing Model entry in manifest file.")
    model = parameters.model_name or manifest.model_name
    if not model and is_at_startup:
        model = name_from_file(parameters.url)
    if not model:
        raise BadArchive("Model name is not defined.")
    return model, manifest.model_version or "1.0"


def _facts(
    model: str,
    version: str,
    parameters: RegisterParameters,
    unpacked: Unpacked,
    server: RegistryOptions,
    is_at_startup: bool,
) -> Facts:
    configured = server.models.get(model, {}).get(version, ModelDefaults())
    requested = RequestedOptions(
        workers=parameters.initial_workers,
        batch_size=parameters.batch_size,
        max_batch_delay_s=parameters.max_batch_delay_s,
        response_timeout_s=parameters.response_timeout_s,
        startup_timeout_s=parameters.startup_timeout_s,
    )
    options, option_warnings = effective_options(
        model,
        version,
        requested=requested,
        archive=unpacked.config,
        configured=configured,
        defaults=OptionDefaults(
            workers=server.workers_at_startup if is_at_startup else server.workers_by_api,
            response_timeout_s=server.response_timeout_s,
            startup_timeout_s=server.startup_timeout_s,
            queue_size=server.queue_size,
            max_worker_memory_bytes=server.max_worker_memory_bytes,
            readiness_rule=server.readiness_rule,
            autoscale=server.autoscale,
        ),
        at_startup=is_at_startup,
        gpu_count=server.gpu_count,
    )
    runtime = effective_runtime(parameters.runtime, configured, unpacked.manifest.runtime)
    if runtime not in RUNTIMES:
        raise BadArchive("Runtime is not defined or invalid.")
    return Facts(
        url=parameters.url,
        runtime=runtime,
        options=options,
        config=unpacked.config,
        is_at_startup=is_at_startup,
        warnings=(
            *parameters.warnings,
            *unpacked.manifest.warnings,
            *unpacked.config.warnings,
            *unpacked.warnings,
            *option_warnings,
        ),
    )


def _load(facts: Facts, handler: str, unpacked: Unpacked, server: RegistryOptions) -> Load:
    options = facts.options
    return Load(
        model=options.model,
        version=options.version,
        model_dir=str(unpacked.folder),
        handler=handler,
        manifest=unpacked.manifest.document,
        model_config=unpacked.config.document,
        batch_size=options.batch_size,
        device_type="gpu" if options.gpu_ids else "cpu",
        envelope=server.envelope,
        decode_input=server.decode_input,
        limit_max_image_pixels=server.limit_max_image_pixels,
        max_answer_bytes=server.max_answer_bytes,
        threads=server.threads,
        import_paths=[str(unpacked.folder)],
        warm_up=list(unpacked.config.samples) if unpacked.config.warm_up else [],
    )
