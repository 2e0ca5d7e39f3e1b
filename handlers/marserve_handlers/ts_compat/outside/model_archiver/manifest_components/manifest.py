"""The archiver's name for a manifest and its runtimes."""

from marserve.archive.model_archiver import RuntimeType
from marserve.archive.model_export import Manifest

__all__ = ["Manifest", "RuntimeType"]
