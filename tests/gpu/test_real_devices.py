"""The real thing: a server on a machine with at least one GPU that torch can use (`make test-gpu`)."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from marserve.machine.describe import Machine, describe_machine
from marserve.machine.device_readings import DeviceReader
from marserve.machine.numa import cpus_near
from marserve.machine.vendors.tools import each_within
from support.server import Server, make_archive, poll

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.timeout(300)]

ON_ITS_DEVICE = """
import os
import torch

class Handler:
    def initialize(self, context):
        properties = context.system_properties
        self.device = torch.device("cpu" if properties["gpu_id"] is None else f"cuda:{properties['gpu_id']}")
        self.weights = torch.ones(1024, 1024, device=self.device)

    def handle(self, rows, context):
        answers = []
        for row in rows:
            if bytes(row["body"]) == b"lose":
                index = torch.tensor([1 << 30], device=self.device)
                return [self.weights.index_select(0, index).sum().item()]
            answers.append({
                "sum": (self.weights @ self.weights).sum().item(),
                "device": str(self.device),
                "uuid": str(getattr(torch.cuda.get_device_properties(self.device), "uuid", ""))
                if self.device.type == "cuda"
                else "",
                "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
                "pid": os.getpid(),
            })
        return answers
"""

# Needs so many GiB of the device for each row of a batch, for a moment.
GREEDY = """
import torch
def handle(rows, context):
    device = f"cuda:{context.system_properties['gpu_id']}"
    if not rows:
        torch.ones(1, device=device)
        return
    share = float(context.model_yaml_config["share"])
    size = int(torch.cuda.get_device_properties(device).total_memory * share)
    wanted = sum(10 if bytes(row["body"]) == b"huge" else 1 for row in rows)
    taken = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(wanted)]
    return [str(len(rows)).encode()] * len(rows)
"""


# Holds over half of its device for as long as it lives.
HALF = """
import torch
class Half:
    def initialize(self, context):
        device = f"cuda:{context.system_properties['gpu_id']}"
        size = int(torch.cuda.get_device_properties(device).total_memory * 0.55)
        self.weights = torch.empty(size, dtype=torch.uint8, device=device)
    def handle(self, rows, context):
        return [b"served"] * len(rows)
"""


def machine() -> Machine:
    """This machine, as a server with this environment sees it."""
    return describe_machine(os.environ, is_strict=True)


def torch_sees(**environment: str) -> list[str]:
    """The UUIDs of the devices that torch counts in a process of its own; UUIDs of AMD are empty."""
    program = (
        "import torch; print(*[getattr(torch.cuda.get_device_properties(i), 'uuid', '') "
        "for i in range(torch.cuda.device_count())], sep='\\n')"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return told.stdout.splitlines()


def start(folder: Path, **settings: str) -> Server:
    """A server with marserve's own rules."""
    return Server(folder, entry="marserve", settings=settings)


def predict(server: Server, model: str, body: bytes = b"x") -> dict[str, Any]:
    """One answer."""
    answer = server.predict(model, body)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_devices_are_counted_and_ordered_as_torch_does() -> None:
    """`gpu_id` 1 of the server is `cuda:1` of the worker, and the very same device."""
    here = machine()
    if any(device.is_instance for device in here.devices):
        pytest.skip("a GPU is cut into MIG instances, of which one process sees one")
    seen = torch_sees(CUDA_DEVICE_ORDER="PCI_BUS_ID")

    assert here.accelerators == len(seen)
    if here.vendor == "nvidia":
        assert [device.uuid.removeprefix("GPU-") for device in here.devices] == [
            uuid.removeprefix("GPU-") for uuid in seen
        ]
        assert all(device.memory_bytes and device.bus_id for device in here.devices)


def test_the_library_and_the_tool_read_alike() -> None:
    """Memory to a few MiB, for others may be at work between the two."""
    here = machine()
    if here.vendor != "nvidia":
        pytest.skip("NVIDIA's library reads NVIDIA's devices")
    pytest.importorskip("pynvml", reason="needs the extra `gpu`")
    if any(device.is_instance for device in here.devices):
        pytest.skip("the tool's table has no MIG instances")
    by_library = DeviceReader("nvidia", each_within(10.0))

    def missing() -> Any:
        raise ImportError

    by_tool = DeviceReader("nvidia", each_within(10.0), missing)
    try:
        for one, other in zip(by_library.read().devices, by_tool.read().devices, strict=True):
            assert one.label == other.label
            assert one.total_bytes == pytest.approx(other.total_bytes, abs=64 << 20)
            assert one.used_bytes == pytest.approx(other.used_bytes, abs=1 << 30)
            assert one.celsius == pytest.approx(other.celsius, abs=10)
            assert one.uuid == other.uuid
        assert by_library.is_quick
    finally:
        by_library.close()


def test_workers_compute_each_on_its_own_device(tmp_path: Path) -> None:
    """As many as there are devices, each with a context of its own; describe knows what they took."""
    here = machine()
    with start(tmp_path) as server:
        make_archive(server.store / "m.mar", ON_ITS_DEVICE)
        server.register("m.mar", initial_workers=here.accelerators).raise_for_status()
        workers = server.describe("m")["workers"]

        assert sorted(worker["gpuId"] for worker in workers) == list(range(here.accelerators))
        assert all(worker["gpuUsage"].startswith(f"gpuId::{worker['gpuId']} ") for worker in workers)
        told = {}
        for _ in poll(120, "every worker has answered"):
            answer = predict(server, "m")
            assert answer["sum"] == 1024.0**3
            told[answer["pid"]] = answer
            if len(told) == here.accelerators:
                break
        assert len({(each["device"], each["visible"]) for each in told.values()}) == here.accelerators
        need = server.describe("m")["deviceMemory"]
        assert need["source"] == "learned"
        assert need["neededBytes"] >= (512 << 20) + 4 * 1024 * 1024
        page = server.client.get(f"{server.metrics}/metrics").text
        assert 'marserve_device_memory_used_bytes{gpu_id="0"}' in page


