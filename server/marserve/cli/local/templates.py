"""The files of `marserve new`: for each template a model that answers, its test, and a request.

A template's texts have `NAME` where the folder's name belongs.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping

TEMPLATES = ("tensor", "vision", "text", "stream", "onnx")

_TENSOR = '''"""Four numbers in, three scores out: put your own network into `load` and `predict`."""

import numpy as np

from marserve_handlers import Tensor, model


@model(
    inputs={"features": Tensor("float32", ["batch", 4])},
    outputs={"scores": Tensor("float32", ["batch", 3])},
)
class Scores:
    def load(self, context):  # once: read weights, from files beside this one
        self.weights = np.eye(4, 3, dtype="float32")

    def predict(self, features):  # a batch of requests: [batch, 4]
        return {"scores": features @ self.weights}
'''

_TENSOR_TEST = """from marserve_handlers.testing import serve
from model import Scores


def test_features_get_scores():
    with serve(Scores) as model:
        assert model({"features": [1, 2, 3, 4]}).json() == {"scores": [1.0, 2.0, 3.0]}


def test_too_few_features_are_refused():
    with serve(Scores) as model:
        assert model({"features": [1, 2]}).status == 400
"""

_VISION = '''"""A picture in, labels with probabilities out: put your own network into `load` and `predict`."""

import numpy as np
from PIL import Image

from marserve_handlers import model

LABELS = ["red", "green", "blue"]


@model
class Colours:
    def load(self, context):  # once: read weights, from files beside this one
        self.sharpness = 4.0

    def predict(self, picture: Image.Image) -> dict:  # one request
        pixels = np.asarray(picture.convert("RGB").resize((32, 32)), dtype="float32") / 255
        scores = np.exp(self.sharpness * pixels.mean(axis=(0, 1)))
        return {label: round(float(share), 4) for label, share in zip(LABELS, scores / scores.sum())}
'''

_VISION_TEST = """from pathlib import Path

from marserve_handlers.testing import serve
from model import Colours

PICTURE = Path(__file__).with_name("request.png")


def test_a_picture_gets_its_colour():
    with serve(Colours) as model:
        colours = model(PICTURE.read_bytes()).json()
        assert max(colours, key=colours.get) == "blue"


def test_what_is_no_picture_is_refused():
    with serve(Colours) as model:
        assert model(b"no picture").status == 400
"""

_TEXT = '''"""A review in, its sentiment out: put your own network into `load` and `predict`."""

from dataclasses import dataclass

from marserve_handlers import model


@dataclass
class Review:
    text: str
    stars: int = 3


@dataclass
class Sentiment:
    label: str
    score: float


@model
class Sentiments:
    def load(self, context):  # once: read weights, from files beside this one
        self.good, self.bad = {"good", "great", "love"}, {"bad", "poor", "hate"}

    def predict(self, review: Review) -> Sentiment:  # one request
        words = review.text.lower().split()
        score = sum(word in self.good for word in words) - sum(word in self.bad for word in words) + review.stars - 3
        return Sentiment("positive" if score > 0 else "negative" if score < 0 else "neutral", float(score))
'''

_TEXT_TEST = """from marserve_handlers.testing import serve
from model import Sentiments


def test_a_review_gets_its_sentiment():
    with serve(Sentiments) as model:
        assert model({"text": "a great day"}).json() == {"label": "positive", "score": 1.0}


def test_a_review_without_text_is_refused():
    with serve(Sentiments) as model:
        assert model({"stars": 5}).status == 400
"""

_STREAM = '''"""A prompt in, words out one by one: put your own network into `load` and `predict`."""

import time
from collections.abc import Iterator

from marserve_handlers import model


@model
class Words:
    def load(self, context):  # once: read weights, from files beside this one
        self.pause_s = 0.05

    def predict(self, prompt: str) -> Iterator[str]:  # one request; each piece goes out as it is made
        for word in prompt.split():
            yield word.upper() + " "
            time.sleep(self.pause_s)
'''

_STREAM_TEST = """from marserve_handlers.testing import serve
from model import Words


