"""A package of native code is not loaded for an archive that nobody trusts, whatever lies in the archive.

The package makes a file as soon as it is loaded, even where the load fails then.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from marserve_handlers.context import Context
from marserve_handlers.errors import ModelNotLoadable
from marserve_handlers.optimising.machine import cpu_flags, versions
from support.native_canary import canary_package

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from marserve_handlers.optimising.native_package import facts_of  # noqa: E402  # imports torch
from marserve_handlers.runtimes.exported import load_exported, load_native  # noqa: E402
from marserve_handlers.runtimes.optimised import load_optimised  # noqa: E402


class Load:
    """A load's context: what the operator allows, and what is said of the load."""

    def __init__(self, *, is_trusted: bool) -> None:
        self.is_trusted = is_trusted
        self.load_warnings: list[str] = []
        self.computes_on = self.build = ""


def write_facts(package: Path) -> None:
    """What a package that was made here would say of itself."""
    facts = {"torch": torch.__version__, "cpu": cpu_flags(), "least_rows": 1, "most_rows": 8}
    facts_of(package).write_text(json.dumps(facts))


def test_the_package_would_run_if_it_were_loaded(tmp_path: Path) -> None:
    """Without this the others say nothing. The load itself fails, and too late."""
    package, canary = tmp_path / "model.pt2", tmp_path / "canary"
    canary_package(package, canary)

    with pytest.raises(ModelNotLoadable, match=r"model\.pt2 is no package that this torch can load"):
        load_native(str(package), "cpu", Load(is_trusted=True))

    assert canary.exists()


@pytest.mark.parametrize("trust", [False, None, 1, "true"])
def test_the_model_of_an_archive_is_refused(trust: Any, tmp_path: Path) -> None:
    """By either way of loading it; a context of the author's own that says anything but True does not count."""
    package, canary = tmp_path / "model.pt2", tmp_path / "canary"
    canary_package(package, canary)
    write_facts(package)

    with pytest.raises(ModelNotLoadable, match=r"is a package of native code, .* not among trusted_models"):
        load_native(str(package), "cpu", Load(is_trusted=trust))
    with pytest.raises(ModelNotLoadable):
        load_native(str(package), "cpu", object())
    with pytest.raises(ModelNotLoadable):
        load_exported(str(package), "cpu")

    assert not canary.exists()


@pytest.mark.parametrize("build", ["aot", "aot-int8"])
def test_the_build_of_an_archive_leaves_the_parent(build: str, tmp_path: Path) -> None:
    """Whatever the archive says of its own digests, and of having been built here."""
    folder, canary = tmp_path / "archive", tmp_path / "canary"
    (folder / "optimised").mkdir(parents=True)
    (folder / "MAR-INF").mkdir()
    package = folder / "optimised" / "model.pt2"
    digest = hashlib.sha256(canary_package(package, canary)).hexdigest()
    write_facts(package)
    claims = {"is_trusted": True, "trusted_models": [digest], "digests": {"optimised/model.pt2": digest}}
    proof = {"format": 1, "build": build, "files": {}, "cpu": cpu_flags(), "versions": versions(), **claims}
    (folder / "MAR-INF" / "optimised.json").write_text(json.dumps(proof))
    context = Load(is_trusted=False)

    model = load_optimised(str(folder), lambda: "parent", 1, context)

    assert (model, context.build, context.computes_on) == ("parent", "", "")
    (warning,) = context.load_warnings
    assert "the archive is not among trusted_models" in warning
    assert not canary.exists()


def test_a_context_is_not_trusted_unless_somebody_says_so() -> None:
    """Its default."""
    assert Context.is_trusted is False
