"""`parallel`: a plain model divided over real ranks, what it answers, and which plans are not served."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.divided import BLOCKS, PLAN, make_divided, parallel
from support.server import Server, make_archive, poll

pytestmark = [
    pytest.mark.system,
    pytest.mark.torch,
    pytest.mark.skipif(sys.platform != "linux", reason="ranks find each other on Linux's loopback"),
]

ONE_WORKER = "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 4\n"
SAMPLES = "samples: [{json: [3, 1, 4, 1, 5]}, {json: [2, 7]}]\n"
REQUESTS = ("[1, 2, 3, 4]", "[63, 0]", "[9]")
OWN = """
def handle(data, context):
    return [b"whole"] * len(data or [])
"""


def answers(server: Server, model: str) -> list[list[float]]:
    """What the model answers to a few requests."""
    found = []
    for body in REQUESTS:
        answer = server.predict(model, body, **{"content-type": "application/json"})
        assert answer.status_code == 200, answer.text
        found.append(answer.json())
    return found


def largest_difference(ours: list[list[float]], theirs: list[list[float]]) -> float:
    """Over all numbers of all answers."""
    pairs = [pair for answer, other in zip(ours, theirs, strict=True) for pair in zip(answer, other, strict=True)]
    return max(abs(one - another) for one, another in pairs)


def reason(answer: httpx.Response) -> str:
    """Why a model was not loaded."""
    assert answer.status_code == 500, answer.text
    return str(answer.json()["reason"])


@pytest.mark.timeout(120)
def test_two_ranks_answer_as_one_does_and_begin_anew_when_one_dies(tmp_path: Path) -> None:
    """A model without a line of its own for ranks; its weights in both formats, one of them on one rank of a group."""
    with Server(tmp_path, entry="marserve") as server:
        make_divided(server.store / "whole.mar", ONE_WORKER)
        make_divided(server.store / "two.mar", ONE_WORKER + SAMPLES + parallel(2))
        make_divided(server.store / "one.mar", ONE_WORKER + parallel(1), safetensors=True)
        for model in ("whole", "two", "one"):
            server.register(f"{model}.mar").raise_for_status()
        expected = answers(server, "whole")

        assert largest_difference(answers(server, "two"), expected) < 1e-5
        assert largest_difference(answers(server, "one"), expected) < 1e-5
        two, one = server.describe("two"), server.describe("one")
        assert two["parallel"]["mesh"] == {"tp": 2}
        assert two["parallel"]["plan"]["layers.*.up"] == "colwise"
        assert (two["parallelType"], two["parallelLevel"], one["parallelLevel"]) == ("tp", 2, 1)
        assert "warnings" not in two
        assert one["warnings"] == [
            "parallel: nothing shows that the ranks answer as one does, for no sample reached the model. Add samples "
            "to the model's configuration"
        ]
        assert two["workers"][0]["engine"].endswith("eager, divided over 2 ranks")
        assert two["workers"][0]["share"]["bytes"] < 0.6 * one["workers"][0]["share"]["bytes"]
        assert two["workers"][0]["share"]["secondsPerGB"] > 0

        ranks = [rank["pid"] for rank in two["workers"][0]["ranks"]]
        os.kill(ranks[1], signal.SIGKILL)
        for _ in poll(60, "the group is formed anew"):
            (worker,) = server.describe("two")["workers"]
            if worker["status"] == "READY" and worker["pid"] != ranks[0]:
                break
        assert server.describe("two")["lastDeath"]["detail"].startswith("rank 1: killed by SIGKILL")
        assert largest_difference(answers(server, "two"), expected) < 1e-5


@pytest.mark.timeout(120)
def test_plans_that_change_answers_or_do_not_fit_are_not_served(tmp_path: Path) -> None:
    """Each with what is wrong; what stands in the configuration itself is refused before anything is started."""
    with Server(tmp_path, entry="marserve") as server:

        def registered(name: str, lines: str, **more: Any) -> httpx.Response:
            make_divided(server.store / f"{name}.mar", ONE_WORKER + SAMPLES + lines, **more)
            return server.register(f"{name}.mar")

        heads = registered("heads", parallel(2, PLAN.replace("[qkv]", "q")))
        assert "one rank answers sample 0, and 2 ranks raise RuntimeError" in reason(heads)
        softmax = BLOCKS.replace("torch.relu(self.up(x))", "torch.softmax(self.up(x), -1)")
        mixed = reason(registered("mixed", parallel(2), blocks=softmax))
        assert "parallel: sample 0 is off by 0." in mixed
        assert "on 2 ranks, and 0.0001 is allowed" in mixed
        unfit = reason(registered("unfit", parallel(2, PLAN.replace("layers.*.up", "layers.*.upp"))))
        assert "layers.*.upp matches no module: the nearest is layers.*.up" in unfit
        make_archive(server.store / "own.mar", OWN, config=ONE_WORKER + parallel(2))
        assert "nothing of this archive was loaded so" in reason(server.register("own.mar"))

        for lines, said in (
            (parallel(0), "whose mesh.tp is a whole number of 1 or more, and not 0"),
            (parallel(2) + "parallelType: tp\n", "parallel says by itself how many ranks a worker has"),
        ):
            refused = registered("refused", lines)
            assert refused.status_code == 400
            assert said in refused.json()["message"]
        assert server.client.get(f"{server.management}/models").json()["models"] == []


RAISES_ON_ONE = """
import os
from marserve_handlers.base import BaseHandler


class Handler(BaseHandler):
    def preprocess(self, data):
        if os.environ["RANK"] == "RAISES":
            raise ValueError("no letters here")
        return super().preprocess(data)
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_sample_that_raises_on_one_rank_alone_ends_the_load_with_its_sentence(tmp_path: Path, rank: str) -> None:
    """The others wait in a sum for it: not until `startupTimeout`, which is minutes."""
    with Server(tmp_path, entry="marserve") as server:
        config = f"{ONE_WORKER}startupTimeout: 100\n{SAMPLES}{parallel(2)}"
        handler = RAISES_ON_ONE.replace("RAISES", rank)
        make_divided(server.store / "m.mar", config, handler=handler)
        began = time.monotonic()
        refused = server.register("m.mar")
        seconds = time.monotonic() - began

    assert f"rank {rank}: ModelNotLoadable: parallel: sample-0 raised here alone, and rank " in reason(refused)
    assert "ValueError: no letters here. All ranks must end a sample alike" in reason(refused)
    assert seconds < 60
