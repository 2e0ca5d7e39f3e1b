"""From an unpacked archive and a registration to the plan that a version's pool is built from.

Knows nothing of other versions. It reads the archive's folder, to find the handler, so it runs in a thread.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from marserve.agent_link import ArchiveRef
from marserve.archive.contents.runtime_options import asks_to_compile
from marserve.archive.contents.weight_size import weigh
from marserve.documents import pack
from marserve.environments.environments import Environment
from marserve.environments.requirements import Requirements, read_requirements
from marserve.errors import (
    BadArchive,
    BadInput,
    HandlerNotFound,
    InterpreterRefused,
    LoadFailed,
    RequirementsRefused,
)
from marserve.files.below import real_below
from marserve.files.digests import digest_of
from marserve.messages import Checkpoint, Load
from marserve.model_options import Layers, ModelOptions, Said, fold, say
from marserve.names import check_new_name, encodable, encodable_document, name_fault, reserved_fault
from marserve.pool.options import PoolOptions
from marserve.registry.catalogue.describe import Facts
from marserve.registry.catalogue.plan import Plan, Unpacked, Wanted
from marserve.registry.catalogue.snapshot import lies_as
from marserve.registry.intake.drawn_samples import draw_samples
from marserve.registry.intake.effective_options import RUNTIMES, effective_options, effective_runtime, layers_of
from marserve.registry.intake.handler_check import find_defect, folder_of, hides_pythons_own
from marserve.registry.intake.registration import MOST_WORKERS, RegisterParameters, RegistryOptions
from marserve.registry.intake.startup import name_from_file
from marserve.registry.intake.worker_program import find_program
from marserve.settings.values import ModelDefaults
from marserve.store.addresses.fetch_guard import is_store_address
from marserve.store.addresses.pinned_digest import split_digest

# The members of a version in a desired state that are not keys of its configuration.
NOT_OF_THE_CONFIG = frozenset({"url", "sha256", "handler", "runtime"})


def check_parameters(parameters: RegisterParameters) -> None:
    """Raise BadInput for invalid parameters."""
    if parameters.model_name is not None:
        check_new_name("model", parameters.model_name)
    runtime = parameters.runtime
    if runtime == "LSP":
        raise BadInput("The runtime LSP (TorchServe's C++ backend) is not supported; use python.")
    if runtime is not None and runtime not in RUNTIMES:
        raise BadInput(f"Invalid RuntimeType value: {runtime}")
    if parameters.initial_workers is not None and not 0 <= parameters.initial_workers <= MOST_WORKERS:
        bound = "0 or more" if parameters.initial_workers < 0 else f"{MOST_WORKERS} or less"
        raise BadInput(f"initial_workers must be {bound}.")


def make_plan(parameters: RegisterParameters, unpacked: Unpacked, options: RegistryOptions) -> Plan:
    """Find name, version and effective options, and check that a worker could find the handler.

    Raises BadArchive if the archive says too little or its handler cannot be found; for the handler LoadFailed in its
    place if the caller would have waited for workers; NotEnoughDevices; RequirementsRefused for requirements that are
    not allowed; InterpreterRefused for an interpreter that is not allowed or not fit.
    """
    model, version = _name(parameters, unpacked)
    odd = _odd_names(model, version)
    if odd and (parameters.is_at_startup or parameters.restored is not None):
        model, version = encodable(model), encodable(version)
    facts = _facts(model, version, parameters, unpacked, options)
    facts = replace(facts, warnings=(*odd, *facts.warnings))
    handler = parameters.handler or unpacked.manifest.handler or options.default_handler
    if (warning := hides_pythons_own(handler)) is not None:
        facts = replace(facts, warnings=(*facts.warnings, warning))
    facts, wanted = _read_wanted(facts, unpacked, options)
    facts = _with_interpreter(facts, wanted, options)
    program = find_program(
        facts.options,
        unpacked.folder,
        archive=unpacked.archive,
        is_trusted=unpacked.is_trusted,
        has_requirements=wanted is not None,
    )
    if program:  # it finds its own handler
        facts = replace(facts, options=replace(facts.options, program=program))
        return Plan(facts, _load(facts, handler or "", unpacked, options), unpacked, wanted)
    may_be_elsewhere = facts.options.interpreter is not None or (
        wanted is not None and wanted.requirements.asks_for_something
    )
    defect = find_defect(handler, unpacked.folder, installs_requirements=may_be_elsewhere)
    if defect is not None:
        raise _unloadable(facts, defect, parameters.synchronous)
    return Plan(facts, _load(facts, handler or "", unpacked, options), unpacked, wanted)


def equip(plan: Plan, environment: Environment, *, is_synchronous: bool) -> Plan:
    """The plan with its installed requirements. Looks for the handler again, so it runs in a thread.

    Raises BadArchive or LoadFailed, as `make_plan` does, if the handler is not among the packages either.
    """
    assert plan.wanted is not None
    defect = find_defect(
        plan.load.handler, plan.unpacked.folder, installs_requirements=False, packages=environment.modules
    )
    if defect is not None:
        raise _unloadable(plan.facts, defect, is_synchronous)
    requirements: dict[str, Any] = {
        "status": "installed",
        **({"file": plan.wanted.requirements.file} if plan.wanted.requirements.file else {}),
        "kind": environment.kind,
        "folder": str(environment.folder),
        "log": str(environment.log),
        "installed": [str(package) for package in environment.installed],
        "seconds": environment.seconds,
        "wasInstalledBefore": environment.was_there,
    }
    options = replace(
        plan.facts.options,
        python=str(environment.python or ""),
        may_share_imports=environment.may_share_imports,
    )
    load = msgspec.structs.replace(plan.load, packages=str(environment.packages or ""))
    return replace(
        plan, facts=replace(plan.facts, options=options, requirements=requirements), load=load, environment=environment
    )


def _unloadable(facts: Facts, defect: str, is_synchronous: bool) -> BadArchive | LoadFailed:
    """The error for a handler that cannot be found."""
    model, version = facts.options.model, facts.options.version
    if is_synchronous and facts.options.min_workers:
        return HandlerNotFound(model, version, defect)
    return BadArchive(f"Model {model} cannot be loaded: {defect}.")


def _read_wanted(facts: Facts, unpacked: Unpacked, server: RegistryOptions) -> tuple[Facts, Wanted | None]:
    """The requirements to install, None without any; and the facts with what describe shows about them."""
    file, asks_for_venv = unpacked.manifest.requirements_file, facts.options.use_venv
    is_default = _has_default_requirements(unpacked, server)
    if is_default:
        file, asks_for_venv = server.default_requirements, True
    if file is None and not asks_for_venv:
        return facts, None
    if not (server.installs_requirements or is_default):
        what = " and ".join([*([file] if file else []), *(["useVenv"] if asks_for_venv else [])])
        warning = f"{what} of the archive is not used: install_py_dep_per_model is false"
        left_out = {"status": "not installed", **({"file": file} if file else {})}
        return replace(facts, requirements=left_out, warnings=(*facts.warnings, warning)), None
    kind: Literal["packages", "venv"] = "packages"
    if asks_for_venv and facts.runtime == "python":
        kind = "venv"
    elif asks_for_venv:
        warning = f"useVenv of the model's configuration is not used: it needs the runtime python, not {facts.runtime}"
        facts = replace(facts, warnings=(*facts.warnings, warning))
    if file is None:
        return facts, Wanted(Requirements(), kind) if kind == "venv" else None
    try:
        requirements = read_requirements(unpacked.folder, file, server.allowed_urls)
    except RequirementsRefused as error:
        words = f"Custom pip package installation failed for model {facts.options.model}"
        raise RequirementsRefused(f"{words}: {error}", str(error)) from None
    if is_default and not requirements.asks_for_something:
        return facts, None
    return facts, Wanted(requirements, kind)


def _with_interpreter(facts: Facts, wanted: Wanted | None, server: RegistryOptions) -> Facts:
    """The facts with the interpreter that the model names. Raises InterpreterRefused.

    A server that allows none leaves `environment` to the handler, with a warning.
    """
    options = facts.options
    if server.interpreters.is_handlers_own(options):
        warning = (
            f"environment: {options.interpreter_name} is left to the handler, and workers run under the server's "
            f"interpreter; allowed_interpreters={options.interpreter_name}=/path/to/bin/python would give it another"
        )
        return replace(facts, warnings=(*facts.warnings, warning))
    chosen = server.interpreters.choose(options)
    if chosen is None:
        return facts
    model = options.model
    if options.ray is not None:
        raise InterpreterRefused(
            f"Model {model} cannot be loaded: it has launcher: ray and names the interpreter {chosen.path} of "
            "this machine; on a cluster the nodes choose. Remove one of the two."
        )
    if wanted is not None:
        file = wanted.requirements.file
        raise InterpreterRefused(
            f"Model {model} cannot be loaded: it names the interpreter {chosen.path}, and the server installs "
            f"{file or 'an environment of its own (useVenv)'} for its own interpreter alone. Install what the model "
            f"needs by {chosen.path} -m pip, and remove {file or 'useVenv'} from the archive."
        )
    interpreter = server.interpreters.look_at(chosen, options)
    return replace(facts, options=replace(options, interpreter=interpreter))


def _has_default_requirements(unpacked: Unpacked, server: RegistryOptions) -> bool:
    """Whether the model has no manifest, which could name a requirements file, but has the file of the settings."""
    file = server.default_requirements
    return bool(file) and unpacked.manifest.document is None and (unpacked.folder / str(file)).is_file()


def _name(parameters: RegisterParameters, unpacked: Unpacked) -> tuple[str, str]:
    manifest = unpacked.manifest
    if not manifest.has_model_entry:
        raise BadArchive("Missing Model entry in manifest file.")
    model = parameters.model_name or manifest.model_name
    if not model and parameters.is_at_startup:
        model = name_from_file(parameters.url)
    if not model:
        raise BadArchive("Model name is not defined.")
    version = manifest.model_version or "1.0"
    restored = parameters.restored
    if restored is not None and lies_as(
        parameters.url, restored.model, restored.version, says_version=manifest.model_version is not None
    ):
        model, version = restored.model, restored.version
    if parameters.version not in (None, version):
        raise BadArchive(f"The archive says that it is version {version}, and not {parameters.version}.")
    return model, version


def declared_options(plan: Plan, declared: Mapping[str, Any], server: RegistryOptions) -> PoolOptions:
    """The options that the plan's version would run with if a desired state declared exactly these values."""
    facts = plan.facts
    parameters = RegisterParameters(facts.url, model_name=facts.options.model, declared=declared)
    return _facts(facts.options.model, facts.options.version, parameters, plan.unpacked, server).options


