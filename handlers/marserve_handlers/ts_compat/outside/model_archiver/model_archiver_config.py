"""The archiver's name for `ModelArchiverConfig`."""

from marserve.archive.writing.model_archiver import ModelArchiverConfig

__all__ = ["ModelArchiverConfig"]
