"""A model's configuration with other values."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from marserve.tuning.patch import declaration, patch, patched, values_of
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


THREADS = values_of(Setting(Layout(2, "1.0", 3), 16, 0.01), {"intra": 8, "inter": 2})


def test_threads_are_a_map_of_which_the_other_part_stays() -> None:
    """Written in braces or in lines of their own, they are replaced whole; what stands behind a key stays."""
    for before in ("threads: {intra: 8, inter: 2} # all", "threads: # all\n  intra: 8\n\n  inter: 2"):
        after = patched(f"batchSize: 1\n{before}\nonCrash: fail\n", THREADS)

        assert after.startswith("batchSize: 16\nthreads: {intra: 3, inter: 2} # all\nonCrash: fail\n")
        assert yaml.safe_load(after)["threads"] == {"intra": 3, "inter": 2}


def test_a_documents_lines_are_read_as_they_are_meant() -> None:
    """Also names that look like numbers."""
    for model, version in (("digits", "1.0"), ("1.0", "2"), ("true", "yes"), ("a: b", '"')):
        read = yaml.safe_load(declaration(model, version, THREADS, "7"))

        assert read == {
            "models": {
                model: {
                    "versions": {
                        version: {
                            "minWorkers": 2,
                            "maxWorkers": 2,
                            "batchSize": 16,
                            "maxBatchDelay": 10,
                            "threads": {"intra": 3, "inter": 2},
                        }
                    },
                    "default": "7",
                }
            }
        }


def test_an_empty_file_and_the_end_of_a_document_are_kept() -> None:
    """And quotes around a key."""
    assert patched("", {"batchSize": 2}) == "batchSize: 2\n"
    assert patched("'batchSize': 1\n...\n", {"batchSize": 2, "maxWorkers": 1}) == "'batchSize': 2\nmaxWorkers: 1\n...\n"


def test_lines_keep_their_ends() -> None:
    """Those that are changed, those that stay and those that are new; a file without one at its end gets none."""
    values = {"batchSize": 8, "maxWorkers": 1}

    assert patched("batchSize: 1\r\n# a\r\n", values) == "batchSize: 8\r\n# a\r\nmaxWorkers: 1\r\n"
    assert patched("# a\r\nbatchSize: 1", {"batchSize": 8}) == "# a\r\nbatchSize: 8"
    assert patched("# a\nbatchSize: 1", values) == "# a\nbatchSize: 8\nmaxWorkers: 1\n"
    assert patched("batchSize: 1\n...", values) == "batchSize: 8\nmaxWorkers: 1\n..."
    assert patch("batchSize: 1\r\n", "batchSize: 8\r\n").splitlines(keepends=True)[2:] == [
        "@@ -1 +1 @@\n",
        "-batchSize: 1\r\n",
        "+batchSize: 8\r\n",
    ]
    assert patch("batchSize: 1", "batchSize: 8").splitlines()[2:] == [
        "@@ -1 +1 @@",
        "-batchSize: 1",
        "\\ No newline at end of file",
        "+batchSize: 8",
        "\\ No newline at end of file",
    ]


PROGRAMS = {"git": ["git", "apply", "-p1", "-"], "patch": ["patch", "-p1"]}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    "before",
    [
        BEFORE,
        BEFORE.rstrip("\n"),
        BEFORE.replace("\n", "\r\n"),
        BEFORE.replace("\n", "\r\n").rstrip("\r\n"),
        BEFORE + "batchDelay: 1\nmaxBatchDelay: 100",
        "# a\x85# b\u2028batchSize: 1\r# c\x0c\nminWorkers: 1\n",
        "",
    ],
)
def test_the_patch_is_one_that_patch_takes(tmp_path: Path, program: str, before: str) -> None:
    """Whatever ends the file's lines, and whether anything ends the last one."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    after = patched(before, values_of(Setting(Layout(2), 16, 0.01)))
    (file := tmp_path / "model-config.yaml").write_bytes(before.encode())

    text = patch(before, after)
    subprocess.run(PROGRAMS[program], cwd=tmp_path, input=text.encode(), check=True)

    assert file.read_bytes().decode() == after
    assert patch(before, before) == ""
