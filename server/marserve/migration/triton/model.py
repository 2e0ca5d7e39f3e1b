"""One model of a repository: which versions become archives, with which files, configuration and declaration.

Each step reads its part of the configuration. What is wrong with the model as a whole, or with one version, refuses
that with a finding; what no step has asked for is a finding, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from marserve.archive.contents.declaration import DECLARATION_PATH, parse_declaration
from marserve.archive.writing.sources import CONFIG_NAME as MODEL_CONFIG
from marserve.archive.writing.sources import is_program
from marserve.archive.writing.writer import ArchiveSpec, Plan, plan_archive
from marserve.errors import BadArchive, CannotArchive
from marserve.files.regular import TooLarge, read_regular
from marserve.migration.triton.config_text import MOST_BYTES, Block, ConfigFault, read_config
from marserve.migration.triton.notes import Notes, Refused
from marserve.migration.triton.onnx_graph import NoOnnx, read_graph
from marserve.migration.triton.repository import CONFIG_NAME, ModelFolder, check_inside, files_of
from marserve.migration.triton.serving import (
    batching,
    described_ensemble,
    instances,
    onnx_session,
    other_parameters,
    refuse_schedulers,
    response_cache,
    served_versions,
    warm_up,
)
from marserve.migration.triton.tensors import Tensors, for_onnx, for_torchscript, read_tensors

HANDLER: Final = "base_handler"
_ONNX, _TORCH, _ENSEMBLE = "onnxruntime", "pytorch", "ensemble"
_BACKENDS: Final = {
    "onnxruntime_onnx": _ONNX,
    "pytorch_libtorch": _TORCH,
    "tensorrt_plan": "tensorrt",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
}
# The file of a version by its backend, as far as its name alone says the backend.
_FILES: Final = {
    "model.onnx": _ONNX,
    "model.pt": _TORCH,
    "model.plan": "tensorrt",
    "model.graphdef": "tensorflow",
    "model.savedmodel": "tensorflow",
    "model.xml": "openvino",
    "model.py": "python",
    "model.dali": "dali",
}
_FILE_OF: Final = {_ONNX: "model.onnx", _TORCH: "model.pt"}
_LARGEST_CONFIG: Final = 1 << 18  # what a server reads of a model's configuration
# Known to Triton, and without a counterpart.
_LEFT: Final = (
    "cc_model_filenames",
    "metric_tags",
    "model_metrics",
    "model_operations",
    "model_repository_agents",
    "optimization",
)


@dataclass(frozen=True, slots=True)
class PlannedVersion:
    """One version that becomes an archive."""

    model: str
    number: int
    plan: Plan

    @property
    def archive(self) -> str:
        """The name of its file. No two versions share one: the number follows the last hyphen."""
        return f"{self.model}-{self.number}.mar"


def plan_model(model: ModelFolder, root: Path, notes: Notes) -> list[PlannedVersion]:
    """The versions of a model, the highest first; empty for a refused one. `notes` are those about its folder."""
    config_notes = notes.of(f"{model.name}/{CONFIG_NAME}")
    try:
        config, has_file = _read(model, root)
        config_notes = config_notes if has_file else notes
        return _plan(model, root, config, config_notes)
    except ConfigFault as fault:
        config_notes.action(fault.line, f"column {fault.column}: {fault.sentence}", "mend the line")
    except Refused as refused:
        (config_notes if refused.line else notes).refuse(refused)
    return []


def _read(model: ModelFolder, root: Path) -> tuple[Block, bool]:
    """The model's configuration, and whether there is a file with it. Raises ConfigFault and Refused."""
    path = model.folder / CONFIG_NAME
    check_inside(path, root, CONFIG_NAME)
    try:
        return read_config(read_regular(path, MOST_BYTES)), True
    except FileNotFoundError:
        return Block(0, 0), False
    except TooLarge:
        raise Refused(1, f"it has more than {MOST_BYTES} bytes", "leave in it what Triton reads") from None
    except OSError as error:
        raise Refused(1, f"it cannot be read: {error.strerror}", "put a file there that can be read") from None


