"""Workers in another language: which programs an archive may start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from marserve.archive.contents.model_config import parse_model_config
from marserve.errors import BadArchive
from marserve.option_values import Sample
from marserve.pool.options import PoolOptions
from marserve.registry.intake.worker_program import find_program

OPTIONS = PoolOptions("m", "1.0", 1, 1, worker_program=("node", "worker.mjs", "--fast"))


def find(folder: Path, options: PoolOptions = OPTIONS, **others: Any) -> tuple[str, ...]:
    """With a machine that has node alone."""
    (folder / "worker.mjs").touch()
    words: dict[str, Any] = {"archive": "m.mar", "is_trusted": True, "has_requirements": False, **others}
    return find_program(options, folder, which={"node": "/usr/bin/node"}.get, **words)


def test_a_trusted_archive_names_a_program_and_its_own_file(tmp_path: Path) -> None:
    """Both absolute; further words go with them. Without the key there is nothing."""
    assert find(tmp_path) == ("/usr/bin/node", str(tmp_path.resolve() / "worker.mjs"), "--fast")
    assert find(tmp_path, replace(OPTIONS, worker_program=()), is_trusted=False) == ()


def test_an_archive_that_is_not_trusted_starts_nothing(tmp_path: Path) -> None:
    """And the sentence has the setting that allows it."""
    with pytest.raises(BadArchive, match=r"trusted_models=m\.mar in the server's settings allows it"):
        find(tmp_path, is_trusted=False)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (("deno", "worker.mjs"), "there is no program deno on the server's PATH"),
        (("node", "none.mjs"), "none.mjs is no file of the archive"),
        (("node", "../../etc/passwd"), r"\.\./\.\./etc/passwd is no file of the archive"),
        (("node", "/etc/passwd"), "/etc/passwd is no file of the archive"),
        (("node", "x" * 300), "xxx is no file of the archive"),
        (("node", "loop"), "loop is no file of the archive"),
    ],
)
def test_what_is_not_there_is_named(program: tuple[str, ...], words: str, tmp_path: Path) -> None:
    """Also by a way out of the archive, by a name that no file can have, and by a link to itself."""
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(BadArchive, match=words):
        find(tmp_path, replace(OPTIONS, worker_program=program))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"is_concurrent": True}, "asyncCommunication"),
        ({"continuous_batching": True}, "continuousBatching"),
        ({"allowed_batch_sizes": (1, 2)}, "allowedBatchSizes"),
        ({"samples": (Sample(body=b"1"),)}, "samples"),
        ({"peak_flops": {"": 1e12}}, "peakFlops"),
        ({"parallel_type": "tp", "parallel_level": 2}, "parallelType"),
    ],
)
def test_what_such_a_worker_cannot_serve_is_refused(change: dict[str, Any], word: str, tmp_path: Path) -> None:
    """By the key."""
    with pytest.raises(BadArchive, match=f"does not go with {word}: leave one of the two out"):
        find(tmp_path, replace(OPTIONS, **change))
    with pytest.raises(BadArchive, match="does not go with a requirements file or useVenv"):
        find(tmp_path, has_requirements=True)


@pytest.mark.parametrize(
    "value", ["node", "[node]", "[/usr/bin/node, w.mjs]", "[node, 3]", "['', w.mjs]", '[node, "\\ud800"]']
)
def test_what_is_no_program_is_refused(value: str) -> None:
    """With the value."""
    with pytest.raises(
        BadArchive, match=r"^workerProgram of the model's configuration is .*; it must be a list of words"
    ):
        parse_model_config(f"workerProgram: {value}\n".encode())
