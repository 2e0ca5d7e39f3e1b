"""`ts` is ours or TorchServe's, never both."""

from __future__ import annotations

from pathlib import Path

import pytest

from marserve_handlers.support.torchserve.beside_torchserve import refuse_beside_torchserve


def test_a_folder_that_has_both_is_refused(tmp_path: Path) -> None:
    """The message says what to uninstall."""
    (tmp_path / "torchserve-0.12.0.dist-info").mkdir()

    with pytest.raises(ImportError, match="both own the package ts"):
        refuse_beside_torchserve([str(tmp_path / "ts")])


def test_others_do_not_matter(tmp_path: Path) -> None:
    """TorchServe elsewhere, other distributions here, and folders that cannot be listed."""
    (tmp_path / "marserve_ts-0.1.0.dist-info").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "torchserve-0.12.0.dist-info").mkdir()

    refuse_beside_torchserve([str(tmp_path / "ts"), str(tmp_path / "missing" / "ts")])
