"""Devices that several workers share, limits of memory, and compiled models, for real (`make test-gpu`)."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.server import Server, make_archive, poll

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.timeout(400)]

# Computes for a moment on its device, and says which process did.
BUSY = """
import os
import torch

class Busy:
    def initialize(self, context):
        self.weights = torch.ones(4096, 4096, device=f"cuda:{context.system_properties['gpu_id']}")

    def handle(self, rows, context):
        total = self.weights
        for _ in range(20):
            total = (total @ self.weights) / 4096
        return [f"{os.getpid()} {total.sum().item():.0f}"] * len(rows)
"""

# Takes so many MiB of the host's memory where it is asked to.
HOARDS = """
import torch

class Hoards:
    def initialize(self, context):
        self.device = f"cuda:{context.system_properties['gpu_id']}"
        self.one = torch.ones(1024, device=self.device)

    def handle(self, rows, context):
        for row in rows:
            taken = bytearray(int(bytes(row["body"])) << 20)
            taken[::4096] = b"x" * len(taken[::4096])
            del taken
        return [f"{self.one.sum().item():.0f}"] * len(rows)
"""

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(64, 64)

    def forward(self, x):
        return torch.nn.functional.gelu(self.first(x)).sum(dim=1)
"""

# As BaseHandler compiles what it loads.
COMPILED = (
    NET
    + """
from marserve_handlers.support.devices.compilation import read_compile_options
from marserve_handlers.runtimes.tensors import compile_model

class Compiled:
    def initialize(self, context):
        self.device = f"cuda:{context.system_properties['gpu_id']}"
        torch.manual_seed(0)
        self.eager = Net().to(self.device).eval()
        options = read_compile_options(context.model_yaml_config)
        self.model = self.eager if options is None else compile_model(self.eager, options, "cuda", context)

    def handle(self, rows, context):
        with torch.inference_mode():
            x = torch.ones(len(rows), 64, device=self.device)
            return [{"same": bool(torch.allclose(self.model(x), self.eager(x), rtol=1e-2))}] * len(rows)
"""
)


def start(folder: Path, **environment: str) -> Server:
    """A server with marserve's own rules."""
    return Server(folder, entry="marserve", environment=environment)


def test_every_device_takes_workers(tmp_path: Path) -> None:
    """By the metric; describe lists no lost device."""
    with start(tmp_path) as server:
        make_archive(server.store / "m.mar", BUSY)
        server.register("m.mar").raise_for_status()

        page = server.client.get(f"{server.metrics}/metrics").text
        healthy = [line.split()[-1] for line in page.splitlines() if line.startswith("marserve_device_healthy{")]

        assert healthy
        assert {float(value) for value in healthy} == {1.0}
        assert "lostDevices" not in server.describe("m")


def test_two_workers_share_a_device(tmp_path: Path) -> None:
    """Both compute on it side by side, and the place of each is counted."""
    with start(tmp_path) as server:
        make_archive(server.store / "m.mar", BUSY, config="deviceIds: [0]\n")
        server.register("m.mar", initial_workers=2).raise_for_status()

        assert [worker["gpuId"] for worker in server.describe("m")["workers"]] == [0, 0]
        with ThreadPoolExecutor(8) as clients:
            for _ in poll(120, "both workers have answered"):
                answers = list(clients.map(lambda _: server.predict("m"), range(16)))
                assert [answer.status_code for answer in answers] == [200] * 16
                told = [answer.text.split() for answer in answers]
                assert {total for _, total in told} == {str(4096 * 4096)}
                if len({pid for pid, _ in told}) == 2:
                    break
        memory = server.describe("m")["deviceMemory"]
        assert memory["promisedBytes"]["0"] >= 2 * (512 << 20)


def test_a_limit_of_memory_holds_beside_cuda(tmp_path: Path) -> None:
    """CUDA maps far more addresses than it uses: these do not count, and what the handler takes does (507)."""
    with start(tmp_path) as server:
        make_archive(server.store / "m.mar", HOARDS, config="deviceIds: [0]\nmaxWorkerMemory: 6GiB\n")
        server.register("m.mar").raise_for_status()

        small, huge, after = (server.predict("m", body) for body in (b"100", b"16384", b"100"))

        assert (small.status_code, small.text) == (200, "1024")
        assert huge.status_code == 507, huge.text
        for _ in poll(120, "a worker answers"):
            if after.status_code == 200:
                break
            after = server.predict("m", b"100")


@pytest.mark.parametrize("has_compiler", [True, False])
def test_a_compiled_model_answers(tmp_path: Path, has_compiler: bool) -> None:
    """As the model that is not compiled does; without a C compiler it is that, and describe says so."""
    if has_compiler and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("there is no C compiler here")
    empty = tmp_path / "empty"
    empty.mkdir()
    caches = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    without = {} if has_compiler else {"PATH": _path_without_compilers(empty)}
    with start(tmp_path, **caches, **without) as server:
        make_archive(server.store / "m.mar", COMPILED, config="pt2: inductor\nresponseTimeout: 240\n")
        server.register("m.mar").raise_for_status()

        answer = server.predict("m")

        described = server.describe("m")

        assert (answer.status_code, answer.json()) == (200, {"same": True}), answer.text
        assert any("there is no C compiler" in each for each in described.get("warnings", [])) is not has_compiler


def _path_without_compilers(folder: Path) -> str:
    """A PATH with NVIDIA's tool and nothing else."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        (folder / "nvidia-smi").symlink_to(tool)
    return str(folder)
