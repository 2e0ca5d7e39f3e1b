"""The archiver's name for a manifest and its runtimes."""

from marserve.archive.writing.model_archiver import RuntimeType
from marserve.archive.writing.model_export import Manifest

__all__ = ["Manifest", "RuntimeType"]
