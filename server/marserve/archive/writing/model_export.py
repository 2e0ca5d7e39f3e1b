"""The archiver's steps one by one, as tools that package models call them: TorchServe's names over `writer`.

`ModelExportUtils` judges names and places, makes a manifest's text, gathers files and writes an archive of them;
`Model` and `Manifest` are the parts of a manifest. Files are gathered in a private folder, never in one that another
program may own.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Collection as Container
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from marserve import __version__
from marserve.archive.contents.built_in_handlers import BUILT_IN_HANDLERS
from marserve.archive.contents.manifest import MANIFEST_PATH
from marserve.archive.writing.model_archiver import RuntimeType
from marserve.archive.writing.writer import (
    Collection,
    Packing,
    check_name,
    created_on,
    handler_file,
    output_path,
    walk,
    write_packing,
)
from marserve.errors import CannotArchive

archiving_options = {"tgz": ".tar.gz", "no-archive": "", "zip-store": ".mar", "default": ".mar"}
"""The ending of an archive by its format."""

model_handlers = dict.fromkeys(BUILT_IN_HANDLERS, "")
"""Handlers that need no file."""

_FILES = ("serialized_file", "model_file", "requirements_file", "config_file")

Text = str | os.PathLike[str]


class Model:
    """A manifest's words about the model. Of paths the last parts count."""

    def __init__(
        self,
        model_name: str,
        serialized_file: Text | None,
        handler: Text,
        model_file: Text | None = None,
        model_version: str | None = None,
        extensions: Any = None,
        requirements_file: Text | None = None,
        config_file: Text | None = None,
    ) -> None:
        self.model_name = model_name
        self.serialized_file = _last_part(serialized_file)
        self.handler = _last_part(handler)
        self.model_file = _last_part(model_file)
        self.model_version = model_version
        self.extensions = extensions
        self.requirements_file = _last_part(requirements_file)
        self.config_file = _last_part(config_file)

    def to_dict(self) -> dict[str, Any]:
        """The manifest's section `model`, without what is not given."""
        words = {
            "modelName": self.model_name,
            "serializedFile": self.serialized_file,
            "handler": self.handler,
            "modelFile": self.model_file,
            "modelVersion": self.model_version,
            "extensions": self.extensions,
            "requirementsFile": self.requirements_file,
            "configFile": self.config_file,
        }
        return {key: value for key, value in words.items() if value}

    @property
    def model_dict(self) -> dict[str, Any]:
        """The same, under TorchServe's name."""
        return self.to_dict()

    def __str__(self) -> str:
        return json.dumps(self.to_dict())

    __repr__ = __str__


class Manifest:
    """A manifest; its text is JSON. `created` is in seconds since 1970, now if None."""

    def __init__(self, runtime: str, model: Model, *, created: float | None = None) -> None:
        """Raises ValueError for a runtime that there is not."""
        self.runtime = RuntimeType(runtime)
        self.model = model
        self._created = time.time() if created is None else created

    @property
    def manifest_dict(self) -> dict[str, Any]:
        """The document."""
        return {
            "createdOn": created_on(self._created),
            "runtime": self.runtime.value,
            "model": self.model.to_dict(),
            "archiverVersion": __version__,
        }

    def __str__(self) -> str:
        return json.dumps(self.manifest_dict, indent=2)

    __repr__ = __str__


