"""What a worker's log shows of torchao, which is imported at each load of some builds. A stand-in warns as it does."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from marserve_handlers.optimising.builds import CannotBuild
from marserve_handlers.optimising.builds.aot_int8 import import_torchao

WARNS = """
import logging

logging.getLogger("torchao").warning("Failed to load _C_mxfp8.so")
logging.getLogger("torch.utils._pytree").warning("is deprecated")
logging.getLogger("torchao").error("no memory")
"""


@pytest.fixture
def torchao(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of that name, of which nothing stays imported."""
    package = tmp_path / "torchao"
    package.mkdir()
    (package / "__init__.py").write_text(WARNS)
    (package / "quantization.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        del sys.modules[name]


def test_warnings_of_its_import_are_not_logged_and_errors_and_later_warnings_are(
    torchao: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Kernels for graphics cards that a processor's torch cannot load look like a fault, and are none."""
    import_torchao("quantization")
    assert [record.message for record in caplog.records] == ["no memory"]

    logging.getLogger("torchao").warning("an odd shape")
    logging.getLogger("torch.utils._pytree").warning("another")
    assert [record.message for record in caplog.records] == ["no memory", "an odd shape", "another"]


def test_levels_are_as_before_after_an_import_that_fails(torchao: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The build says why it cannot be made."""
    with pytest.raises(CannotBuild, match=r"torchao is installed, and has no quantization\.pt2e"):
        import_torchao("quantization.pt2e")

    logging.getLogger("torchao").warning("an odd shape")
    assert [record.message for record in caplog.records] == ["no memory", "an odd shape"]
