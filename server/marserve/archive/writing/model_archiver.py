"""The archiver as Python calls it: `ModelArchiver.generate_model_archive(config)`, TorchServe's names over `writer`."""

from __future__ import annotations

import enum
import os
from argparse import Namespace
from dataclasses import dataclass, field, fields
from pathlib import Path

from marserve.archive.writing.writer import ArchiveFormat, ArchiveSpec, write_archive


class RuntimeType(enum.Enum):
    """The runtimes that an archive may ask for."""

    PYTHON = "python"
    PYTHON3 = "python3"
    LSP = "LSP"


@dataclass
class ModelArchiverConfig:
    """What goes into an archive: the flags of `torch-model-archiver`. `extra_files` are separated by commas."""

    model_name: str
    handler: str
    version: str
    serialized_file: str | None = None
    model_file: str | None = None
    extra_files: str | None = None
    runtime: str = RuntimeType.PYTHON.value
    export_path: str = field(default_factory=os.getcwd)
    archive_format: ArchiveFormat = "default"
    force: bool = False
    requirements_file: str | None = None
    config_file: str | None = None

    @classmethod
    def from_args(cls, args: Namespace) -> ModelArchiverConfig:
        """The configuration of parsed flags of these names."""
        return cls(**{each.name: getattr(args, each.name) for each in fields(cls)})


class ModelArchiver:
    """Makes archives."""

    @staticmethod
    def generate_model_archive(config: ModelArchiverConfig) -> None:
        """Write the archive into `export_path`. Raises CannotArchive."""
        spec = ArchiveSpec(
            config.model_name,
            config.version,
            config.handler,
            _path(config.serialized_file),
            _path(config.model_file),
            tuple(word.strip() for word in (config.extra_files or "").split(",") if word.strip()),
            _path(config.requirements_file),
            _path(config.config_file),
            config.runtime,
        )
        write_archive(spec, Path(config.export_path), archive_format=config.archive_format, force=config.force)


def _path(name: str | None) -> Path | None:
    return Path(name) if name else None
