"""The archiver's name for `ModelArchiver`."""

from marserve.archive.writing.model_archiver import ModelArchiver

__all__ = ["ModelArchiver"]
