"""A model compiled by AOTInductor, in one file with native code: written, and loaded as a module.

A package says nothing of torch's version, runs on any batch that it was not compiled for where nobody checks, and was
seen to allow fewer rows than it was compiled for, or no single one. So beside it stand the version, the processor's
instructions and the batches that were tried; a larger one is run in pieces, a smaller one with its last row again.
Loading a package runs what is in it: who may load it is for the caller to say.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from marserve_handlers.optimising.builds import CannotBuild
from marserve_handlers.optimising.call_arrays import Call, join, leaves_of, with_leaves
from marserve_handlers.optimising.machine import cpu_flags
from marserve_handlers.optimising.material import Material
from marserve_handlers.support.shown import first_line

MODEL, FACTS = "model.pt2", ".json"
# Without a check of its own a package of batches of two runs three; without the other a batch of one is refused.
CHECKS = "AOTI_RUNTIME_CHECK_INPUTS"
CONFIG = {"aot_inductor.check_lowerbound": False}


def write_package(material: Material, program: Any, folder: Path) -> None:
    """Compile an exported program into `folder`, and try which batches it takes.

    One with frozen weights was seen to take none, for it laid out pictures anew: it is then compiled without.
    Raises CannotBuild where it cannot be compiled, or takes neither one row nor two.
    """
    path = folder / MODEL
    _compile(program, path, is_frozen=True)
    try:
        least, most = rows_of(open_package(path), material.calls[0], material.most_rows)
    except CannotBuild:
        _compile(program, path, is_frozen=False)
        least, most = rows_of(open_package(path), material.calls[0], material.most_rows)
    facts = {"torch": torch.__version__, "cpu": cpu_flags(), "least_rows": least, "most_rows": most}
    facts_of(path).write_text(json.dumps(facts))


def _compile(program: Any, path: Path, *, is_frozen: bool) -> None:
    """Compile it. Where gradients may be asked for torch freezes nothing, without a word, and INT8 is no faster."""
    try:
        with torch.inference_mode(mode=False), torch.set_grad_enabled(not is_frozen):
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(path), inductor_configs={**CONFIG, "freezing": is_frozen}
            )
    except Exception as error:
        raise CannotBuild(f"AOTInductor does not compile it: {first_line(error)}") from None


def rows_of(run: Any, call: Call, wanted: int) -> tuple[int, int]:
    """The fewest rows that it takes, one or two, and the most up to `wanted`: the ends are tried, then halves.

    Raises CannotBuild if it takes neither one row nor two, and for inputs that come several rows at once.
    """
    if call.rows != 1:
        raise CannotBuild(f"its inputs come {call.rows} rows at once")

    def refusal(rows: int) -> str:
        batch = join([call] * rows)
        try:
            with torch.no_grad():
                run(*contiguous(batch.args), **contiguous(dict(batch.kwargs)))
        except Exception as error:  # of the package's own checks
            return first_line(error)
        return ""

    fault = refusal(1)
    if fault and refusal(2):
        raise CannotBuild(f"its package does not take one row: {fault}")
    least = 2 if fault else 1
    if not refusal(max(least, wanted)):
        return least, max(least, wanted)
    low, high = least, wanted
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if refusal(middle) else (middle, high)
    return least, low


def facts_of(package: Path) -> Path:
    """The file beside a package."""
    return package.with_name(package.name + FACTS)


def load_package(path: Path) -> torch.nn.Module:
    """The package as a module, called as its parent. Runs the package's native code.

    One that another tool has made has no file beside it: it is run with whatever rows its own checks let through.
    Raises CannotBuild where it was compiled for instructions that this processor lacks, or with another torch.
    """
    if not facts_of(path).exists():
        return PackageModule(open_package(path), 1, sys.maxsize)
    facts = read_facts(facts_of(path))
    here = cpu_flags()
    lacking = [flag for flag in facts["cpu"] if flag not in here]
    if lacking:
        raise CannotBuild(f"it was compiled for a processor with {', '.join(lacking)}, which this one has not")
    if facts["torch"] != torch.__version__:
        raise CannotBuild(f"it was compiled with torch {facts['torch']}, and this is {torch.__version__}")
    return PackageModule(open_package(path), int(facts["least_rows"]), int(facts["most_rows"]))


def open_package(path: Path) -> Any:
    """The package as torch has it. What it is unpacked to goes at once: a worker that is killed would leave it.

    torch's own way there compiles programs first, to find out what the processor has, which is known here.
    """
    from torch.export.pt2_archive._package import AOTICompiledModel  # here: torch's private name

    os.environ[CHECKS] = "1"
    loader: Any = torch._C._aoti.AOTIModelPackageLoader
    before = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["TMPDIR"] = scratch
        try:
            return AOTICompiledModel(loader(str(path), "model", False, 1, -1))
        finally:
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before


def read_facts(path: Path) -> Mapping[str, Any]:
    """What stands beside a package. Raises CannotBuild for what is no such file."""
    try:
        facts = json.loads(path.read_text())
        is_known = isinstance(facts["cpu"], list) and isinstance(facts["torch"], str)
        if not is_known or not 1 <= int(facts["least_rows"]) <= int(facts["most_rows"]):
            raise ValueError("its values are of other types")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CannotBuild(f"{path.name} beside its package cannot be read: {error}") from None
    return facts  # type: ignore[no-any-return]


class PackageModule(torch.nn.Module):
    """A package as a module. Batches with more rows than it takes are run in pieces, smaller ones with a row again."""

    def __init__(self, run: Any, least_rows: int, most_rows: int) -> None:
        super().__init__()
        self._run, self._least_rows, self._most_rows = run, least_rows, most_rows

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the parent's."""
        outputs = [self._piece(piece) for piece in pieces_of(Call(args, kwargs), self._most_rows)]
        return outputs[0] if len(outputs) == 1 else joined(outputs)

    def _piece(self, call: Call) -> Any:
        rows, leaves = call.rows, call.leaves
        fills = 0 < rows < self._least_rows
        if fills:
            again = [*range(rows), *[rows - 1] * (self._least_rows - rows)]
            leaves = {name: leaf[again] for name, leaf in leaves.items()}
        whole = call.replaced({name: leaf.contiguous() for name, leaf in leaves.items()})
        output = self._run(*whole.args, **whole.kwargs)
        return with_leaves(output, {name: leaf[:rows] for name, leaf in leaves_of(output).items()}) if fills else output


def pieces_of(call: Call, most_rows: int) -> Iterator[Call]:
    """The call in pieces of so many rows; itself where it is small enough or has no batch axis."""
    rows = call.rows
    if rows <= most_rows:
        yield call
        return
    leaves = call.leaves
    for at in range(0, rows, most_rows):
        yield call.replaced({name: leaf[at : at + most_rows] for name, leaf in leaves.items()})


def joined(outputs: Sequence[Any]) -> Any:
    """What pieces gave as one value, with their rows in order."""
    each = [leaves_of(output) for output in outputs]
    return with_leaves(outputs[0], {name: torch.cat([leaves[name] for leaves in each]) for name in each[0]})


def contiguous(value: Any) -> Any:
    """The value with its tensors laid out as packages want them."""
    return with_leaves(value, {name: leaf.contiguous() for name, leaf in leaves_of(value).items()})
