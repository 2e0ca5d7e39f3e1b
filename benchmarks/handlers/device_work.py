"""The networks of `workload.py` on an accelerator (or the CPU, to see that it works), in a server and in a plain loop.

A batch is cut into pieces. While the device computes one, the host decodes the next into page-locked memory, and a
stream of its own copies that over: what is asked of the device is only waited for at the end. With `is_overlapped`
false the whole batch is decoded, copied from ordinary memory, and computed, one after the other.

`python device_work.py WORK FOLDER DEVICE` is the loop: for each line `BATCH SECONDS OVERLAPPED` it calls the work again
and again, encodes the answers as marserve's worker does, and writes a line of JSON, as `beside/plain_loop.py`.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from workload import BEST, BODIES

PIECES = 2
LARGEST_BATCH = 32


class DeviceWork:
    """Answers lists of bodies, or of what JSON bodies were decoded to. Has run already, so that torch has settled."""

    def __init__(self, name: str, folder: Path, device: str) -> None:
        import torch

        self._torch = torch
        self._device = torch.device(device)
        self._is_cuda = self._device.type == "cuda"
        self._is_text = name == "encoder"
        self._mode = "L" if name == "cnn" else "RGB"
        if not self._is_cuda:
            torch.set_num_threads(1)
        self._network = torch.jit.load(str(folder / f"{name}.pt"), map_location=self._device).eval()
        self._copies = torch.cuda.Stream(self._device) if self._is_cuda else None
        wanted = {"dtype": torch.float32, "device": self._device}
        self._mean = torch.tensor([0.485, 0.456, 0.406], **wanted).view(3, 1, 1)
        self._deviation = torch.tensor([0.229, 0.224, 0.225], **wanted).view(3, 1, 1)
        body = (folder / BODIES[name][0]).read_bytes()
        for count in (1, 1, LARGEST_BATCH // 2, LARGEST_BATCH, LARGEST_BATCH):
            for is_overlapped in (False, True):
                self([body] * count, is_overlapped=is_overlapped)

    def __call__(self, bodies: Sequence[Any], *, is_overlapped: bool = True) -> list[Any]:
        """One answer for each body."""
        pieces = PIECES if is_overlapped and self._is_cuda and len(bodies) >= 2 * PIECES else 1
        size = -(-len(bodies) // pieces)
        outputs: list[Any] = []
        with self._torch.inference_mode():
            for first in range(0, len(bodies), size):
                inputs = self._move(self._decode(bodies[first : first + size]), is_overlapped=is_overlapped)
                outputs.append(self._compute(inputs))
            # Only here is anything waited for: `tolist` copies to the host.
            return [answer for output in outputs for answer in self._answers(output)]

    def _decode(self, bodies: Sequence[Any]) -> list[Any]:
        torch = self._torch
        if self._is_text:
            texts = [(body if isinstance(body, dict) else json.loads(bytes(body)))["ids"] for body in bodies]
            longest = max(map(len, texts))
            ids = torch.zeros(len(texts), longest, dtype=torch.int64)
            is_there = torch.zeros(len(texts), longest, dtype=torch.bool)
            for row, text in enumerate(texts):
                ids[row, : len(text)] = torch.tensor(text)
                is_there[row, : len(text)] = True
            return [ids, is_there]
        import numpy
        from PIL import Image

        pictures = [numpy.array(Image.open(io.BytesIO(body)).convert(self._mode)) for body in bodies]
        return [torch.from_numpy(numpy.stack(pictures))]

    def _move(self, tensors: list[Any], *, is_overlapped: bool) -> list[Any]:
        """To the device; overlapped, the present stream waits for the copies, and the host does not."""
        if not self._is_cuda or not is_overlapped:
            return [tensor.to(self._device) for tensor in tensors]
        torch = self._torch
        present = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._copies):
            moved = [tensor.pin_memory().to(self._device, non_blocking=True) for tensor in tensors]
        present.wait_stream(self._copies)
        for tensor in moved:
            tensor.record_stream(present)  # or its memory would be given to the next copy while it is computed with
        return moved

    def _compute(self, inputs: list[Any]) -> Any:
        with self._torch.cuda.device(self._device) if self._is_cuda else nullcontext():
            if self._is_text:
                return self._network(*inputs).softmax(1)
            (pixels,) = inputs
            if self._mode == "L":
                pictures = pixels.unsqueeze(1).float().div_(255)
            else:
                pictures = pixels.permute(0, 3, 1, 2).float().div_(255).sub_(self._mean).div_(self._deviation)
            return self._network(pictures).softmax(1).topk(BEST, 1)

    def _answers(self, output: Any) -> list[Any]:
        if self._is_text:
            return [{"scores": scores} for scores in output.tolist()]
        scores, classes = output
        return [{"classes": best, "scores": of} for best, of in zip(classes.tolist(), scores.tolist(), strict=True)]


def loop(name: str, folder: Path, device: str, encode: Callable[[Any], object]) -> None:
    """Serve standard input until it ends."""
    work = DeviceWork(name, folder, device)
    body = (folder / BODIES[name][0]).read_bytes()
    print("ready", flush=True)
    for line in sys.stdin:
        words = line.split()
        batch, seconds, is_overlapped = [body] * int(words[0]), float(words[1]), words[2] == "True"
        took = []
        ends = perf_counter() + seconds
        while (began := perf_counter()) < ends:
            for answer in work(batch, is_overlapped=is_overlapped):
                encode(answer)
            took.append(perf_counter() - began)
        seen = {"per_second": len(took) * len(batch) / sum(took), "p50_ms": median(took) * 1e3}
        print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    from marserve.worker.outgoing import encode_value

    loop(sys.argv[1], Path(sys.argv[2]), sys.argv[3], encode_value)
