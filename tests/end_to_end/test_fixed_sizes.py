"""Fixed sizes through a real server: declared models and base handlers, certified, and refused where they cannot be."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.server import Server, make_archive, poll

DECLARED = """
import numpy as np
from marserve_handlers import Tensor, model

@model(inputs={"x": Tensor("float32", ["batch"])}, outputs={"y": Tensor("float32", ["batch", 2])})
class Counts:
    def predict(self, x):
        return np.stack([x * 2, np.full_like(x, len(x))], axis=1)
"""
BASE = """
import torch
from marserve_handlers.base import BaseHandler

class Handler(BaseHandler):
    def _load_model(self, *_):
        class Net(torch.nn.Module):
            def forward(self, rows):
                SEEN

        return Net()

    def preprocess(self, data):
        return torch.tensor([float(row["body"]) for row in data]).reshape(-1, 1)
"""
GOOD = "return torch.cat([rows * 2, torch.full_like(rows, len(rows))], dim=1)"
BY_MATES = "return rows - rows.mean()"
SAMPLES = "samples: [{text: '1'}, {text: '4'}, {text: '7'}]\n"
OWN = "def handle(data, context):\n    return [1 for row in data or []]\n"
CONFIG = "allowedBatchSizes: [2, 4]\nmaxBatchDelay: 500\nbatchPolicy: fixed\n"


def test_a_declared_model_is_called_with_allowed_sizes_alone(tmp_path: Path) -> None:
    """One row as two, three as four; each request gets its own answer. A handler that cannot is refused."""
    store = tmp_path / "store"
    store.mkdir()
    make_archive(store / "m.mar", DECLARED, config=CONFIG)
    make_archive(store / "own.mar", OWN, config=CONFIG)

    with Server(tmp_path, entry="marserve", store=store) as server:
        server.register("m.mar").raise_for_status()
        refused = server.register("own.mar")

        def ask(number: int) -> list[float]:
            answer = server.predict("m", f'{{"x": {number}}}', **{"Content-Type": "application/json"})
            answer.raise_for_status()
            return list(answer.json()["y"])

        alone = ask(1)
        with ThreadPoolExecutor(3) as threads:
            three = list(threads.map(ask, [5, 6, 7]))
        described = server.describe("m")

    assert alone == [2.0, 2.0]
    assert [row[0] for row in three] == [10.0, 12.0, 14.0]
    assert {row[1] for row in three} <= {2.0, 4.0}
    assert described["batchSize"] == 4
    assert described["allowedBatchSizes"] == [2, 4]
    assert refused.status_code >= 400
    said = f"{refused.text} {dict(refused.headers)}"
    assert "allowedBatchSizes is [2, 4], and this handler calls its model by itself" in said


@pytest.mark.system
@pytest.mark.torch
def test_a_base_handlers_model_is_called_with_allowed_sizes_alone_and_certified(tmp_path: Path) -> None:
    """Batches as they are filled up: a model whose rows depend on their mates gets none."""
    pytest.importorskip("torch")
    store = tmp_path / "store"
    store.mkdir()
    good = BASE.replace("SEEN", "return rows * 2 if len(rows) in (2, 4) else rows / 0")
    make_archive(store / "good.mar", good, config=CONFIG + SAMPLES)
    make_archive(store / "seen.mar", BASE.replace("SEEN", GOOD), config=CONFIG)
    make_archive(store / "mates.mar", BASE.replace("SEEN", BY_MATES), config=CONFIG + SAMPLES)

    with Server(tmp_path, entry="marserve", store=store) as server:
        for name in ("good", "seen", "mates"):
            server.register(f"{name}.mar").raise_for_status()
        seen = server.predict("seen", "3").json()
        verdicts = {}
        for name in ("good", "mates"):
            for _ in poll(30.0, f"the verdict on {name}"):
                verdicts[name] = server.describe(name)["batching"]["certificate"]
                if verdicts[name] in ("passed", "failed"):
                    break
        answers = [server.predict("good", str(number)).json() for number in (1, 5)]

    assert seen == [6.0, 2.0]
    assert answers == [[2.0], [10.0]]
    assert verdicts == {"good": "passed", "mates": "failed"}
