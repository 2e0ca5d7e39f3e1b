"""The archiver's import names: every name here is defined in marserve.archive.writing.model_archiver."""

from marserve import __version__
from marserve.archive.writing.model_archiver import ModelArchiver, ModelArchiverConfig

__all__ = ["ModelArchiver", "ModelArchiverConfig", "__version__"]
