"""Workers in another language (`workerProgram`): the words that start them. Runs nothing.

Such a worker is a program of this machine that runs a file of the archive and speaks the wire (docs/worker-wire.md).
An archive may start one only where the operator trusts it (`trusted_models`), as for pickles that may run anything.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from marserve.errors import BadArchive
from marserve.files.below import real_below
from marserve.pool.options import PoolOptions


def find_program(
    options: PoolOptions,
    folder: Path,
    *,
    archive: str,
    is_trusted: bool,
    has_requirements: bool,
    which: Callable[[str], str | None] = shutil.which,
) -> tuple[str, ...]:
    """The words that start a worker, absolute; empty where the model names no program. `archive` is its name.

    Raises BadArchive for an archive that is not trusted, a program or a file that is not there, and options that such a
    worker cannot serve.
    """
    wanted = options.worker_program
    if not wanted:
        return ()
    name, file, *words = wanted
    what = f"workerProgram of model {options.model} is {list(wanted)}"
    if not is_trusted:
        raise BadArchive(
            f"{what}, and the archive is not trusted to start a program: trusted_models={archive} in the server's "
            "settings allows it."
        )
    clashing = [
        word
        for word, is_set in (
            ("parallelType" if options.parallel is None else "parallel", options.ranks),
            ("launcher: ray", options.ray is not None),
            ("python or environment", options.interpreter is not None),
            ("a requirements file or useVenv", has_requirements),
            ("asyncCommunication", options.is_concurrent),
            ("continuousBatching", options.continuous_batching),
            ("allowedBatchSizes", options.allowed_batch_sizes),
            ("samples", options.samples),
            ("peakFlops", options.peak_flops is not None),
        )
        if is_set
    ]
    if clashing:
        raise BadArchive(f"{what}, which does not go with {', '.join(clashing)}: leave one of the two out.")
    program = which(name)
    if program is None:
        raise BadArchive(f"{what}, and there is no program {name} on the server's PATH: install it, or set PATH.")
    path = real_below(folder, file)
    if path is None or not os.path.isfile(path):
        raise BadArchive(f"{what}, and {file} is no file of the archive.")
    return (str(Path(program).absolute()), str(path), *words)
