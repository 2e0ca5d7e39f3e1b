"""What is imported for which handler: nothing for TorchServe's shape, and pydantic for the author's models alone."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

LOADS = """
import json, sys
from marserve.messages import Load
from marserve.worker.loop import WorkerLoop
from marserve.worker.load import enter_model_folder, load_model
order = Load("m", "1.0", sys.argv[1], "handler.py", None, None, 4)
enter_model_folder(order)
model = load_model(order)
model.context.begin_batch([])
print(json.dumps([sorted(name for name in sys.modules if "." not in name or name.startswith("marserve_handlers."))]))
"""

OLD = "def handle(data, context): return data"
ITEM = """
from dataclasses import dataclass
from marserve_handlers import model
@dataclass
class Point:
    x: float
@model
def same(point: Point) -> Point: return point
"""
TENSORS = """
from marserve_handlers import Tensor, model
@model(inputs={"x": Tensor("float32", ["batch"])}, outputs={"y": Tensor("float32", ["batch"])})
def same(x): return x
"""
PYDANTIC = ITEM.replace("from dataclasses import dataclass", "from pydantic import BaseModel").replace(
    "@dataclass\nclass Point:", "class Point(BaseModel):"
)


def modules_after(source: str, folder: Path) -> set[str]:
    """What a worker's process has imported once it has loaded this handler."""
    (folder / "handler.py").write_text(textwrap.dedent(source))
    ended = subprocess.run(
        [sys.executable, "-P", "-c", LOADS, str(folder)], capture_output=True, text=True, check=True, timeout=120
    )
    return set(json.loads(ended.stdout)[0])


@pytest.mark.parametrize(
    ("source", "has", "has_not"),
    [
        (
            OLD,
            set(),
            {"pydantic", "numpy", "asyncio", "marserve_handlers.declared.decorator"},
        ),
        (ITEM, {"marserve_handlers.declared.single"}, {"pydantic", "numpy", "torch", "PIL", "asyncio"}),
        (ITEM.replace("def same", "async def same"), {"asyncio"}, {"pydantic", "numpy"}),
        (TENSORS, {"marserve_handlers.declared.tensors", "numpy"}, {"pydantic", "torch", "PIL", "asyncio"}),
        (PYDANTIC, {"pydantic"}, {"numpy", "torch", "PIL"}),
    ],
    ids=["torchserve", "item", "coroutine", "tensors", "pydantic"],
)
def test_a_worker_imports_what_its_model_uses(source: str, has: set[str], has_not: set[str], tmp_path: Path) -> None:
    """And nothing of the others'; asyncio, a sixth of a worker's imports, where there are coroutines."""
    modules = modules_after(source, tmp_path)

    assert has <= modules
    assert not has_not & modules
