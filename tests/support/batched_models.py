"""Three small models that batch rightly, handlers around them that do not, and handlers that do.

A model takes a batch of number lists of any lengths and gives one dict an item. `is_masked=False` lets padding count,
`uses_batch_statistics=True` normalises by the batch as a batch norm does that was left in training mode: the two faults
that only a model itself can have. Every other fault is a handler's, planted on top of any model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, Protocol

from marserve_handlers.errors import PredictionException

Rows = list[dict[str, Any]]
Handler = Callable[[Rows, Any], Any]

SAMPLES: list[list[float]] = [[3.0, -1.0, 2.0, 0.5], [0.25, 4.0], [-2.0, 1.0, 1.5], [5.0], [0.5, 0.5, -3.0, 1.0, 2.0]]


class Model(Protocol):
    """A model that takes lists of numbers."""

    def run(
        self, batch: list[list[float]], *, is_masked: bool = True, uses_batch_statistics: bool = False
    ) -> list[dict[str, Any]]:
        """One answer an item: `scores`, a list of two numbers, and `class`, the larger one's index."""


class PythonModel:
    """Sums, in plain Python."""

    def run(
        self, batch: list[list[float]], *, is_masked: bool = True, uses_batch_statistics: bool = False
    ) -> list[dict[str, Any]]:
        """One answer an item."""
        longest = max(len(item) for item in batch)
        scores = []
        for item in batch:
            padded = item if is_masked else [*item, *[0.0] * (longest - len(item))]
            mean = sum(padded) / len(padded)
            scores.append([mean, sum(math.tanh(value) for value in padded) - 0.1 * len(padded)])
        if uses_batch_statistics:
            centre = sum(score[0] for score in scores) / len(scores)
            scores = [[score[0] - centre, score[1]] for score in scores]
        return [as_answer(score) for score in scores]


class NumpyModel:
    """One layer, in numpy."""

    def run(
        self, batch: list[list[float]], *, is_masked: bool = True, uses_batch_statistics: bool = False
    ) -> list[dict[str, Any]]:
        """One answer an item."""
        import numpy

        longest = max(len(item) for item in batch)
        padded = numpy.zeros((len(batch), longest))
        mask = numpy.zeros((len(batch), longest))
        for index, item in enumerate(batch):
            padded[index, : len(item)] = item
            mask[index, : len(item)] = 1.0
        counts = mask.sum(1, keepdims=True) if is_masked else numpy.full((len(batch), 1), float(longest))
        hidden = numpy.concatenate([padded.sum(1, keepdims=True), (padded**2).sum(1, keepdims=True)], 1) / counts
        if uses_batch_statistics:
            hidden = (hidden - hidden.mean(0)) / (hidden.std(0) + 1e-5)
        weights = numpy.array([[0.5, -1.0], [2.0, 0.25]])
        return [as_answer(score) for score in numpy.tanh(hidden @ weights).tolist()]


class TorchModel:
    """A linear layer and a batch norm, in torch."""

    def __init__(self) -> None:
        import torch

        torch.manual_seed(3)
        self.linear = torch.nn.Linear(1, 2)
        self.norm = torch.nn.BatchNorm1d(2, track_running_stats=True)
        self.norm.running_mean.copy_(torch.tensor([0.3, -0.2]))
        self.linear.eval()
        self.norm.eval()

    def run(
        self, batch: list[list[float]], *, is_masked: bool = True, uses_batch_statistics: bool = False
    ) -> list[dict[str, Any]]:
        """One answer an item."""
        import torch

        with torch.inference_mode():
            padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(item) for item in batch], batch_first=True)
            lengths = torch.tensor([[len(item) if is_masked else padded.shape[1]] for item in batch])
            mask = torch.arange(padded.shape[1]) < lengths
            hidden = (self.linear(padded[..., None]) * mask[..., None]).sum(1) / lengths
            if uses_batch_statistics:
                # A batch of one has no variance; a forgotten `eval()` is most often seen with momentum alone.
                hidden = torch.nn.functional.batch_norm(
                    hidden, self.norm.running_mean, self.norm.running_var, training=len(batch) > 1
                )
            else:
                hidden = self.norm(hidden)
            return [as_answer(score) for score in hidden.tolist()]


