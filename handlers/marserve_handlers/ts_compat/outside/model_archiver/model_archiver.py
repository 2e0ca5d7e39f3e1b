"""The archiver's name for `ModelArchiver`."""

from marserve.archive.model_archiver import ModelArchiver

__all__ = ["ModelArchiver"]
