"""`marserve archive`: makes a model archive and says what went into it."""

from __future__ import annotations

import os
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from marserve.archive.checkpoints.checked_files import check_members
from marserve.archive.checkpoints.checkpoint import read_checkpoint
from marserve.archive.checkpoints.contents import BadCheckpoint
from marserve.archive.contents.built_in_handlers import BUILT_IN_HANDLERS
from marserve.archive.contents.model_config import ModelConfig, parse_model_config, unused_workers
from marserve.archive.writing.sources import Wishes, is_hub_address, is_program, is_source, plan_source
from marserve.archive.writing.writer import (
    FORMATS,
    ArchiveSpec,
    Packed,
    Plan,
    begin_import,
    handler_file,
    output_path,
    plan_archive,
    refuse_existing,
    with_declaration,
    write_archive,
)
from marserve.cli.dry_run import HEAD, as_dry
from marserve.cli.options import DryRun
from marserve.cli.output import AsJson, CommandFailed, Output, WrongArguments, table
from marserve.cli.progress.registering import send_and_register
from marserve.cli.remote import Management, ManagementAddress, find_address
from marserve.cli.source_date import read_source_date_epoch
from marserve.errors import BadArchive, CannotArchive
from marserve.files.nearest import did_you_mean
from marserve.model_options import BY_KEY
from marserve.store.fetching.prefixes import is_prefix

Format = StrEnum("Format", {word.replace("-", "_"): word for word in FORMATS})  # type: ignore[misc]  # from one list
_TENSOR_HANDLER = "base_handler"
# Files that built-in handlers load by themselves, and with a model file.
_PROGRAMS = (".pt", ".pt2", ".onnx", ".so")
_WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
# Handlers that open files of their own kinds.
_OWN_KINDS = {
    "densenet_handler": (".pt", ".pth"),
    "transformers": (".safetensors",),
    "sklearn": (".skops", ".onnx", ".joblib", ".pkl", ".pickle"),
    "xgboost": (".json", ".ubj"),
    "lightgbm": (".txt",),
}
_FOLDER_HANDLER, _FOLDERS_CONFIG = "transformers", "config.json"
# The script of this handler chooses what it loads.
_SCRIPT_HANDLER = "sagemaker_script"
_SCRIPTS = ("code/inference.py", "inference.py")
# Handlers that need no file: the configuration names their models, the script loads them, or a folder holds them.
_NEED_NO_FILE = ("vllm_handler", "trt_llm_handler", _SCRIPT_HANDLER, _FOLDER_HANDLER)


SettingsFile = Annotated[
    Path | None,
    typer.Option(
        "--ts-config", metavar="FILE", help="The server's settings, with --register; config.properties if not given."
    ),
]