MODELS: dict[str, Callable[[], Model]] = {"python": PythonModel, "numpy": NumpyModel, "torch": TorchModel}


def as_answer(scores: list[float]) -> dict[str, Any]:
    """Scores as an answer."""
    return {"scores": scores, "class": max(range(len(scores)), key=scores.__getitem__)}


def numbers_of(rows: Rows) -> list[list[float]]:
    """What the rows hold."""
    return [json.loads(bytes(row["body"])) for row in rows]


# ------------------------------------------------------------------------------------------------ faults

FAULTS: dict[str, Callable[[Model], Handler]] = {}


def fault(name: str) -> Callable[[Callable[[Model], Handler]], Callable[[Model], Handler]]:
    """Put a planted fault on the list."""

    def take(make: Callable[[Model], Handler]) -> Callable[[Model], Handler]:
        FAULTS[name] = make
        return make

    return take


@fault("swapped order")
def _swapped(model: Model) -> Handler:
    def handle(rows: Rows, context: Any) -> Any:
        answers = model.run(numbers_of(rows))
        answers[:2] = answers[:2][::-1]
        return answers

    return handle


@fault("dropped item")
def _dropped(model: Model) -> Handler:
    def handle(rows: Rows, context: Any) -> Any:
        answers = model.run(numbers_of(rows))
        return answers[:-1] if len(answers) > 2 else answers

    return handle


@fault("one answer broadcast")
def _broadcast(model: Model) -> Handler:
    def handle(rows: Rows, context: Any) -> Any:
        return [model.run(numbers_of(rows))[0]] * len(rows)

    return handle


@fault("batch norm left in training mode")
def _training(model: Model) -> Handler:
    return lambda rows, context: model.run(numbers_of(rows), uses_batch_statistics=True)


@fault("padding leaks")
def _padding(model: Model) -> Handler:
    return lambda rows, context: model.run(numbers_of(rows), is_masked=False)


@fault("shared buffer reused")
def _buffer(model: Model) -> Handler:
    buffer = [0.0, 0.0]

    def handle(rows: Rows, context: Any) -> Any:
        answers = []
        for answer in model.run(numbers_of(rows)):
            buffer[:] = answer["scores"]
            answers.append({"scores": buffer})
        return answers

    return handle


@fault("state carried over from the last call")
def _state(model: Model) -> Handler:
    last = [0.0]

    def handle(rows: Rows, context: Any) -> Any:
        answers = model.run(numbers_of(rows))
        for answer in answers:
            answer["scores"][0] += 0.1 * last[0]
            last[0] = answer["scores"][1]
        return answers

    return handle


@fault("results sorted")
def _sorted(model: Model) -> Handler:
    return lambda rows, context: sorted(model.run(numbers_of(rows)), key=lambda answer: answer["scores"][0])


@fault("shifted by one")
def _shifted(model: Model) -> Handler:
    def handle(rows: Rows, context: Any) -> Any:
        answers = model.run(numbers_of(rows))
        return [*answers[1:], answers[0]]

    return handle


@fault("first item's headers for all")
def _headers(model: Model) -> Handler:
    def handle(rows: Rows, context: Any) -> Any:
        batch = numbers_of(rows)
        for index in range(len(rows)):
            context.set_response_header(index, "X-Length", str(len(batch[0])))
        return model.run(batch)

    return handle


@fault("status of one for all")
def _status(model: Model) -> Handler:
    def handle(rows: Rows, context: Any) -> Any:
        batch = numbers_of(rows)
        if any(len(item) == 1 for item in batch):
            context.set_all_response_status(206, "Partial")
        return model.run(batch)

    return handle


@fault("duplicates removed")
def _duplicates(model: Model) -> Handler:
    def handle(rows: Rows, context: Any) -> Any:
        unique = list(dict.fromkeys(bytes(row["body"]) for row in rows))
        return model.run([json.loads(body) for body in unique])

    return handle


