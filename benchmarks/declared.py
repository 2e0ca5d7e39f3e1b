"""Declared handlers: what reading, checking and stacking cost beside a handler that does the same by itself.

Measured is the time of a worker's own code for batches that are there already: from the bytes of the requests to those
of the answers, without a socket. Both handlers take turns, batch by batch. The items: 64 float32 in and out as JSON, a
small CNN on 28 x 28 pixels as `.npy`, and on a PNG of that size, which is a `predict` of one picture, so that both go
through a batch picture by picture; 16 requests a batch, and one. Then a JSON object of 20 fields, checked by a pydantic
model, beside pydantic's own `model_validate_json` alone.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any, cast

import numpy as np
from figures import Figure, Goal
from load_generator import CannotMeasure
from PIL import Image
from plan import Plan

from marserve.messages import Batch, Item, Load, Raised, pack_head
from marserve.shared_page import Page, create_page
from marserve.worker.connection import Connection
from marserve.worker.load import LoadedModel, make_context, open_class, open_definition
from marserve.worker.serving import ServedModel
from marserve_handlers import Tensor, model
from marserve_handlers.declared.decorator import definition_of
from marserve_handlers.declared.items import input_type

TIMES, QUICK_TIMES = 4000, 400
MOST_OF_ROWS = 1.05
MOST_OF_PYDANTIC = 2.0
SIZES = (16, 1)
FIELDS = 20


@model(inputs={"x": Tensor("float32", ["batch", 64])}, outputs={"y": Tensor("float32", ["batch", 64])})
class Doubled:
    """64 numbers in and out."""

    def predict(self, x: Any) -> Any:
        """Twice as much."""
        return {"y": x * 2}


class DoubledRows:
    """The same in TorchServe's shape."""

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
        """Checks no more than numpy does."""
        x = np.asarray([row["body"]["x"] for row in data], np.float32)
        return [{"y": row} for row in (x * 2).tolist()]


class Measured:
    """A handler in a worker's own code: takes one batch again and again, and drops the answers."""

    def __init__(self, handler: type[Any], bodies: list[bytes], content_type: str) -> None:
        load = Load("m", "1.0", os.getcwd(), "h.py", None, None, len(bodies), max_answer_bytes=1 << 24)
        definition, context = definition_of(handler), make_context(load)
        loaded: LoadedModel = (
            open_class(handler, context, load) if definition is None else open_definition(definition, context, load)
        )
        descriptor = create_page()
        self._page = Page(descriptor)
        os.close(descriptor)
        self._served = ServedModel(cast("Connection", self), self._page, loaded)
        items = [Item(f"id-{each}", [("body", content_type)], pack_head([], []), None) for each in range(len(bodies))]
        self._batch = Batch(1, items)
        self._bodies = [bytearray(body) for body in bodies]

    def send(self, message: Any, bodies: Any = ()) -> None:
        """What would go to the server. Raises CannotMeasure for a failure."""
        if isinstance(message, Raised):
            raise CannotMeasure(message.traceback)

    def run(self) -> float:
        """Answer the batch; the seconds that it took."""
        began = perf_counter()
        self._served.serve_batch(self._batch, self._bodies)
        return perf_counter() - began

    def close(self) -> None:
        """Give the shared page back."""
        self._page.close()


def measure(plan: Plan) -> list[Figure]:
    """The figures of declared handlers."""
    figures = []
    numbers = json.dumps({"x": [each / 7 for each in range(64)]}).encode()
    for size in SIZES:
        title = f"64 float32 in and out as JSON, batches of {size}: worker's time a request"
        figures.append(_beside_rows(plan, title, Doubled, DoubledRows, [numbers] * size, "application/json"))
    try:
        tensors, pictures = _networks()
    except ImportError:
        plan.say("declared: torch is not installed, so its figures are left out")
    else:
        file = io.BytesIO()
        np.save(file, np.random.default_rng(0).random((1, 28, 28), np.float32))
        for size in SIZES:
            title = f"a small CNN on 28 x 28 pixels as .npy, batches of {size}: worker's time a request"
            body = [file.getvalue()] * size
            figures.append(_beside_rows(plan, title, *tensors, body, "application/octet-stream", share=10))
        for size in SIZES:
            title = f"a small CNN on a PNG of 28 x 28, one by one, batches of {size}: worker's time a request"
            figures.append(_beside_rows(plan, title, *pictures, [_png()] * size, "image/png", share=20))
    figures.append(_pydantic(plan))
    return figures


