"""Workers and devices, on a machine that only says it has some."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from support.machines import EIGHT_H100, MIG_LIST, MIG_TABLE, FakeNvidiaSmi, put_nvidia_smi
from support.server import Server, make_archive, poll

WHERE_AM_I = """
class Where:
    def initialize(self, context):
        self.gpu_id = context.system_properties["gpu_id"]
    def handle(self, data, context):
        return [{"gpu_id": self.gpu_id}] * len(data)
"""

TWO_GPUS = """#!/bin/sh
case "$*" in
  -L) printf 'GPU 0: Made-up GPU\\nGPU 1: Made-up GPU\\n' ;;
esac
"""


@pytest.mark.system
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


# A process of its own for each worker: a template of a server with devices imports torch, which takes two seconds.
FRESH = "workerStart: fresh\n"

WHAT_I_SEE = """
import os
def handle(data, context):
    names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    told = {name: os.environ.get(name) for name in names}
    return data and [{**told, "gpu_id": context.system_properties["gpu_id"]}] * len(data)
"""


@pytest.fixture
def tool(tmp_path: Path) -> FakeNvidiaSmi:
    """A machine with two H100, nothing on them."""
    tool = put_nvidia_smi(tmp_path / "tools")
    tool.install("".join(EIGHT_H100.splitlines(keepends=True)[:2]))
    tool.use(0, 0)
    return tool


def serve(folder: Path, tool: FakeNvidiaSmi, entry: str = "marserve", **environment: str) -> Server:
    """A server on that machine."""
    return Server(folder, entry=entry, environment={**tool.environment, **environment})


@pytest.mark.system
def test_a_model_that_no_device_has_memory_for_is_refused(tmp_path: Path, tool: FakeNvidiaSmi) -> None:
    """507 with the numbers before anything is started; once there is room it is taken, on the device that has it."""
    tool.use(80_000, 80_000)
    with serve(tmp_path, tool) as server:
        make_archive(server.store / "m.mar", WHAT_I_SEE, config=FRESH + "deviceMemory: 60GiB\n")

        refused = server.register("m.mar")
        assert refused.status_code == 507, refused.text
        assert "a worker needs 61,440 MiB (declared), and device 0 has 1,559 MiB of 81,559 MiB free" in refused.text
        assert server.client.get(f"{server.management}/models/m").status_code == 404

        tool.use(80_000, 0)
        for _ in poll(30, "the tool was asked again"):
            if server.register("m.mar").status_code == 200:
                break
        (worker,) = server.describe("m")["workers"]
        assert worker["gpuId"] == 1
        assert server.predict("m").json() == {
            "CUDA_VISIBLE_DEVICES": None,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "gpu_id": 1,
        }
        assert server.describe("m")["deviceMemory"] == {
            "neededBytes": 60 << 30,
            "source": "declared",
            "promisedBytes": {"1": 60 << 30},
        }
        tool.use(80_000, 62_000)
        make_archive(server.store / "never.mar", WHAT_I_SEE, config="deviceMemory: 1TiB\n")
        for _ in poll(30, "what the worker took is seen"):
            assert server.register("never.mar").status_code == 507
            page = server.client.get(f"{server.metrics}/metrics").text
            if float(page.split('used_bytes{gpu_id="1"} ')[1].split()[0]) == 62_000 << 20:
                break
        more = server.client.put(f"{server.management}/models/m", params={"min_worker": 2, "synchronous": "true"})
        assert more.status_code == 507, more.text
        assert "On them: m 1.0 with 61,440 MiB" in more.text
        page = server.client.get(f"{server.metrics}/metrics").text
        assert float(page.split("\nmarserve_device_loads_refused_total ")[1].split()[0]) >= 2
        assert server.predict("m").status_code == 200


HOLDS_MEMORY = """
import os
from pathlib import Path
class Holds:
    def initialize(self, context):
        held = Path(context.model_yaml_config["held"])
        told = f"{context.system_properties['gpu_id']} 61440\\n"
        for other in held.iterdir():
            if Path("/proc", other.name).exists() and other.read_text() == told:
                raise RuntimeError("CUDA out of memory")
        (held / str(os.getpid())).write_text(told)
    def handle(self, data, context):
        return [b"served"] * len(data)