def test_a_device_is_chosen_by_its_uuid(tmp_path: Path) -> None:
    """The last one, alone: `gpu_id` 0 is that one."""
    here = machine()
    if here.vendor != "nvidia":
        pytest.skip("UUIDs are NVIDIA's")
    last = here.devices[-1]
    with Server(tmp_path, entry="marserve", environment={"CUDA_VISIBLE_DEVICES": last.uuid}) as server:
        make_archive(server.store / "m.mar", ON_ITS_DEVICE)
        server.register("m.mar").raise_for_status()

        answer = predict(server, "m")

        assert (answer["device"], answer["visible"]) == ("cuda:0", last.uuid)
        if not last.is_instance:
            assert answer["uuid"].removeprefix("GPU-") == last.uuid.removeprefix("GPU-")


def test_a_batch_that_runs_out_of_memory_is_halved_and_the_worker_lives(tmp_path: Path) -> None:
    """Over a quarter of the device for each of four rows: two fit, four do not. One that needs more alone: 507."""
    config = "batchSize: 4\nmaxBatchDelay: 2000\nbatchPolicy: fixed\nshare: 0.28\ndeviceIds: [0]\n"
    with start(tmp_path) as server:
        make_archive(server.store / "m.mar", GREEDY, config=config)
        server.register("m.mar").raise_for_status()
        pid = server.worker_pids("m")

        with ThreadPoolExecutor(4) as clients:
            answers = list(clients.map(lambda _: server.predict("m", b"x"), range(4)))
        huge = server.predict("m", b"huge")
        after = server.predict("m", b"x")

        assert [answer.status_code for answer in answers] == [200] * 4, [answer.text for answer in answers]
        assert {int(answer.text) for answer in answers} <= {1, 2}
        assert (huge.status_code, after.status_code) == (507, 200)
        assert server.worker_pids("m") == pid
        page = server.client.get(f"{server.metrics}/metrics").text
        assert 'marserve_out_of_memory_total{model="m",version="1.0"} 2' in page


def test_a_worker_that_lost_its_device_is_replaced(tmp_path: Path) -> None:
    """An index out of bounds inside a kernel ends the context: the next request is answered by a new process."""
    with start(tmp_path) as server:
        make_archive(server.store / "m.mar", ON_ITS_DEVICE, config="retryOnWorkerDeath: false\n")
        server.register("m.mar").raise_for_status()
        before = predict(server, "m")["pid"]

        assert server.predict("m", b"lose").status_code >= 500
        for _ in poll(120, "another worker answers"):
            answer = server.predict("m", b"x")
            if answer.status_code == 200:
                assert answer.json()["pid"] != before
                break


def test_a_model_that_is_larger_than_any_device_is_refused(tmp_path: Path) -> None:
    """507 with the real numbers, and nothing is started."""
    with start(tmp_path) as server:
        make_archive(server.store / "m.mar", ON_ITS_DEVICE, config="deviceMemory: 10000GiB\n")

        answer = server.register("m.mar")

        assert answer.status_code == 507, answer.text
        assert "a worker needs 10,240,000 MiB (declared), and device 0 has " in answer.text
        assert server.client.get(f"{server.management}/models/m").status_code == 404


def test_models_make_room_for_each_other(tmp_path: Path) -> None:
    """Two that take over half of a device each: the memory of one is free when its process has ended, for the other."""
    config = (
        f"load: on_demand\ndeviceIds: [0]\ndeviceMemory: {int(machine().devices[0].memory_bytes * 0.56) >> 20}MiB\n"
    )
    with start(tmp_path, least_residence="0") as server:
        for name in ("a", "b"):
            make_archive(server.store / f"{name}.mar", HALF, config=config)
            server.register(f"{name}.mar").raise_for_status()

        for name in ("a", "b", "a"):
            answer = server.predict(name)
            assert (answer.status_code, answer.text) == (200, "served"), answer.text

        assert [len(server.describe(name)["workers"]) for name in ("a", "b")] == [1, 0]


def test_workers_stay_on_the_processors_near_their_device(tmp_path: Path) -> None:
    """Where the machine has several nodes; elsewhere they go anywhere."""
    device = machine().devices[0]
    near = cpus_near([device.bus_id], os.sched_getaffinity(0))
    with start(tmp_path, cpu_pinning="near") as server:
        make_archive(server.store / "m.mar", ON_ITS_DEVICE, config="deviceIds: [0]\n")
        server.register("m.mar").raise_for_status()

        (pid,) = server.worker_pids("m")

        assert psutil.Process(pid).cpu_affinity() == sorted(near or os.sched_getaffinity(0))


def test_a_model_that_touches_its_device_while_loading_is_not_forked(tmp_path: Path) -> None:
    """`deviceType: cpu`, but its code begins CUDA all the same: then each worker loads for itself."""
    handler = ON_ITS_DEVICE.replace("properties = context", "torch.cuda.init(); properties = context")
    with start(tmp_path) as server:
        make_archive(server.store / "m.mar", handler, config="deviceType: cpu\n")
        server.register("m.mar", initial_workers=2).raise_for_status()

        assert predict(server, "m")["device"] == "cpu"
        assert any("CUDA context" in warning for warning in server.describe("m")["warnings"])
