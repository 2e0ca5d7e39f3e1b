"""Workers and devices, on a machine that only says it has some."""

from __future__ import annotations

import os
from pathlib import Path

from support.server import Server, make_archive

WHERE_AM_I = """
class Where:
    def initialize(self, context):
        self.gpu_id = context.system_properties["gpu_id"]
    def handle(self, data, context):
        return [{"gpu_id": self.gpu_id}] * len(data)
"""

TWO_GPUS = """#!/bin/sh
case "$*" in
  *name*) printf 'Made-up GPU\\nMade-up GPU\\n' ;;
esac
"""


def test_workers_get_devices_in_turn(tmp_path: Path) -> None:
    """Two devices, three workers: 0, 1, 0 as `gpu_id`; a model that says `cpu` gets none; a list is kept to."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(TWO_GPUS)
    (tools / "nvidia-smi").chmod(0o755)
    store = tmp_path / "store"
    store.mkdir()
    make_archive(store / "any.mar", WHERE_AM_I)
    make_archive(store / "cpu.mar", WHERE_AM_I, config="deviceType: cpu\n")
    make_archive(store / "second.mar", WHERE_AM_I, config="deviceIds: [1]\n")

    environment = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    with Server(tmp_path, store=store, environment=environment) as server:
        server.register("any.mar", initial_workers=3).raise_for_status()
        server.register("cpu.mar").raise_for_status()
        server.register("second.mar").raise_for_status()
        described = server.describe("any")

        assert described["deviceType"] == "gpu"
        assert [worker["gpu"] for worker in described["workers"]] == [True] * 3
        assert [worker["gpuId"] for worker in described["workers"]] == [0, 1, 0]
        assert server.predict("cpu").json() == {"gpu_id": None}
        assert server.predict("second").json() == {"gpu_id": 1}
        assert server.predict("any").json()["gpu_id"] in (0, 1)