"""


@pytest.mark.system
def test_models_that_nobody_asks_for_make_room_on_a_device(tmp_path: Path, tool: FakeNvidiaSmi) -> None:
    """Three that fill a device each, on two of them: all are answered, and nothing ever holds more than there is."""
    held = tool.count_processes()
    names = ("a", "b", "c")
    with Server(tmp_path, entry="marserve", settings={"least_residence": "0"}, environment=tool.environment) as server:
        config = f"{FRESH}load: on_demand\ndeviceMemory: 60GiB\nheld: {held}\n"
        for name in names:
            make_archive(server.store / f"{name}.mar", HOLDS_MEMORY, config=config)
            server.register(f"{name}.mar").raise_for_status()

        for name in (*names, "a"):
            answer = server.predict(name)
            assert (answer.status_code, answer.text) == (200, "served"), answer.text
        awake = {name: server.describe(name)["workers"] for name in names}

        assert sorted(worker["gpuId"] for workers in awake.values() for worker in workers) == [0, 1]
        assert len(awake["a"]) == 1
        page = server.client.get(f"{server.metrics}/metrics").text
        evictions = [line for line in page.splitlines() if line.startswith("marserve_evictions_total{")]
        assert sum(float(line.split()[-1]) for line in evictions) in (1, 2)
        make_archive(server.store / "large.mar", HOLDS_MEMORY, config=config.replace("60GiB", "90GiB"))
        server.register("large.mar").raise_for_status()
        assert server.predict("large").status_code == 507
        assert [len(server.describe(name)["workers"]) for name in names] == [len(awake[name]) for name in names]


@pytest.mark.system
def test_a_lost_device_takes_no_worker_until_it_answers_again(tmp_path: Path, tool: FakeNvidiaSmi) -> None:
    """Workers move to another; of a model that may have no other they wait, and say so. Then all goes on."""
    with serve(tmp_path, tool) as server:
        make_archive(server.store / "any.mar", WHERE_AM_I, config=FRESH)
        for name in ("second", "third"):
            make_archive(server.store / f"{name}.mar", WHERE_AM_I, config=FRESH + "deviceIds: [1]\nminWorkers: 1\n")
        make_archive(server.store / "never.mar", WHERE_AM_I, config="deviceMemory: 1TiB\n")
        server.register("any.mar", initial_workers=2).raise_for_status()
        server.register("second.mar").raise_for_status()

        def devices(model: str) -> list[int]:
            return [worker["gpuId"] for worker in server.describe(model)["workers"] if worker["status"] == "READY"]

        def wait_for(page: str) -> None:
            for _ in poll(60, f"{page} is read"):
                server.register("never.mar")  # a refusal has devices read again soon
                if page in server.client.get(f"{server.metrics}/metrics").text:
                    break

        assert devices("any") == [0, 1]
        wait_for('marserve_device_healthy{gpu_id="1"} 1')
        tool.lose(1)
        wait_for('marserve_device_healthy{gpu_id="1"} 0')
        for _ in poll(60, "the worker on the lost device is replaced"):
            if devices("any") == [0, 0]:
                break
        make_archive(server.store / "seen.mar", WHAT_I_SEE, config=FRESH)
        server.register("seen.mar").raise_for_status()
        seen = server.predict("seen").json()
        assert (seen["CUDA_VISIBLE_DEVICES"], seen["gpu_id"]) == (EIGHT_H100.split(", ")[1], 0)
        assert server.predict("second").json() == {"gpu_id": 1}  # it lives, and is not ended for what is read

        os.kill(server.worker_pids("second")[0], signal.SIGKILL)
        for _ in poll(60, "the worker waits"):
            (worker,) = server.describe("second")["workers"]
            if "waitsFor" in worker:
                break
        refused, third = server.predict("second"), server.register("third.mar")

        assert (worker["status"], worker["waitsFor"]) == ("LOADING", "device 1 takes no worker: GPU is lost")
        assert server.describe("second")["state"] == "failed"
        assert server.describe("any")["lostDevices"] == {"1": "GPU is lost"}
        assert refused.status_code == 503
        assert "they wait for a device (device 1 takes no worker: GPU is lost)" in refused.json()["message"]
        assert third.status_code == 500
        assert third.headers["x-marserve-reason"].endswith("device 1 takes no worker: GPU is lost")
        assert server.client.get(f"{server.management}/models/third").status_code == 404
        assert 'marserve_worker_recycles_total{model="any",version="1.0",reason="device"} 1' in (
            server.client.get(f"{server.metrics}/metrics").text
        )

        tool.use(0, 0)
        wait_for('marserve_device_healthy{gpu_id="1"} 1')
        for _ in poll(60, "the worker starts"):
            if devices("second") == [1]:
                break
        assert server.predict("second").json() == {"gpu_id": 1}
        server.register("third.mar").raise_for_status()
        assert "lostDevices" not in server.describe("any")
    log = server.output()
    assert log.count("waits for a device: device 1 takes no worker: GPU is lost") == 2  # of `second`, and of `third`
    assert log.count(") takes no worker: GPU is lost") == 1


def test_devices_are_shown_by_describe_and_by_metrics(tmp_path: Path, tool: FakeNvidiaSmi) -> None:
    """In TorchServe's words, and in units. A model that names one that is not there is refused."""
    tool.use(678, 40_000)
    with serve(tmp_path, tool) as server:
        make_archive(server.store / "m.mar", WHAT_I_SEE, config=FRESH + "deviceIds: [1]\n")
        server.register("m.mar").raise_for_status()

        (worker,) = server.describe("m")["workers"]
        page = server.client.get(f"{server.metrics}/metrics").text

        assert worker["gpuUsage"] == "gpuId::1 utilization.gpu::10 % utilization.memory::3 % memory.used::40000 MiB"
        values = dict(line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("marserve_device_"))
        assert float(values['marserve_device_memory_used_bytes{gpu_id="0"}']) == 678 << 20
        assert float(values['marserve_device_memory_bytes{gpu_id="1"}']) == 81559 << 20
        assert float(values['marserve_device_busy_ratio{gpu_id="1"}']) == 0.1
        assert float(values['marserve_device_temperature_celsius{gpu_id="0"}']) == 40
        assert 'GPUMemoryUsed{Level="Host",DeviceId="1"' in page

        make_archive(server.store / "n.mar", WHAT_I_SEE, config="deviceIds: [1, 7]\n")
        missing = server.register("n.mar")
        assert missing.status_code == 400, missing.text
        assert missing.json()["message"] == (
            "deviceIds is [1, 7] in the configuration of model n, and there is no device 7: the server has devices 0 "
            "to 1. Name devices that it has, or leave deviceIds out to use all of them; deviceType: cpu uses none."
        )
        assert server.client.get(f"{server.management}/models/n").status_code == 404