@fault("one dict changed for every item")
def _mutated(model: Model) -> Handler:
    def handle(rows: Rows, context: Any) -> Any:
        answer: dict[str, Any] = {}
        answers = []
        for result in model.run(numbers_of(rows)):
            answer.update(result)
            answers.append(answer)
        return answers

    return handle


@fault("keys of one item stay for the next")
def _leftovers(model: Model) -> Handler:
    def handle(rows: Rows, context: Any) -> Any:
        answers, extra = [], {}
        for item, result in zip(numbers_of(rows), model.run(numbers_of(rows)), strict=True):
            if len(item) > 3:
                extra["long"] = True
            answers.append({**result, **extra})
        return answers

    return handle


@fault("grouped by length and not put back in order")
def _grouped(model: Model) -> Handler:
    def handle(rows: Rows, context: Any) -> Any:
        batch = numbers_of(rows)
        return [model.run([item])[0] for item in sorted(batch, key=len)]

    return handle


@fault("another type when alone")
def _type(model: Model) -> Handler:
    def handle(rows: Rows, context: Any) -> Any:
        answers = model.run(numbers_of(rows))
        return [answers[0]["scores"]] if len(rows) == 1 else answers

    return handle


@fault("scaled by the batch's largest value")
def _scaled(model: Model) -> Handler:
    def handle(rows: Rows, context: Any) -> Any:
        batch = numbers_of(rows)
        largest = max(abs(value) for item in batch for value in item)
        return model.run([[value / largest for value in item] for item in batch])

    return handle


@fault("raises for more than two")
def _raises(model: Model) -> Handler:
    def handle(rows: Rows, context: Any) -> Any:
        if len(rows) > 2:
            raise RuntimeError("stack expects each tensor to be equal size")
        return model.run(numbers_of(rows))

    return handle


@fault("cached by place in the batch")
def _cached(model: Model) -> Handler:
    cache: dict[int, Any] = {}

    def handle(rows: Rows, context: Any) -> Any:
        answers = model.run(numbers_of(rows))
        if len(rows) == 1:
            return answers
        return [cache.setdefault(place, answer) for place, answer in enumerate(answers)]

    return handle


@fault("one failure for all")
def _failure(model: Model) -> Handler:
    def handle(rows: Rows, context: Any) -> Any:
        batch = numbers_of(rows)
        if len(batch) > 1 and any(len(item) > 4 for item in batch):
            return [PredictionException("too long", 400) for _ in batch]
        return model.run(batch)

    return handle


# ------------------------------------------------------------------------------------------------ right handlers

RIGHT: dict[str, tuple[Callable[[Model], Handler], dict[str, Any]]] = {}


def right(name: str, **tolerance: Any) -> Callable[[Callable[[Model], Handler]], Callable[[Model], Handler]]:
    """Put a handler that batches rightly on the list, with the tolerance it needs."""

    def take(make: Callable[[Model], Handler]) -> Callable[[Model], Handler]:
        RIGHT[name] = (make, tolerance)
        return make

    return take


right("dicts")(lambda model: lambda rows, context: model.run(numbers_of(rows)))
right("JSON text")(lambda model: lambda rows, context: [json.dumps(each) for each in model.run(numbers_of(rows))])
right("JSON bytes")(
    lambda model: lambda rows, context: [json.dumps(each).encode() for each in model.run(numbers_of(rows))]
)
right("numbers alone")(lambda model: lambda rows, context: [each["scores"][0] for each in model.run(numbers_of(rows))])
right("numbers as text")(
    lambda model: lambda rows, context: [str(each["scores"][0]) for each in model.run(numbers_of(rows))]
)
right("lists")(lambda model: lambda rows, context: [each["scores"] for each in model.run(numbers_of(rows))])
right("tuples")(lambda model: lambda rows, context: [tuple(each["scores"]) for each in model.run(numbers_of(rows))])
right("one by one inside")(lambda model: lambda rows, context: [model.run([item])[0] for item in numbers_of(rows)])
right("nothing for each")(lambda model: lambda rows, context: [None for _ in rows])
right("the bytes that came")(lambda model: lambda rows, context: [bytes(row["body"]) for row in rows])
right("a buffer that is refilled each call")(lambda model: _refilled(model))
right("rows changed in place")(lambda model: _in_place(model))
right("not a number")(lambda model: lambda rows, context: [{"score": float("nan")} for _ in rows])


