"""The archiver's name for a manifest's section `model`."""

from marserve.archive.writing.model_export import Model

__all__ = ["Model"]