def _plan(model: ModelFolder, root: Path, config: Block, notes: Notes) -> list[PlannedVersion]:
    if config.text("name", model.name) != model.name:
        said = f"name is {config.text('name')!r}, and the folder is {model.name!r}"
        raise Refused(config.line_of("name"), said, "give both one name, as Triton asks for")
    numbers = _numbers(model, config, notes)
    backend = _backend(config, model, numbers, root)
    refuse_schedulers(config)
    asked = read_tensors(config, notes)
    found: list[tuple[int, Tensors, Path, dict[str, Path]]] = []
    for number in reversed(numbers):
        folder = model.folder / str(number)
        spot = notes.of(f"{model.name}/{number}")
        try:
            main, members = _files(config, backend, folder, root)
            found.append((number, _tensors(asked, backend, main, config, notes), main, members))
        except Refused as refused:
            (notes if refused.line else spot).refuse(refused)
    if not found:
        return []
    options = _options(config, backend, found[0][1].max_batch_size, notes)
    labels = _labels(found[0][1], model, root, notes)
    planned = []
    for number, tensors, main, members in found:
        try:
            planned.append(_planned(model.name, number, tensors, main, {**members, **labels}, dict(options)))
        except Refused as refused:
            notes.of(f"{model.name}/{number}").refuse(refused)
        else:
            notes.of(f"{model.name}/{number}").works(0, f"is version {number} of {model.name}, by {backend}")
    _note_rest(config, notes)
    return planned


def _numbers(model: ModelFolder, config: Block, notes: Notes) -> list[int]:
    if config.text("platform") == _ENSEMBLE or config.text("backend") == _ENSEMBLE or "ensemble_scheduling" in config:
        steps = described_ensemble(config)
        raise Refused(
            config.line_of("ensemble_scheduling"),
            f"ensemble: {steps or 'without steps'}. A workflow hands whole answers on and knows no names of tensors",
            "call the models from a handler by context.call (docs/declared-handlers.md), or from the client",
        )
    return served_versions(config, model.versions, notes)


def _backend(config: Block, model: ModelFolder, numbers: list[int], root: Path) -> str:
    """The backend that runs the model. Raises Refused for one that is not served here."""
    platform, backend = config.text("platform"), config.text("backend")
    runtime = config.text("runtime")
    field = "platform" if "platform" in config else "backend"
    found = backend or _BACKENDS.get(platform, platform)
    if not found:
        there = {name.partition("/")[0] for each in numbers for name in files_of(model.folder / str(each), root)}
        found = next((known for name, known in _FILES.items() if name in there), "")
        if not found:
            raise Refused(
                config.line_of(field) if field in config else 0,
                f"neither backend nor platform is said, and its versions have none of {', '.join(_FILES)}",
                "write a backend into config.pbtxt",
            )
    if found in _FILE_OF and runtime in ("", f"libtriton_{found}.so") and platform != "torch_aoti":
        return found
    word = f"runtime {runtime}" if runtime and found in _FILE_OF else f"{field} {platform or backend or found}"
    raise Refused(
        config.line_of("runtime" if runtime else field) if field in config else 0,
        f"{word}: marserve runs ONNX (onnxruntime) and TorchScript (pytorch_libtorch) of a repository",
        "export the model to one of them, or serve it with a handler of your own (docs/handlers.md)",
    )


def _files(config: Block, backend: str, folder: Path, root: Path) -> tuple[Path, dict[str, Path]]:
    """The version's model file, and the other files by their names in the archive. Raises Refused."""
    name = config.text("default_model_filename") or _FILE_OF[backend]
    line = config.line_of("default_model_filename") if "default_model_filename" in config else 0
    if "/" in name or name.startswith("."):
        raise Refused(line, f"default_model_filename is {name!r}", "name a file of the version's folder")
    files = files_of(folder, root)
    if name not in files and f"{name}/{name}" in files:  # a folder, with weights in files of their own beside the model
        inner = {each.removeprefix(f"{name}/"): path for each, path in files.items() if each.startswith(f"{name}/")}
        files = {**{each: path for each, path in files.items() if not each.startswith(f"{name}/")}, **inner}
    main = files.pop(name, None)
    if main is None:
        there = ", ".join(sorted(files)[:8]) or "no files"
        raise Refused(
            0, f"there is no {name}, but {there}", "bring the model's file, or name it by default_model_filename"
        )
    ending = Path(_FILE_OF[backend]).suffix
    if main.suffix != ending:
        raise Refused(line, f"the model's file is {name}", f"give it a name that ends in {ending}")
    return main, files