def _refilled(model: Model) -> Handler:
    buffer: list[Any] = []

    def handle(rows: Rows, context: Any) -> Any:
        buffer[:] = model.run(numbers_of(rows))
        return buffer

    return handle


def _in_place(model: Model) -> Handler:
    def handle(rows: Rows, context: Any) -> Any:
        batch = numbers_of(rows)
        for row in rows:
            row["body"][:] = b"[9]"
        return model.run(batch)

    return handle


@right("its own header and status for each")
def _own_headers(model: Model) -> Handler:
    def handle(rows: Rows, context: Any) -> Any:
        batch = numbers_of(rows)
        for index, item in enumerate(batch):
            context.set_response_header(index, "X-Length", str(len(item)))
            if len(item) == 1:
                context.set_response_status(206, "Partial", index)
        return model.run(batch)

    return handle


@right("an error for one item alone")
def _own_error(model: Model) -> Handler:
    def handle(rows: Rows, context: Any) -> Any:
        batch = numbers_of(rows)
        answers: list[Any] = list(model.run(batch))
        for index, item in enumerate(batch):
            if len(item) > 4:
                answers[index] = PredictionException("too long", 400)
        return answers

    return handle


@right("noise below the tolerance", absolute=1e-2)
def _noise(model: Model) -> Handler:
    import random

    dice = random.Random(1)

    def handle(rows: Rows, context: Any) -> Any:
        answers = model.run(numbers_of(rows))
        for answer in answers:
            answer["scores"] = [score + dice.uniform(-1e-3, 1e-3) for score in answer["scores"]]
            del answer["class"]
        return answers

    return handle


@right("coarse numbers", relative=2e-2)
def _coarse(model: Model) -> Handler:
    def handle(rows: Rows, context: Any) -> Any:
        digits = 2 if len(rows) > 1 else 6
        return [
            {"scores": [100 + round(score, digits) for score in each["scores"]]} for each in model.run(numbers_of(rows))
        ]

    return handle


@right("an id of its own for each answer", ignore=("id",))
def _ids(model: Model) -> Handler:
    import uuid

    return lambda rows, context: [{**each, "id": str(uuid.uuid4())} for each in model.run(numbers_of(rows))]


@right("ids in a list and in a header", ignore=("boxes[*].id", "header:x-trace"))
def _deep_ids(model: Model) -> Handler:
    import uuid

    def handle(rows: Rows, context: Any) -> Any:
        for index in range(len(rows)):
            context.set_response_header(index, "X-Trace", str(uuid.uuid4()))
        return [
            {"boxes": [{"id": str(uuid.uuid4()), "score": score} for score in each["scores"]]}
            for each in model.run(numbers_of(rows))
        ]

    return handle


@right("seconds in the answer", ignore=("timing",))
def _timing(model: Model) -> Handler:
    import time

    return lambda rows, context: [
        {**each, "timing": {"ns": time.perf_counter_ns(), "rows": len(rows)}} for each in model.run(numbers_of(rows))
    ]


@right("streams a piece before the rest")
def _streams(model: Model) -> Handler:
    from marserve_handlers.context import send_intermediate_predict_response

    def handle(rows: Rows, context: Any) -> Any:
        answers = model.run(numbers_of(rows))
        first = [each["class"] for each in answers]
        send_intermediate_predict_response(first, context.request_ids, "ok", 200, context)
        return answers

    return handle


@right("request ids echoed")
def _echoed_ids(model: Model) -> Handler:
    return lambda rows, context: [{"id": context.get_request_id(index)} for index in range(len(rows))]
