"""Batch checks of sound models in the precisions of a GPU (`make test-gpu`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.server import Server, make_archive, poll

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.timeout(300)]

CONVOLUTIONS = """
import torch
class Handler:
    def initialize(self, context):
        torch.manual_seed(1)
        self.device = f"cuda:{context.system_properties['gpu_id']}"
        self.dtype = getattr(torch, context.model_yaml_config["precision"])
        layers = [torch.nn.Conv2d(3 if not number else 64, 64, 3, padding=1) for number in range(8)]
        steps = [step for layer in layers for step in (layer, torch.nn.ReLU())]
        head = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10)]
        self.model = torch.nn.Sequential(*steps, *head).to(self.device, self.dtype).eval()
    def handle(self, rows, context):
        seeds = [row["body"]["seed"] for row in rows]
        pictures = [torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        with torch.inference_mode():
            return self.model(torch.stack(pictures).to(self.device, self.dtype)).float().tolist()
"""


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_a_sound_convolutional_model_is_served_in_batches(tmp_path: Path, precision: str) -> None:
    """Its certificate is passed, and says with which bound."""
    samples = "".join(f"  - json: {{seed: {seed}}}\n" for seed in range(5))
    config = f"precision: {precision}\ndeviceIds: [0]\nbatchSize: 8\nbatchCheck: refuse\nsamples:\n{samples}"
    with Server(tmp_path, entry="marserve") as server:
        make_archive(server.store / "m.mar", CONVOLUTIONS, config=config)
        server.register("m.mar").raise_for_status()

        for _ in poll(120, "the check has ended"):
            batching = server.describe("m")["batching"]
            if batching["certificate"] != "not checked":
                break

        assert batching["certificate"] == "passed", batching
        assert batching["largestBatch"] == 8
        assert batching["tolerance"]["basis"].endswith("on cuda")