def _tensors(asked: Tensors, backend: str, main: Path, config: Block, notes: Notes) -> Tensors:
    try:
        if backend == _TORCH:
            if not is_program(main):
                raise Refused(0, f"{main.name} is no TorchScript", "save the model by torch.jit.save")
            return for_torchscript(asked, config, notes)
        return for_onnx(asked, read_graph(main), config, notes)
    except NoOnnx as error:
        raise Refused(0, f"{main.name} is no ONNX model: {error}", "export it again") from None
    except OSError as error:
        raise Refused(0, f"{main.name} cannot be read: {error.strerror}", "let it be read") from None


def _options(config: Block, backend: str, max_batch_size: int, notes: Notes) -> dict[str, Any]:
    options = {
        **batching(config, max_batch_size, notes),
        **instances(config, notes),
        **warm_up(config, notes),
    }
    response_cache(config, notes)
    if backend == _ONNX:
        options |= onnx_session(config, notes)
    else:
        other_parameters(config, notes)
    return options


def _labels(tensors: Tensors, model: ModelFolder, root: Path, notes: Notes) -> dict[str, Path]:
    """The files of labels, which lie beside `config.pbtxt`, by their names in the archive. Raises Refused."""
    found: dict[str, Path] = {}
    for tensor in tensors.outputs:
        if not tensor.labels:
            continue
        path = model.folder / tensor.labels
        if "/" in tensor.labels or tensor.labels.startswith("."):
            raise Refused(tensor.line, f"label_filename is {tensor.labels!r}", "name a file beside config.pbtxt")
        if not path.is_symlink() and not path.is_file():
            raise Refused(tensor.line, f"there is no {tensor.labels} beside config.pbtxt", "bring the file of labels")
        check_inside(path, root, tensor.labels)
        found[tensor.labels] = path
        notes.works(tensor.line, f"label_filename {tensor.labels}: classifications of {tensor.name} have its labels")
    return found


def _planned(
    model: str, number: int, tensors: Tensors, main: Path, members: dict[str, Path], options: dict[str, Any]
) -> PlannedVersion:
    document = {**options, "signature": tensors.signature()}
    # Unsorted: tensors stand in the order of the program's.
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True).encode()
    declaration = tensors.declaration()
    if len(text) > _LARGEST_CONFIG:
        raise Refused(0, f"its configuration would have {len(text)} bytes", f"it may have {_LARGEST_CONFIG}: name less")
    own = next((name for name in members if name == MODEL_CONFIG or name.startswith("MAR-INF/")), None)
    if own is not None:
        raise Refused(0, f"it has a file {own}, which archives have for themselves", "move it elsewhere")
    spec = ArchiveSpec(model, str(number), HANDLER, serialized_file=main, config_file=Path(MODEL_CONFIG))
    try:
        parse_declaration(declaration)
        plan = plan_archive(spec, members, {MODEL_CONFIG: text, DECLARATION_PATH: declaration})
    except (BadArchive, CannotArchive) as error:
        raise Refused(0, error.message.rstrip("."), "change what the sentence names") from None
    return PlannedVersion(model, number, plan)


def _note_rest(config: Block, notes: Notes) -> None:
    """Note the fields that were not asked for."""
    for name, line in config.unread():
        if name.partition(".")[0] in _LEFT:
            notes.differs(line, f"{name} is left out: there is no such setting here")
        else:
            notes.differs(line, f"{name} is left out")