def archive(
    what: Annotated[
        str,
        typer.Argument(
            metavar="NAME|SOURCE",
            help="A name for the model that the options describe; or what is packed by itself: FILE.py[:OBJECT], a "
            "program (.onnx, .pt2, TorchScript), a folder, or a model of a hub: hf://OWNER/NAME@REVISION.",
        ),
    ],
    task: Annotated[
        str | None, typer.Option("--task", help="Of a model of transformers, where its files do not say: its task.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", "-n", help="Of a source: the model's name, where its own does not suit.")
    ] = None,
    serialized_file: Annotated[
        Path | None, typer.Option("--serialized-file", "-s", help="The weights or program: .pt, .pt2, .onnx, ….")
    ] = None,
    handler: Annotated[
        str | None,
        typer.Option(
            help=f"A built-in handler ({', '.join(BUILT_IN_HANDLERS)}), or the path of a Python file, with :function "
            f"where one is meant. Default: {_TENSOR_HANDLER} for TorchScript, .pt2 and ONNX files."
        ),
    ] = None,
    version: Annotated[str, typer.Option("--version", "-v", help="The model's version.")] = "1.0",
    model_file: Annotated[
        Path | None, typer.Option(help="The Python file with the model's class, for a state dict.")
    ] = None,
    extra_files: Annotated[
        list[str] | None,
        typer.Option(
            "--extra-file",
            "-x",
            help="A file, folder or wildcard, more than once if need be. A folder keeps its name and "
            "layout; of folder/. the contents go to the top.",
        ),
    ] = None,
    requirements_file: Annotated[
        Path | None,
        typer.Option("--requirements-file", "-r", help="The model's own Python requirements, as pip reads them."),
    ] = None,
    config_file: Annotated[Path | None, typer.Option("--config-file", "-c", help="The model's configuration.")] = None,
    runtime: Annotated[str, typer.Option(help="python, python3 or LSP.")] = "python",
    traced_from: Annotated[
        str | None,
        typer.Option(
            "--traced-from",
            metavar="FILE.py[:CLASS]",
            help="Of a trace (.pt): its class; both run the samples, and a trace that is off is refused.",
        ),
    ] = None,
    samples: Annotated[
        list[Path] | None,
        typer.Option(
            "--sample",
            help="With --traced-from, more than once if need be: what the model is called with, rows first, as .npy, "
            ".npz, .json or .pt.",
        ),
    ] = None,
    export_path: Annotated[Path, typer.Option("--export-path", "-o", help="The folder for the archive.")] = Path("."),
    archive_format: Annotated[
        Format,
        typer.Option("--format", help="A deflated zip file, a stored one, a compressed tar file, or a plain folder."),
    ] = Format("default"),
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite what is there.")] = False,
    register: Annotated[
        bool,
        typer.Option(
            "--register",
            help="Send it to the running server and register it there; with --force it takes the place of a file of "
            "its name that no version uses.",
        ),
    ] = False,
    workers: Annotated[int, typer.Option("--workers", min=0, help="How many workers to start, with --register.")] = 1,
    management: ManagementAddress = None,
    settings_file: SettingsFile = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Make a model archive (.mar). The same files give the same bytes; SOURCE_DATE_EPOCH sets its date."""
    with Output(as_json) as output, ExitStack() as held:
        if register and archive_format is Format("no-archive"):
            raise WrongArguments("--register sends one file, and --format no-archive makes a folder.")
        if bool(samples) != (traced_from is not None):
            raise WrongArguments("--traced-from compares by --sample, at least one; neither does anything alone.")
        try:
            extra = tuple(extra_files or ())
            origin = ""
            for_author: tuple[str, ...] = ()
            if handler is None and model_file is None and is_source(what):
                wishes = Wishes(name, version, extra, serialized_file, requirements_file, config_file, task=task)
                source, origin = _find(what, wishes, output, held)
                planned = plan_source(source, wishes)
                plan, for_author = planned.plan, planned.left_out
            else:
                if is_hub_address(what):
                    raise WrongArguments(f"{what} is packed for its own handler; leave out --handler and --model-file.")
                if name is not None:
                    raise WrongArguments(f"--name is for a source, such as model.py; the model's name is {what} here.")
                spec = ArchiveSpec(
                    what,
                    version,
                    handler or _default_handler(serialized_file),
                    serialized_file,
                    model_file,
                    extra,
                    requirements_file,
                    config_file,
                    runtime,
                    keeps_folders=True,
                )
                _check_handler(spec)
                plan = plan_archive(spec)
            with begin_import(plan) as importing:
                plan = with_declaration(
                    plan, importing.declared(on_wait=lambda file: output.say_wait(f"Importing {file} …"))
                )
            spec = plan.spec
            _check_export_path(export_path)
            warnings = [*plan.warnings, *_foresee(plan), *_compare_trace(spec.serialized_file, traced_from, samples)]
        except CannotArchive as error:  # what the arguments name cannot be packed, and nothing was written
            raise WrongArguments(error.message) from error
        except BadArchive as error:
            raise CommandFailed(error.message) from error
        try:
            if dry_run:
                place = output_path(spec.model_name, export_path, archive_format.value)
                _show_dry_run(output, plan, warnings, place, force, origin, for_author)
                return
            path, packed = _write(output, plan, export_path, archive_format.value, force)
        except (CannotArchive, BadArchive) as error:
            raise CommandFailed(error.message) from error
        registered: dict[str, Any] = {}
        size = path.stat().st_size if path.is_file() else sum(member.size_bytes for member in packed)
        for warning in warnings:
            output.note(f"Warning: {warning}")
        if register:
            address = find_address("management", management, settings_file)
            with Management(address) as server:
                registered = send_and_register(server, output, path, workers, replaces=force)
        output.result(
            {
                "path": str(path),
                "sizeBytes": size,
                "model": spec.model_name,
                "version": spec.version,
                "handler": spec.handler,
                "members": [
                    {
                        "name": member.name,
                        "sizeBytes": member.size_bytes,
                        "sha256": member.sha256,
                        "leftOut": member.left_out,
                    }
                    for member in packed
                ],
                "warnings": warnings,
                **({"notPacked": list(for_author)} if for_author else {}),
                **({"source": origin} if origin else {}),
                **registered,
            },
            table(
                ("member", "size", "sha256"),
                [(member.name, decimal(member.size_bytes), member.sha256[:16] + "…") for member in packed],
            ),
            *_say_left_out(packed),
            *_say_for_author(for_author),
            f"{path} ({decimal(size)}): {_say_model(spec, origin)}",
            *([registered["status"]] if registered else []),
        )


def _find(what: str, wishes: Wishes, output: Output, held: ExitStack) -> tuple[str, str]:
    """The path of a source, and the address at a commit of one that is fetched first, which `held` keeps; else empty.

    Raises WrongArguments, CommandFailed, BadSettings, Interrupted.
    """
    if not is_hub_address(what):
        return what, ""
    # Late: few archives are of a hub, and what fetches takes longer to import than most archives to write.
    from marserve.cli.local.hub import fetched_to_pack

    found = held.enter_context(fetched_to_pack(what, wishes, output))
    return str(found.path), found.address


def _say_model(spec: ArchiveSpec, origin: str) -> str:
    of = f" of {origin}" if origin else ""
    return f"model {spec.model_name}{of}, version {spec.version}, handler {spec.handler}"


def _say_for_author(files: tuple[str, ...]) -> list[str]:
    """A sentence about the files of a folder that are not packed."""
    if not files:
        return []
    return [f"not packed, since the model does not name {'it' if len(files) == 1 else 'them'}: {', '.join(files)}"]


def _show_dry_run(
    output: Output,
    plan: Plan,
    warnings: list[str],
    path: Path,
    force: bool,
    origin: str,
    for_author: tuple[str, ...],
) -> None:
    """Say what would go into the archive. Raises CannotArchive if it exists already."""
    refuse_existing(path, force=force)
    for warning in warnings:
        output.note(f"Warning: {warning}")
    sizes = {name: file.stat().st_size for name, file in plan.members.items()}
    # Of a hub's model the files in its cache: the folder of links goes with the command.
    files = {name: str(file.resolve() if origin else file) for name, file in plan.members.items()}
    document = {
        "path": str(path),
        "overwrites": os.path.lexists(path),
        "model": plan.spec.model_name,
        "version": plan.spec.version,
        "handler": plan.spec.handler,
        "members": [{"name": name, "sizeBytes": size, "file": files[name]} for name, size in sizes.items()],
        "warnings": warnings,
        **({"notPacked": list(for_author)} if for_author else {}),
        **({"source": origin} if origin else {}),
    }
    rows = [(name, decimal(size), files[name]) for name, size in sizes.items()]
    what = _say_model(plan.spec, origin)
    replacing = ", in the place of what is there" if document["overwrites"] else ""
    members = table(("member", "size", "file"), rows)
    output.result(as_dry(document), HEAD, members, *_say_for_author(for_author), f"{path}: {what}{replacing}")


def _default_handler(serialized_file: Path | None) -> str:
    """The handler for a file with a whole program, tensors in and tensors out. Raises CannotArchive for others."""
    if serialized_file is not None and serialized_file.is_file() and is_program(serialized_file):
        return _TENSOR_HANDLER
    raise CannotArchive(
        f"Name a handler with --handler: a Python file, or one of {', '.join(BUILT_IN_HANDLERS)}. Only TorchScript, "
        ".pt2 and ONNX files have a default."
    )


def _foresee(plan: Plan) -> list[str]:
    """Warnings that a server would give for these files: unused configuration, refused pickles."""
    warnings: list[str] = []
    checkpoint = None
    if plan.spec.config_file is not None:
        path = plan.spec.config_file
        config = _read_config(plan.made[path.name] if path.name in plan.made else path.read_bytes(), path)
        warnings += [*config.warnings, *_raised(config, config.document or {})]
        if unused := unused_workers(config.said, "idle_timeout_s" in config.said):
            warnings.append(unused)
        checkpoint = config.options.checkpoint
    findings = check_members(plan.members.items(), trusted=True)
    warnings += [f"servers will refuse this archive. {finding}" for finding in findings]
    if checkpoint is not None:
        warnings += _foresee_checkpoint(plan, checkpoint)
    elif plan.spec.model_file is not None and plan.spec.serialized_file is None:
        warnings.append(f"there is a model file ({plan.spec.model_file.name}) and no serialized file with its weights")
    is_built_in = handler_file(plan.spec.handler, plan.spec.runtime, is_program=plan.spec.brings_program) is None
    has_weights = plan.spec.serialized_file is not None or checkpoint is not None
    if is_built_in and not has_weights and plan.spec.handler not in _NEED_NO_FILE:
        warnings.append(f"the handler {plan.spec.handler} needs a serialized file, and there is none")
    configs = [name for name in plan.members if name.rpartition("/")[2] == _FOLDERS_CONFIG and name.count("/") <= 1]
    if plan.spec.handler == _FOLDER_HANDLER and not configs:
        warnings.append(
            f"there is no {_FOLDERS_CONFIG}, neither at the archive's top nor in a folder: --extra-file adds the "
            "folder that save_pretrained wrote"
        )
    if plan.spec.handler == _SCRIPT_HANDLER and plan.members.keys().isdisjoint(_SCRIPTS):
        warnings.append(
            f"there is neither {' nor '.join(_SCRIPTS)}: {_SCRIPT_HANDLER} then loads a TorchScript model; "
            "--extra-files adds a script"
        )
    return warnings


def _foresee_checkpoint(plan: Plan, named: str) -> list[str]:
    """What a server would say of the weights that the configuration names by `checkpoint`."""
    spec, below = plan.spec, f"{named.strip('/')}/"
    if spec.serialized_file is not None:
        return [f"servers will refuse this archive: it has the weights {spec.serialized_file.name}, and checkpoint too"]
    if spec.model_file is None:
        return [f"checkpoint is {named}, and there is no --model-file, whose class the weights are of"]
    if is_prefix(named):
        return []
    packed = {name: path for name, path in plan.members.items() if name.startswith(below)}
    if not packed:
        return [f"checkpoint is {named}, which is not packed: servers look in their model store; --extra-file packs it"]
    folders = {Path(str(path).removesuffix(name.removeprefix(below))) for name, path in packed.items()}
    try:
        if len(folders) == 1:
            read_checkpoint(folders.pop())
    except BadCheckpoint as error:
        return [f"servers will refuse this archive. {error.message}"]
    return []


def _compare_trace(trace: Path | None, traced_from: str | None, samples: list[Path] | None) -> list[str]:
    """Warnings about a trace that answers as its class. Raises CannotArchive for one that does not."""
    if traced_from is None:
        return []
    if trace is None or trace.suffix != ".pt":
        raise CannotArchive(f"--traced-from is for a trace (.pt), and there is {trace or 'no serialized file'}.")
    from marserve.archive.writing.traced import check_trace  # here: few archives are compared

    return check_trace(trace, traced_from, samples or [])


def _check_handler(spec: ArchiveSpec) -> None:
    """Raise CannotArchive for a missing handler, and for a built-in one with a file that it cannot load."""
    if spec.runtime == "LSP" or spec.brings_program:
        return
    module = spec.handler.partition(":")[0]
    ours = ", ".join(BUILT_IN_HANDLERS)
    if module == _SCRIPT_HANDLER:
        return
    if module in BUILT_IN_HANDLERS:
        own = _OWN_KINDS.get(module)
        endings = (own or _PROGRAMS) if spec.model_file is None else _WEIGHTS
        file = spec.serialized_file
        if file is not None and file.suffix not in endings:
            weights = "; weights alone need --model-file" if file.suffix in _WEIGHTS and own is None else ""
            raise CannotArchive(
                f"{file} is no file that {module} can load: it must end in {', '.join(endings)}{weights}. "
                "Anything else needs a handler of your own, which opens it."
            )
        return
    path = Path(module if module.endswith(".py") else f"{module}.py")
    if module and not path.is_file():
        hint = did_you_mean(module, BUILT_IN_HANDLERS, ".")
        raise CannotArchive(f"Handler file does not exist: {path}. Built-in handlers are {ours}{hint}")


def _check_export_path(export_path: Path) -> None:
    """Raise CannotArchive if the folder's parent is missing: that is more likely a typing error."""
    if not export_path.absolute().parent.is_dir():
        raise CannotArchive(
            f"The export path {export_path} cannot be made: there is no folder {export_path.parent}. Create that first."
        )


def _read_config(data: bytes, path: Path) -> ModelConfig:
    """The configuration. Raises CannotArchive for one of which a server would ignore all."""
    config = parse_model_config(data, path.name)
    if config.document is None:
        raise CannotArchive(f"{path} cannot be used: {config.defect}.")
    return config


def _raised(config: ModelConfig, document: dict[str, Any]) -> list[str]:
    """A sentence for each number that a server raises to its least value (contract 7.1: `batchSize: 0` is 1)."""
    sentences, warned = [], {warning.key for warning in config.warnings}
    for key, option in BY_KEY.items():
        value, effective = document.get(key), config.said.get(option.attribute)
        if type(value) is not int or value > 0 or not isinstance(effective, int | float):
            continue
        if effective > value and key not in warned:
            sentences.append(f"{key} is {value}, which counts as {effective:g}")
    return sentences


def _write(
    output: Output, plan: Plan, export_path: Path, archive_format: str, force: bool
) -> tuple[Path, list[Packed]]:
    packed: list[Packed] = []
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not output.shows_progress,
    ) as progress:
        task = progress.add_task(f"Writing {plan.spec.model_name}", total=plan.total_bytes)
        path = write_archive(
            plan,
            export_path,
            archive_format=archive_format,
            force=force,
            source_date_epoch=read_source_date_epoch(),
            on_member=packed.append,
            on_bytes=lambda count: progress.advance(task, count),
        )
    return path, packed


def _say_left_out(packed: list[Packed]) -> list[str]:
    return [
        f"{member.name}: {len(member.left_out)} debug records with paths of this machine were left out"
        for member in packed
        if member.left_out
    ]
