"""Handlers with a DALI pipeline, with a stand-in for DALI."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.model_context import make_context

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402

from marserve_handlers.dali import DALIImageClassifier, get_dali_pipeline  # noqa: E402
from marserve_handlers.errors import BadPicture, ModelNotLoadable  # noqa: E402

pytestmark = pytest.mark.torch


class FakePipeline:
    """A pipeline whose output is how long each file is, in three scores."""

    options: dict[str, Any]
    is_built = False

    @classmethod
    def deserialize(cls, **options: Any) -> FakePipeline:
        """From a file."""
        pipeline = cls()
        pipeline.options = options
        return pipeline

    def build(self) -> None:
        """Get ready."""
        self.is_built = True

    def feed_input(self, source: str, batch: list[Any]) -> None:
        """Take the files."""
        assert source == "my_source"
        self.batch = batch

    def run(self) -> Any:
        """One output, on the GPU."""
        self.scores = np.asarray([[len(file), 0, 1] for file in self.batch], dtype=np.float32)
        return (SimpleNamespace(as_cpu=self._to_host, as_tensor=lambda: self.scores),)

    def _to_host(self) -> Any:
        raise AssertionError("the output is on the device, and goes through the host")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archive with a pipeline and a model that changes nothing, where DALI is installed."""
    monkeypatch.setitem(sys.modules, "nvidia", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "nvidia.dali", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "nvidia.dali.pipeline", SimpleNamespace(Pipeline=FakePipeline))
    (tmp_path / "p.dali").write_bytes(b"")
    (tmp_path / "same.py").write_text("import torch\n\n\nclass Same(torch.nn.Identity):\n    pass\n")
    torch.save({}, tmp_path / "same.pt")
    yield tmp_path
    sys.modules.pop("same", None)


def test_pictures_go_through_the_pipeline(folder: Path) -> None:
    """Then it is as in `image_classifier`."""
    config = {"dali": {"num_threads": 2, "seed": 1, "batch_size": 3}, "handler": {"topk": 1}}
    handler = DALIImageClassifier()
    handler.initialize(make_context(folder, "same.pt", "same.py", config))

    answers = handler.handle([{"body": b"abc"}, {"data": bytearray(b"x" * 9)}], handler.context)

    assert [list(answer) for answer in answers] == [["0"], ["0"]]
    assert handler.pipeline.is_built
    assert handler.pipeline.options["num_threads"] == 2
    assert handler.pipeline.options["batch_size"] == 3
    with pytest.raises(BadPicture):
        handler.handle([{"body": "text"}], handler.context)


def test_the_output_stays_on_its_device_and_is_the_models_own(folder: Path) -> None:
    """The pipeline writes to its memory again; one whose output is on the host is taken from there."""
    handler = DALIImageClassifier()
    handler.initialize(make_context(folder, "same.pt", "same.py", {}))

    first = handler.preprocess([{"body": b"abc"}])
    handler.pipeline.scores[:] = 0.0
    handler.pipeline.run = lambda: (SimpleNamespace(as_array=lambda: np.ones((1, 3), np.float32)),)
    on_host = handler.preprocess([{"body": b"abc"}])

    assert first.tolist() == [[3.0, 0.0, 1.0]]
    assert on_host.tolist() == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"pipeline_file": "other.dali"}, "other.dali is not in the archive"),
        ([1], "it must be a map"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused(folder: Path, config: Any, words: str) -> None:
    """With a sentence."""
    with pytest.raises(ModelNotLoadable, match=words):
        get_dali_pipeline(make_context(folder, config={"dali": config}))


def test_without_a_pipeline_it_says_so(folder: Path) -> None:
    """The archive must hold one."""
    (folder / "p.dali").unlink()

    with pytest.raises(ModelNotLoadable, match=r"holds 0 files \*\.dali"):
        get_dali_pipeline(make_context(folder))


def test_without_dali_it_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which package is missing."""
    monkeypatch.setitem(sys.modules, "nvidia.dali.pipeline", None)

    with pytest.raises(ModelNotLoadable, match="needs NVIDIA DALI"):
        get_dali_pipeline(make_context(folder))
