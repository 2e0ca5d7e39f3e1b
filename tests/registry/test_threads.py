"""Threads of a model go before the server's."""

from __future__ import annotations

from pathlib import Path

from marserve.archive.contents.manifest import Manifest
from marserve.archive.contents.model_config import parse_model_config
from marserve.registry.catalogue.plan import Unpacked
from marserve.registry.intake.plan import make_plan
from marserve.registry.intake.registration import RegisterParameters, RegistryOptions


def threads_of(folder: Path, config: bytes) -> tuple[int, int]:
    """Inside of an operator, and for operators side by side, of a worker."""
    manifest = Manifest(has_model_entry=True, model_name="m", handler="base_handler", document={"model": {}})
    unpacked = Unpacked(folder, manifest, parse_model_config(config), is_private=False)
    load = make_plan(RegisterParameters("m.mar"), unpacked, RegistryOptions(threads=3)).load
    return load.threads, load.inter_threads


def test_the_models_threads_go_before_worker_threads(tmp_path: Path) -> None:
    """One of them may be left out."""
    assert threads_of(tmp_path, b"") == (3, 0)
    assert threads_of(tmp_path, b"threads: {intra: 2}\n") == (2, 0)
    assert threads_of(tmp_path, b"threads: {inter: 4}\n") == (3, 4)
    assert threads_of(tmp_path, b"threads: {intra: 2, inter: 4}\n") == (2, 4)