def _beside_rows(
    plan: Plan,
    title: str,
    declared: type[Any],
    rows: type[Any],
    bodies: list[bytes],
    content_type: str,
    *,
    share: int = 1,
) -> Figure:
    plan.say(f"declared: {title}")
    ours, theirs = (Measured(each, bodies, content_type) for each in (declared, rows))
    try:
        spans = _in_turns(plan, ours.run, theirs.run, times=_times(plan) // share)
    finally:
        ours.close()
        theirs.close()
    own, other = ([each * 1e6 / len(bodies) for each in seconds] for seconds in spans)
    goal = Goal("at most", MOST_OF_ROWS, "compared")
    return Figure(title, "µs", own, "the same handler with rows", other, goal=goal, digits=1)


def _times(plan: Plan) -> int:
    return QUICK_TIMES if plan.is_quick else TIMES


def _in_turns(
    plan: Plan, ours: Callable[[], float], theirs: Callable[[], float], *, times: int
) -> tuple[list[float], list[float]]:
    """The median seconds of a call in each round; the two take turns, so that both meet the same disturbances."""
    own, other = [], []
    for _ in range(plan.rounds):
        pairs = [(ours(), theirs()) for _ in range(max(20, times))]
        own.append(sorted(pair[0] for pair in pairs)[len(pairs) // 2])
        other.append(sorted(pair[1] for pair in pairs)[len(pairs) // 2])
    return own, other


def _png() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (28, 28), np.uint8)).save(file, "PNG")
    return file.getvalue()


def _networks() -> tuple[tuple[type[Any], type[Any]], tuple[type[Any], type[Any]]]:
    """The handlers on pixels and on pictures, each declared and with rows. Raises ImportError without torch."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, stride=2),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, stride=2),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 36, 10),
    ).eval()

    @model(
        inputs={"pixels": Tensor("float32", ["batch", 1, 28, 28])}, outputs={"scores": Tensor("float32", ["batch", 10])}
    )
    class Pixels:
        def predict(self, pixels: torch.Tensor) -> Any:
            with torch.inference_mode():
                return {"scores": net(pixels)}

    class PixelRows:
        def handle(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
            arrays = [np.load(io.BytesIO(row["body"]), allow_pickle=False) for row in data]
            with torch.inference_mode():
                scores = net(torch.from_numpy(np.stack(arrays)))
            return [{"scores": row} for row in scores.tolist()]

    def look(picture: Image.Image) -> list[float]:
        pixels = torch.from_numpy(np.asarray(picture.convert("L"), np.float32) / 255)
        with torch.inference_mode():
            scores: list[float] = net(pixels[None, None])[0].tolist()
        return scores

    @model
    class Picture:
        def predict(self, picture: Image.Image) -> dict[str, Any]:
            return {"scores": look(picture)}

    class PictureRows:
        def handle(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
            return [{"scores": look(Image.open(io.BytesIO(row["body"])))} for row in data]

    # so that the annotation of a class inside of a function is resolved
    globals()["torch"] = sys.modules["torch"]
    return (Pixels, PixelRows), (Picture, PictureRows)


def _pydantic(plan: Plan) -> Figure:
    from pydantic import create_model

    fields: dict[str, Any] = {f"field_{each}": ((int, str, float, bool)[each % 4], ...) for each in range(FIELDS)}
    cls = create_model("Item", **fields)
    values = {f"field_{each}": (each, f"text {each}", each / 7, True)[each % 4] for each in range(FIELDS)}
    body = bytearray(json.dumps(values).encode())
    decode = input_type("item", cls)[1]
    row = {"body": body}
    validate = cls.model_validate_json

    def ours() -> float:
        began = perf_counter()
        for _ in range(100):
            decode(row)
        return (perf_counter() - began) / 100

    def theirs() -> float:
        began = perf_counter()
        for _ in range(100):
            validate(body)
        return (perf_counter() - began) / 100

    title = f"a JSON object of {FIELDS} fields, read and checked: time"
    plan.say(f"declared: {title}")
    own, other = _in_turns(plan, ours, theirs, times=_times(plan) // 20)
    goal = Goal("at most", MOST_OF_PYDANTIC, "compared")
    return Figure(
        title,
        "µs",
        [each * 1e6 for each in own],
        "pydantic's model_validate_json alone",
        [each * 1e6 for each in other],
        goal=goal,
        digits=1,
    )
