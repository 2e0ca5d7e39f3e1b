"""The archiver in the two calls that other tools make. They are defined here: tests replace names of this module."""

import contextlib
import logging
import os
import shutil
from typing import Any

from marserve.archive.writing.model_archiver import ModelArchiverConfig
from marserve.errors import CannotArchive as ModelArchiverError
from model_archiver.arg_parser import ArgParser
from model_archiver.model_packaging_utils import ModelExportUtils

__all__ = [
    "ArgParser",
    "ModelArchiverConfig",
    "ModelArchiverError",
    "ModelExportUtils",
    "generate_model_archive",
    "package_model",
]

FILES = ("serialized_file", "model_file", "handler", "extra_files", "requirements_file", "config_file")


def package_model(args: Any, manifest: str) -> None:
    """Write the archive that `args` (the archiver's flags as attributes; those left out are None) describe.

    It holds this text of a manifest. Raises ModelArchiverError and FileNotFoundError, which are logged too.
    """
    model_name, archive_format = args.model_name, getattr(args, "archive_format", None) or "default"
    export_path = getattr(args, "export_path", None) or os.getcwd()
    folder = None
    try:
        ModelExportUtils.validate_inputs(model_name, export_path)
        force = getattr(args, "force", False)
        export_path = ModelExportUtils.check_mar_already_exists(model_name, export_path, force, archive_format)
        folder = ModelExportUtils.copy_artifacts(
            model_name,
            runtime=getattr(args, "runtime", None) or "python",
            **{name: getattr(args, name, None) for name in FILES},
        )
        ModelExportUtils.archive(export_path, model_name, folder, manifest, archive_format)
    except (ModelArchiverError, FileNotFoundError) as error:
        logging.error("%s", error)
        raise
    finally:
        if isinstance(folder, str):
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(folder))  # the private folder around it, which is empty now


def generate_model_archive(config: ModelArchiverConfig | None = None) -> None:
    """Write the archive of a configuration, of this process's arguments without one. Raises as `package_model`."""
    logging.basicConfig(format="%(levelname)s - %(message)s")
    args = ArgParser.export_model_args_parser().parse_args() if config is None else config
    package_model(args, manifest=ModelExportUtils.generate_manifest_json(args))
