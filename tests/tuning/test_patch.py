"""A model's configuration with other values."""

from __future__ import annotations

import subprocess
from pathlib import Path

import yaml

from marserve.tuning.patch import patch, patched, values_of
from marserve.tuning.settings import Layout, Setting

BEFORE = """# How it is served.
minWorkers: 1
batchSize: 4   # as measured in March
handler:
  batchSize: 99
  minWorkers: 5
"""


def test_lines_are_changed_and_nothing_else() -> None:
    """A key inside of another is another key; what is missing stands at the end."""
    after = patched(BEFORE, values_of(Setting(Layout(2), 16, 0.01)))

    assert after == (
        "# How it is served.\nminWorkers: 2\nbatchSize: 16   # as measured in March\nhandler:\n  batchSize: 99\n"
        "  minWorkers: 5\nmaxWorkers: 2\nmaxBatchDelay: 10\n"
    )
    assert yaml.safe_load(after)["handler"] == yaml.safe_load(BEFORE)["handler"]


def test_an_empty_file_and_the_end_of_a_document_are_kept() -> None:
    """And quotes around a key."""
    assert patched("", {"batchSize": 2}) == "batchSize: 2\n"
    assert patched("'batchSize': 1\n...\n", {"batchSize": 2, "maxWorkers": 1}) == "'batchSize': 2\nmaxWorkers: 1\n...\n"


def test_the_patch_is_one_that_patch_takes(tmp_path: Path) -> None:
    """By git, which is there."""
    after = patched(BEFORE, {"batchSize": 8})
    (tmp_path / "model-config.yaml").write_text(BEFORE)

    text = patch(BEFORE, after)
    subprocess.run(["git", "apply", "-p1", "-"], cwd=tmp_path, input=text.encode(), check=True)

    assert (tmp_path / "model-config.yaml").read_text() == after
    assert patch(BEFORE, BEFORE) == ""
