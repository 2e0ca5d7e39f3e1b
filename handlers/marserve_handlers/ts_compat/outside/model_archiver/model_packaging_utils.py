"""The archiver's name for its steps one by one."""

from marserve.archive.writing.model_export import Manifest, Model, ModelExportUtils, archiving_options, model_handlers
from marserve.errors import CannotArchive as ModelArchiverError

__all__ = ["Manifest", "Model", "ModelArchiverError", "ModelExportUtils", "archiving_options", "model_handlers"]