def test_words_come_one_by_one():
    with serve(Words) as model:
        answer = model("hello world")
        assert answer.body == b"HELLO WORLD "
        assert answer.pieces[0] == b"HELLO "
"""

_ONNX_TEST = """from pathlib import Path

import numpy as np
import pytest

onnxruntime = pytest.importorskip("onnxruntime", reason="pip install 'marserve[onnx]'")


def test_features_get_scores():
    program = onnxruntime.InferenceSession(Path(__file__).with_name("model.onnx").read_bytes())
    (scores,) = program.run(None, {"features": np.array([[1, 2, 3, 4]], dtype="float32")})
    assert scores.tolist() == [[5.0, 6.0, 7.0]]
"""

# scores = features @ w + b, float32, [batch, 4] to [batch, 3].
_ONNX = base64.b64decode(
    "CAg6twEKHgoIZmVhdHVyZXMKAXcKAWISBnNjb3JlcyIER2VtbRIBZyo7CAQIAxABQgF3SjAAAIA/AAAAAAAAAAAAAAAAAACAPwAAAAAAAAAA"
    "AAAAAAAAgD8AAIA/AACAPwAAgD8qFQgDEAFCAWJKDAAAAAAAAAAAAAAAAFofCghmZWF0dXJlcxITChEIARINCgcSBWJhdGNoCgIIBGIdCgZz"
    "Y29yZXMSEwoRCAESDQoHEgViYXRjaAoCCANCBAoAEBE="
)

_CONFIG = """# How servers run the model. More keys: the page on archives in marserve's documentation.
batchSize: 8        # requests that are predicted together, at most
minWorkers: 1
maxWorkers: 1
"""

_README = """# NAME

`marserve run .` serves it, and `marserve run . --reload` takes each change as it is saved.
`curl REQUEST http://127.0.0.1:8080/predictions/NAME` asks it.
`python -m pytest` tests it, after `pip install pytest`.
`marserve archive . --register` packs it and registers it with a running server.
"""


def files_of(template: str, name: str) -> dict[str, bytes]:
    """The files of a folder of this name."""
    request, body, own = _parts(template)
    said = "-H 'Content-Type: application/json' " if request.endswith(".json") else ""
    said = "-N " if template == "stream" else said  # each piece is shown as it comes
    readme = _README.replace("REQUEST", said + "-T " + request).replace("NAME", name)
    texts = {"model-config.yaml": _CONFIG, "README.md": readme}
    files = {file: content if isinstance(content, bytes) else content.encode() for file, content in own.items()}
    return {**files, request: body, **{file: text.encode() for file, text in texts.items()}}


def _parts(template: str) -> tuple[str, bytes, Mapping[str, str | bytes]]:
    """The request's file and body, and the files that only this template has."""
    if template == "vision":
        return "request.png", _blue_picture(), {"model.py": _VISION, "test_model.py": _VISION_TEST}
    if template == "text":
        request = b'{"text": "a great day", "stars": 4}\n'
        return "request.json", request, {"model.py": _TEXT, "test_model.py": _TEXT_TEST}
    if template == "stream":
        return "request.txt", b"hello from a stream of words", {"model.py": _STREAM, "test_model.py": _STREAM_TEST}
    if template == "onnx":
        return "request.json", b"[1, 2, 3, 4]\n", {"model.onnx": _ONNX, "test_model.py": _ONNX_TEST}
    request = b'{"features": [1, 2, 3, 4]}\n'
    return "request.json", request, {"model.py": _TENSOR, "test_model.py": _TENSOR_TEST}


def _blue_picture(size: int = 32) -> bytes:
    """A blue square as PNG."""
    rows = (b"\0" + bytes((30, 60, 220)) * size) * size
    head = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    packed = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + packed
