"""The archiver's name for its error."""

from marserve.errors import CannotArchive as ModelArchiverError

__all__ = ["ModelArchiverError"]