class ModelExportUtils:
    """The steps. `archive_format` is a key of `archiving_options`, `args` an object with the archiver's flags."""

    @staticmethod
    def get_archive_export_path(export_file_path: Text, model_name: str, archive_format: str) -> str:
        """Where the archive goes."""
        return os.path.join(export_file_path, f"{model_name}{archiving_options[archive_format]}")

    @staticmethod
    def check_mar_already_exists(
        model_name: str, export_file_path: Text | None, overwrite: bool, archive_format: str = "default"
    ) -> Text:
        """The folder, which is the working directory if None. Raises CannotArchive for an archive that is there."""
        folder = os.getcwd() if export_file_path is None else export_file_path
        output = ModelExportUtils.get_archive_export_path(folder, model_name, archive_format)
        if os.path.exists(output):
            if not overwrite:
                raise CannotArchive(f"{output} already exists. Use --force (-f) to overwrite it.")
            logging.warning("Overwriting %s ...", output)
        return folder

    @staticmethod
    def find_unique(files: Iterable[str], suffix: str) -> str | None:
        """The one file with this ending, None without one. Raises CannotArchive if there are several."""
        found = [name for name in files if name.endswith(suffix)]
        if len(found) > 1:
            raise CannotArchive(f"There are {len(found)} {suffix} files, and one can be used: {', '.join(found)}")
        return found[0] if found else None

    @staticmethod
    def generate_model(modelargs: Any) -> Model:
        """The section `model` of the flags."""
        return Model(
            modelargs.model_name,
            getattr(modelargs, "serialized_file", None),
            modelargs.handler,
            getattr(modelargs, "model_file", None),
            getattr(modelargs, "version", None),
            requirements_file=getattr(modelargs, "requirements_file", None),
            config_file=getattr(modelargs, "config_file", None),
        )

    @staticmethod
    def generate_manifest_json(args: Any) -> str:
        """The manifest's text. `createdOn` is the newest file's time, so that equal files give equal text.

        Raises ValueError for a runtime that there is not.
        """
        paths = [getattr(args, name, None) for name in _FILES]
        times = [os.path.getmtime(path) for path in (*paths, args.handler) if path and os.path.isfile(path)]
        runtime = getattr(args, "runtime", None) or RuntimeType.PYTHON.value
        return str(Manifest(runtime, ModelExportUtils.generate_model(args), created=max(times, default=None)))

    @staticmethod
    def clean_temp_files(temp_files: Iterable[Text]) -> None:
        """Delete files."""
        for path in temp_files:
            os.remove(path)

    @staticmethod
    def make_dir(d: Text) -> None:
        """Make a folder if it is missing, and those above it."""
        os.makedirs(d, exist_ok=True)

    @staticmethod
    def copy_artifacts(model_name: str, *, runtime: str = "python", **kwargs: Text | None) -> str:
        """Copy the flags' files into a new folder; gives its path, which is the caller's to delete.

        Its parent is a private temporary folder. Raises FileNotFoundError, and CannotArchive for names that clash.
        """
        collected = Collection()
        for name in _FILES:
            path = kwargs.get(name)
            if path:
                collected.add(os.path.basename(path), _existing(path))
        handler = os.fspath(kwargs.get("handler") or "")
        try:
            found = handler_file(handler, runtime) if handler else None
        except CannotArchive as error:
            raise FileNotFoundError(errno.ENOENT, error.message, handler) from None
        if found is not None:
            collected.add(found.name, found)
        words = [word.strip() for word in os.fspath(kwargs.get("extra_files") or "").split(",") if word.strip()]
        warnings: list[str] = []
        try:
            collected.add_extra(words, warnings, leave_out=MANIFEST_PATH)
        except CannotArchive as error:
            missing = [word for word in words if not set(word) & set("*?[") and not os.path.exists(word)]
            if missing:
                raise FileNotFoundError(f"File does not exist: {missing[0]}") from error
            raise
        for warning in warnings:
            logging.warning("%s", warning)
        folder = Path(tempfile.mkdtemp(prefix="model-archiver-"), model_name)
        try:
            folder.mkdir()
            for member, path in collected.members.items():
                target = folder / member
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)
        except BaseException:
            shutil.rmtree(folder.parent, ignore_errors=True)
            raise
        return str(folder)

    @staticmethod
    def archive(
        export_file: Text, model_name: str, model_path: Text, manifest: str, archive_format: str = "default"
    ) -> None:
        """Write a folder's files and the manifest as an archive, in the place of one that is there.

        The folder is left as it is; with `no-archive`, and where it is the archive itself, it gets the manifest.
        Raises CannotArchive.
        """
        if archive_format not in archiving_options:
            raise CannotArchive(
                f"There is no archive format {archive_format!r}; choose one of {', '.join(archiving_options)}."
            )
        output, folder = output_path(model_name, Path(export_file), archive_format), Path(model_path)
        if archive_format == "no-archive" and output.resolve() == folder.resolve():
            place = folder / MANIFEST_PATH
            place.parent.mkdir(exist_ok=True)
            place.write_text(manifest, "utf-8")
            return
        members = {name: path for name, path in walk(folder) if name != MANIFEST_PATH}
        packing = Packing(members, output, MANIFEST_PATH, lambda _: manifest.encode())
        write_packing(packing, output, archive_format, force=True)

    @staticmethod
    def directory_filter(directory: str, unwanted_dirs: Container[str]) -> bool:
        """Whether a folder of this name belongs into an archive."""
        return directory not in unwanted_dirs and not directory.startswith(".")

    @staticmethod
    def file_filter(current_file: str, files_to_exclude: Container[str]) -> bool:
        """Whether a file of this name belongs into an archive."""
        if current_file in files_to_exclude or current_file == "MANIFEST.json":
            return False
        return not current_file.endswith((".pyc", ".DS_Store", ".mar"))

    @staticmethod
    def check_model_name_regex_or_exit(model_name: str) -> None:
        """Raise CannotArchive for a name with other characters than letters, digits, hyphens, underscores and dots."""
        check_name("model", model_name)

    @staticmethod
    def validate_inputs(model_name: str, export_path: Text) -> None:
        """Raise CannotArchive for a name that cannot be used, and for an export path that is no folder."""
        ModelExportUtils.check_model_name_regex_or_exit(model_name)
        if not os.path.isdir(export_path):
            raise CannotArchive(f"The export path {os.fspath(export_path)} is no folder; make it, or name another.")


def _last_part(path: Text | None) -> str | None:
    return os.fspath(path).rstrip("/").rpartition("/")[2] if path else None


def _existing(path: Text) -> Path:
    if not os.path.isfile(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
    return Path(path)
