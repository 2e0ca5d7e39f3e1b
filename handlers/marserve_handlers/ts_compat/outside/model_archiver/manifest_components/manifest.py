"""The archiver's name for the runtimes of a manifest."""

from marserve.archive.model_archiver import RuntimeType

__all__ = ["RuntimeType"]