def _facts(
    model: str,
    version: str,
    parameters: RegisterParameters,
    unpacked: Unpacked,
    server: RegistryOptions,
) -> Facts:
    configured = server.models.get(parameters.copy_of or model, {}).get(version, ModelDefaults())
    if parameters.restored is not None and parameters.restored.options["max_workers"] > MOST_WORKERS:
        raise BadInput(f"maxWorkers of the snapshot must be {MOST_WORKERS} or less.")
    gets_workers = parameters.is_at_startup or parameters.declared is not None or parameters.is_arrival
    declared = {key: value for key, value in (parameters.declared or {}).items() if key not in NOT_OF_THE_CONFIG}
    layers = layers_of(parameters, unpacked.config, configured, declared)
    document = None if unpacked.declared is None else unpacked.declared.document
    options, option_warnings = effective_options(
        model,
        version,
        layers,
        server,
        at_startup=gets_workers,
        drawn_samples=draw_samples(document),
        declares_coroutine=document is not None and document["kind"] == "item" and document.get("async") is True,
    )
    _check_inputs(model, options.optimise.inputs, unpacked.folder)
    options = replace(options, weight_bytes=_weight_bytes(unpacked))
    if options.ray is not None:
        _refuse_far_checkpoint(model, unpacked)
        options = replace(options, ray=replace(options.ray, archive=_origin(unpacked)))
    runtime = effective_runtime(parameters.runtime, configured, unpacked.manifest.runtime)
    if parameters.restored is not None:
        runtime = parameters.restored.runtime
    if runtime not in RUNTIMES:
        raise BadArchive("Runtime is not defined or invalid.")
    return Facts(
        url=parameters.url,
        runtime=runtime,
        options=options,
        config=ModelOptions(**fold({"desired": layers["desired"], "archive": layers["archive"]})),
        is_at_startup=parameters.is_at_startup,
        warnings=(
            *parameters.warnings,
            *unpacked.manifest.warnings,
            *unpacked.config.warnings,
            *unpacked.warnings,
            *option_warnings,
        ),
        workflow=parameters.workflow,
        is_function=parameters.is_function,
        copy_of=parameters.copy_of,
        is_restored=parameters.restored is not None,
        asked=_asked(layers, options),
        declared=None if parameters.copy_of else parameters.declared,
        resolved_url=_resolved_url(parameters.url, unpacked.archive),
        declaration=document,
    )


