"""The parent compiled by torch.compile, weights frozen. All batch sizes are compiled before the model is ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from marserve_handlers.optimising.builds import CannotBuild, Parent
from marserve_handlers.optimising.material import Material
from marserve_handlers.support.shown import first_line_with_kind

EXAMPLE, SIZES = "example.npz", "rows.txt"


def build(material: Material, folder: Path) -> None:
    """Nothing but an example is written, and how many rows a batch may have: it is compiled at the load."""
    if material.is_session or material.is_script:
        raise CannotBuild("torch.compile takes modules of Python alone")
    from marserve_handlers.optimising.sample_calls import write_samples  # here: a worker writes none

    write_samples(folder / EXAMPLE, material.model, material.calls[:1])
    (folder / SIZES).write_text(str(material.most_rows))


def load(parent: Parent, folder: Path, threads: int) -> Any:
    """The parent, compiled for single rows and for more."""
    return compile_whole(parent(), folder)


def compile_whole(model: Any, folder: Path) -> Any:
    """Compile a model for batches of one row and of more, and run both. Raises CannotBuild where that fails."""
    # here: where the build is another one
    import torch

    # here, too
    from marserve_handlers.optimising.call_arrays import join
    from marserve_handlers.optimising.sample_calls import read_samples

    compiled: Any = torch.compile(model, options={"freezing": True})
    call, _ = next(read_samples(folder / EXAMPLE, model))
    most = int((folder / SIZES).read_text())
    settings: Any = torch._dynamo.config
    try:
        # Without this a failure runs as it was, in silence.
        with settings.patch(suppress_errors=False), torch.no_grad():
            for rows in sorted({1, 2, most} if most > 1 else {1}):
                batch = join([call] * rows)
                compiled(*batch.args, **batch.kwargs)
    except Exception as error:
        raise CannotBuild(f"torch.compile cannot compile it: {first_line_with_kind(error)}") from None
    return compiled