def test_each_worker_on_a_cut_gpu_is_shown_its_own_instance(tmp_path: Path, tool: FakeNvidiaSmi) -> None:
    """By its UUID, under the number 0; describe counts as the server does."""
    tool.install(MIG_TABLE, MIG_LIST)
    with serve(tmp_path, tool, CUDA_VISIBLE_DEVICES="1") as server:
        for name in ("a", "b"):
            make_archive(server.store / f"{name}.mar", WHAT_I_SEE, config=FRESH)
            server.register(f"{name}.mar").raise_for_status()

        told = [server.predict(name).json() for name in ("a", "b")]

        assert [each["CUDA_VISIBLE_DEVICES"] for each in told] == [
            "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f",
            "MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb",
        ]
        assert [each["gpu_id"] for each in told] == [0, 0]
        assert [server.describe(name)["workers"][0]["gpuId"] for name in ("a", "b")] == [0, 1]

        make_archive(server.store / "both.mar", WHAT_I_SEE, config="parallelType: tp\nparallelLevel: 2\n")
        refused = server.register("both.mar")
        assert refused.status_code == 400, refused.text
        assert "parallelLevel is 2" in refused.text
        assert "devices 0, 1 are MIG instances" in refused.text
        assert server.client.get(f"{server.management}/models/both").status_code == 404


@pytest.mark.parametrize(
    ("entry", "value", "line"),
    [
        ("marserve", "0,5", "CUDA_VISIBLE_DEVICES is '0,5', and there is no device 5: there are 0 (GPU-00000000-"),
        (
            "torchserve",
            "GPU-00000000",
            "Invalid format: The env defining visible devices must be integers separated by",
        ),
    ],
)
def test_a_list_of_devices_that_cannot_be_stops_the_start(
    tmp_path: Path, tool: FakeNvidiaSmi, entry: str, value: str, line: str
) -> None:
    """With the variable, its value and the next step; TorchServe takes no UUIDs (contract 10.5)."""
    server = serve(tmp_path, tool, entry, CUDA_VISIBLE_DEVICES=value)

    with pytest.raises(AssertionError, match="the server ended with 1"):
        server.start()

    assert line in server.output()
    server.stop(check=False)
    server.client.close()