def _check_inputs(model: str, named: str, folder: Path) -> None:
    """Raise BadArchive for inputs of `optimise` that are no folder of the archive, or an empty one."""
    inputs = real_below(folder, named)
    is_folder = inputs is not None and os.path.isdir(inputs)
    if not named or (inputs is not None and is_folder and any(inputs.iterdir())):
        return
    what = "holds no files" if is_folder else "is no folder of the archive"
    raise BadArchive(
        f"optimise.inputs in the configuration of model {model} is {named!r}, which {what}: put request bodies there, "
        "one a file, or leave it out, and the samples of the archive are taken."
    )


def _odd_names(model: str, version: str) -> list[str]:
    """Sentences about names that a new registration would be refused; a start and a snapshot may keep them."""
    faults = (name_fault("model", model), name_fault("version", version))
    odd = [f"{fault}: it is loaded all the same, and refused in a new registration" for fault in faults if fault]
    if (reserved := reserved_fault(version)) is not None:
        odd.append(f"{reserved}: it is loaded all the same, and a server started as marserve refuses to register it")
    return odd


def _resolved_url(url: str, archive: str) -> str | None:
    """The address of exactly what was fetched, if the registration's address names something that may change."""
    is_exact = is_store_address(archive) or split_digest(archive)[1] is not None
    return archive if is_exact and archive not in (url, split_digest(url)[0]) else None


