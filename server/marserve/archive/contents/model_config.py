"""Reads the model's configuration (`model-config.yaml`): the keys of contract 7.1 and ours. Knows no server's defaults.

The keys are those of `model_options.py`. As the contract wants, a value that cannot be used is left out and the model
still loads; unlike TorchServe, a sentence about it goes to `ModelConfig.warnings`. YAML that tries to build objects, or
that expands beyond bounds, is refused.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from marserve.archive.contents.manifest import Manifest
from marserve.archive.contents.runtime_options import check_runtime_options
from marserve.archive.reading.bounded_yaml import load_yaml
from marserve.errors import BadArchive, without_stop
from marserve.files.nearest import nearest
from marserve.files.regular import NotRegular, open_regular
from marserve.model_options import BY_KEY, NOTHING, ModelOptions, Said, read_value
from marserve.option_values import AuthorsOwn, Unusable
from marserve.remarks import Remark

_MAX_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the model's configuration says, as `said` of `model_options.py`.

    `document` is the whole file, for handlers (`context.model_yaml_config`); None without a file, or if it is not YAML.
    `defect` is why nothing of a file is used.
    """

    said: Said = NOTHING
    document: dict[str, Any] | None = None
    warnings: list[Remark] = field(default_factory=list)
    defect: str = ""

    @property
    def options(self) -> ModelOptions:
        """The configuration's options, with the defaults for those that it does not set."""
        return ModelOptions(**self.said)


_HANDLER_KEYS = ("handler", "pt2", "micro_batching", "pippy", "deepspeed", "dali")


def read_model_config(folder: Path, manifest: Manifest) -> ModelConfig:
    """Read the configuration that `manifest` names from the unpacked archive at `folder`.

    No name gives an empty `ModelConfig`; a file that is missing, or not YAML, the same with a warning (contract 7).
    Raises BadArchive for YAML with application tags, alias bombs, over 256 KiB or nested more than 64 deep, for
    a file name that leads outside of the archive, and for values of strict keys that cannot be used.
    """
    name = manifest.config_file
    if name is None:
        return ModelConfig()
    path = folder / name
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise BadArchive(f"configFile is {name!r}; it must name a file inside of the archive.")
    try:
        with open_regular(path) as file:
            data = file.read(_MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return ModelConfig(warnings=[Remark(f"the archive has no {name}, which its manifest names as configFile")])
    except OSError as error:
        if isinstance(error, NotRegular) or error.errno == errno.ELOOP:
            raise BadArchive(f"{name} cannot be read: {error.strerror}.") from error
        raise
    config = parse_model_config(data, name)
    check_runtime_options(config.document, manifest)
    return config


def parse_model_config(data: bytes, name: str = "model-config.yaml") -> ModelConfig:
    """The configuration in the YAML text `data`; `name` stands in warnings.

    Raises BadArchive as `read_model_config` does.
    """
    if len(data) > _MAX_BYTES:
        raise BadArchive(f"{name} has more than {_MAX_BYTES} bytes.")
    warnings: list[Remark] = []
    try:
        document = load_yaml(data, name, warnings)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        return _unused(name, "it is no YAML", line=0 if mark is None else mark.line + 1, is_wrong=True)
    except (UnicodeError, ValueError, OverflowError):
        return _unused(name, "it is no YAML", is_wrong=True)
    if document is None:
        return ModelConfig(document={})
    if not isinstance(document, dict):
        return _unused(name, "it must hold keys and values")
    said = _read_keys(document, warnings)
    _apply_torchrun(document, said)
    if "idle_timeout_s" not in said and said.get("min_workers") == 0:
        said["min_workers"] = 1  # the contract's 7.1: without our key there is always one
    return ModelConfig(Said(said), document, warnings)


def unused_workers(said: Said, has_idle_timeout: bool) -> str:
    """Why the numbers of workers of a configuration are not used; empty where they are, or where it has none."""
    least, most = said.get("min_workers") or 0, said.get("max_workers") or 0
    if not (least or most) or (least and most >= least) or (not least and has_idle_timeout):
        return ""
    if least and most:
        return (
            f"minWorkers {least} and maxWorkers {most} of the model's configuration are not used: maxWorkers must not "
            "be below minWorkers"
        )
    there, missing = (f"minWorkers {least}", "maxWorkers") if least else (f"maxWorkers {most}", "minWorkers")
    return f"{there} of the model's configuration is not used: it needs {missing} beside it"


def _unused(name: str, defect: str, *, line: int = 0, is_wrong: bool = False) -> ModelConfig:
    defect += f" in line {line}" if line else ""
    remark = Remark(f"{name} is not used: {defect}", line=line, is_wrong=is_wrong)
    return ModelConfig(warnings=[remark], defect=defect)


def read_declared(declared: Mapping[str, Any]) -> Said:
    """What an operator declares under the file's names.

    Raises ValueError and KeyError as `read_value` does.
    """
    said = {BY_KEY[name].attribute: read_value(name, value) for name, value in declared.items()}
    _apply_torchrun(dict(declared), said)
    return Said(said)


def _read_keys(document: dict[Any, Any], warnings: list[Remark]) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for name, value in document.items():
        option = BY_KEY.get(name)
        if option is None:
            near = nearest(str(name), BY_KEY, least=0.85, is_loose=True)
            if near is not None and name not in _HANDLER_KEYS:
                sentence = f"{name} is no key of the server; did you mean {near}?"
                warnings.append(Remark(sentence, key=name, is_wrong=True))
            continue
        try:
            said[option.attribute] = option.kind.read(value)
        except Unusable as error:
            if option.is_strict and not isinstance(error, AuthorsOwn):
                raise BadArchive(
                    f"{name} of the model's configuration is {_show(value)}; it must be {without_stop(error)}."
                ) from None
            sentence = f"{name} is {_show(value)}, which is not used: it must be {error}"
            warnings.append(Remark(sentence, key=name, is_wrong=True))
    return said


def _apply_torchrun(document: dict[Any, Any], said: dict[str, Any]) -> None:
    """`nproc-per-node` sets the parallel level; of it and `parallelLevel` the later one in the file wins (7.1).

    Without it there is one process, except beside `parallel`, which says how many there are.
    """
    torchrun = said.get("torchrun")
    if torchrun is None or ("parallel" in said and "nproc-per-node" not in torchrun):
        return
    names = list(document)
    is_later = "parallelLevel" not in names or names.index("torchrun") > names.index("parallelLevel")
    processes = torchrun.get("nproc-per-node", 1)
    if is_later and type(processes) is int and processes > 0:
        said["parallel_level"] = processes


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
