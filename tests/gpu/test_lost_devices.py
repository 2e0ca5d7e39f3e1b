"""Lost devices for real: an index out of range in a kernel, however its failure shows (`make test-gpu`)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from support.server import Server, make_archive, poll

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.timeout(300)]

# Each row is an index into a table on the device; a row `late …` has its own answer fail as it is written, a row
# `alone …` an exception in its answer's place.
TABLE = """
import torch

class Handler:
    def initialize(self, context):
        self.device = torch.device(f"cuda:{context.system_properties['gpu_id']}")
        self.table = torch.arange(8.0, device=self.device)

    def answer(self, row):
        how, _, index = row.rpartition(" ")
        found = self.table[torch.tensor([int(index)], device=self.device)]
        if how == "late":
            return found
        try:
            return found.sum().item()
        except RuntimeError as error:
            if how == "alone":
                return error
            raise

    def handle(self, rows, context):
        return [self.answer(bytes(row["body"]).decode()) for row in rows]
"""
COROUTINE = TABLE.replace("    def handle", "    async def handle")
FIXED = "batchSize: 4\nmaxBatchDelay: 3000\nbatchPolicy: fixed\ndeviceIds: [0]\n"


def ask(server: Server, body: bytes) -> httpx.Response:
    """One prediction, whose worker may have to import torch first."""
    return server.client.post(f"{server.inference}/predictions/m", content=body, timeout=240)


def deaths(server: Server) -> list[str]:
    """The counter's lines that are not 0."""
    page = server.client.get(f"{server.metrics}/metrics").text
    lines = [line for line in page.splitlines() if line.startswith("marserve_worker_deaths_total{")]
    return [line.partition('cause="')[2].replace('"} ', " ") for line in lines if not line.endswith(" 0")]


@pytest.mark.parametrize("how", ["", "late ", "alone "])
def test_a_guilty_index_costs_two_workers_and_no_mate_its_answer(tmp_path: Path, how: str) -> None:
    """Then it is refused, and the device serves on."""
    with Server(tmp_path, entry="marserve") as server:
        make_archive(server.store / "m.mar", TABLE, config=FIXED)
        server.register("m.mar").raise_for_status()
        bodies = [b"1", f"{how}99".encode(), b"2", b"3"]

        with ThreadPoolExecutor(4) as clients:
            answers = list(clients.map(lambda body: ask(server, body), bodies))
        again = [server.predict("m", bodies[1]) for _ in range(4)]
        for _ in poll(120, "a worker answers"):
            if server.predict("m", b"5").status_code == 200:
                break

        assert [answers[place].text for place in (0, 2, 3)] == ["1.0", "2.0", "3.0"]
        assert answers[1].status_code == 500
        assert answers[1].headers["x-marserve-cause"] == "device_lost"
        assert {(each.status_code, each.headers["x-marserve-cause"]) for each in again} == {
            (503, "refused_fingerprint")
        }
        assert deaths(server) == ["device_lost 2"]
        death = server.describe("m")["lastDeath"]
        assert death["cause"] == "device_lost"
        assert "device-side assert triggered" in death["detail"] or "HIP error" in death["detail"]


def test_a_coroutine_that_loses_the_device_is_found_out(tmp_path: Path) -> None:
    """Beside others, which are answered."""
    with Server(tmp_path, entry="marserve") as server:
        make_archive(server.store / "m.mar", COROUTINE, config="asyncCommunication: true\ndeviceIds: [0]\n")
        server.register("m.mar").raise_for_status()

        with ThreadPoolExecutor(4) as clients:
            bodies = [b"99", b"1", b"2", b"3"]
            answers = list(clients.map(lambda body: ask(server, body), bodies))

        assert [answer.text for answer in answers[1:]] == ["1.0", "2.0", "3.0"]
        assert answers[0].status_code == 500
        assert deaths(server) == ["device_lost 2"]


def test_an_ordinary_failure_costs_no_worker(tmp_path: Path) -> None:
    """The device is asked and is well."""
    with Server(tmp_path, entry="marserve") as server:
        make_archive(server.store / "m.mar", TABLE, config="deviceIds: [0]\n")
        server.register("m.mar").raise_for_status()
        before = server.worker_pids("m")

        assert [server.predict("m", b"no number").status_code for _ in range(3)] == [503] * 3
        assert server.predict("m", b"1").text == "1.0"
        assert server.worker_pids("m") == before