def _origin(unpacked: Unpacked) -> ArchiveRef | None:
    """What other machines fetch, with its digest; None for a folder, or a file that was deleted meanwhile."""
    origin = unpacked.origin
    if origin is None or origin.sha256:
        return origin
    try:
        return msgspec.structs.replace(origin, sha256=digest_of(Path(origin.path)))
    except OSError:
        return None


def _refuse_far_checkpoint(model: str, unpacked: Unpacked) -> None:
    """Raise BadArchive for a checkpoint that lies on this machine, where workers on a cluster do not read."""
    checkpoint = unpacked.checkpoint
    if checkpoint is not None and checkpoint.is_beside:
        raise BadArchive(
            f"Model {model} cannot be loaded: it has launcher: ray, and its checkpoint is not in the archive but "
            "on this machine; put the folder into the archive, which the nodes of the cluster fetch."
        )


def _weight_bytes(unpacked: Unpacked) -> int:
    checkpoint = unpacked.checkpoint
    beside = checkpoint.read.bytes if checkpoint is not None and checkpoint.is_beside else 0
    try:
        return weigh(unpacked.folder).weights + beside
    except OSError:  # loading it will show what is wrong
        return beside


def _asked(layers: Layers, options: PoolOptions) -> Said:
    """The options of the registration, or of the snapshot, that a later start has to apply, whatever its settings."""
    said = layers.get("snapshot", layers["registration"])
    asked = {name: value for name, value in said.items() if name != "parallel_level"}
    # Without it a start from a snapshot would have other weights, or none.
    declared = {name: value for name, value in layers["desired"].items() if name == "checkpoint"}
    return Said(declared, asked, say(load="on_demand") if options.idle_timeout_s == math.inf else {})


def _load(facts: Facts, handler: str, unpacked: Unpacked, server: RegistryOptions) -> Load:
    options = facts.options
    beside = folder_of(handler, unpacked.folder)
    return Load(
        model=options.model,
        version=options.version,
        model_dir=str(unpacked.folder),
        handler=handler,
        manifest=pack(encodable_document(unpacked.manifest.document)),
        model_config=pack(encodable_document(unpacked.config.document)),
        batch_size=options.batch_size,
        device_type="gpu" if options.gpu_ids or (options.ray is not None and options.ray.gpus) else "cpu",
        envelope=server.envelope,
        decode_input=server.decode_input,
        refuses_bad_json=options.invalid_json == "refuse",
        limit_max_image_pixels=server.limit_max_image_pixels,
        max_answer_bytes=server.max_answer_bytes,
        threads=(options.threads or {}).get("intra", server.threads),
        allowed_batch_sizes=list(options.allowed_batch_sizes),
        inter_threads=(options.threads or {}).get("inter", 0),
        import_paths=[str(beside)] if beside is not None else [],
        warm_up=list(options.inputs_to_try) if options.warm_up or asks_to_compile(unpacked.config.document) else [],
        environment=server.sequence_headers.environment(),
        is_continuous=options.continuous_batching,
        is_concurrent=options.is_concurrent,
        overlaps=options.overlap_preprocess,
        peak_flops=None if options.peak_flops is None else dict(options.peak_flops),
        parallel=options.parallel,
        parallel_bytes=options.weight_bytes if options.parallel is not None else 0,
        parallel_samples=list(options.inputs_to_try) if options.parallel is not None else [],
        must_use_device=server.refuses_missing_devices,
        declaration=b"" if unpacked.declared is None else unpacked.declared.text,
        max_rows=options.max_rows,
        is_trusted=unpacked.is_trusted,
        checkpoint=_checkpoint(unpacked),
    )


def _checkpoint(unpacked: Unpacked) -> Checkpoint | None:
    found = unpacked.checkpoint
    if found is None:
        return None
    folder = str(found.folder if found.is_beside else found.folder.relative_to(unpacked.folder.resolve()))
    layout = msgspec.json.encode(found.read.layout) if found.read.kind == "dcp" else b""
    return Checkpoint(folder, found.may_map, found.read.bytes, layout)
