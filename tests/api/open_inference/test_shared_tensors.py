"""Tests for the shared memory that inference requests name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from marserve.api.open_inference.regions import Regions
from marserve.api.open_inference.shared_tensors import LOOKED_AT_BYTES, SharedTensors
from marserve.errors import BadInput, ModelNotFound
from marserve.messages import SHARED_TENSORS, Request

HERE = {"shared_memory_region": "r", "shared_memory_byte_size": 8}


class Models:
    """`m` declares its tensors, `far` too, on other machines; `none` is not there."""

    def takes_tensors(self, model: str, version: str | None) -> bool:
        """Whether a model declares them."""
        if model == "none":
            raise ModelNotFound(model)
        return model in ("m", "far")

    def runs_elsewhere(self, model: str, version: str | None) -> bool:
        """Whether it is on other machines."""
        return model == "far"


@pytest.fixture
def shared(tmp_path: Path) -> SharedTensors:
    """A region `r` of 100 bytes."""
    (tmp_path / "a").write_bytes(bytes(120))
    regions = Regions(tmp_path, most_bytes=100, most_regions=2)
    regions.register("r", "a", 20, 100)

    registry: Any = Models()
    return SharedTensors(regions, registry)


def header(shared: SharedTensors, model: str = "m", **document: Any) -> Any:
    """What the header of a request says, None without one. Raw bytes follow the JSON."""
    text = json.dumps(document).encode()
    found = shared.header(model, None, bytearray(text + b'"shared_memory_'), len(text))
    if found is None:
        return None
    assert found[0] == SHARED_TENSORS
    return json.loads(found[1])


def tensor(name: Any = "x", **parameters: Any) -> dict[str, Any]:
    """A tensor with these parameters."""
    return {"name": name, "parameters": parameters}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"inputs": [tensor(shared_memory_region="r")]}, "Input 'x' has no shared_memory_byte_size"),
        ({"inputs": [tensor(shared_memory_byte_size=8)]}, "Input 'x' has no shared_memory_region"),
        ({"inputs": [tensor(shared_memory_offset=8)]}, "Input 'x' has no shared_memory_region"),
        ({"inputs": [tensor(**HERE, shared_memory_offset=93)]}, "Input 'x': .* end at 101, and the region 'r' has 100"),
        ({"inputs": [tensor(**{**HERE, "shared_memory_region": "s"})]}, "has the name 's'"),
        ({"inputs": [tensor(3, **HERE)]}, r"inputs\[0\].name is 3"),
        ({"outputs": [tensor("y"), tensor(None, **HERE)]}, r"outputs\[1\].name is missing"),
        ({"outputs": [tensor("y", **HERE, classification=3)]}, "Output 'y' asks for a classification"),
        ({"outputs": [tensor("y", **{**HERE, "shared_memory_byte_size": 101})]}, "Output 'y': .* end at 101"),
        ({"inputs": {"x": HERE}}, "cannot be read"),
        ({"inputs": [tensor(**HERE), {"name": "z", "data": [float("nan")]}]}, "cannot be read.*binary tensor"),
        (
            {"inputs": [tensor(name, **{**HERE, "shared_memory_byte_size": 60}) for name in "xy"]},
            "come to 120, more than all regions together may have, 100",
        ),
    ],
)
def test_memory_that_cannot_be_used_is_named(shared: SharedTensors, document: dict[str, Any], words: str) -> None:
    """With its tensor, before the request is accepted."""
    with pytest.raises(BadInput, match=words):
        header(shared, **document)


def test_a_model_that_cannot_see_the_memory_takes_no_tensors_from_it(shared: SharedTensors) -> None:
    """A handler of rows would get the protocol's words, a worker elsewhere another file."""
    with pytest.raises(BadInput, match="its workers are on other machines"):
        header(shared, "far", inputs=[tensor(**HERE)])
    with pytest.raises(BadInput, match="does not declare its tensors"):
        header(shared, "rows", inputs=[tensor(**HERE)])
    with pytest.raises(ModelNotFound):
        header(shared, "none", inputs=[tensor(**HERE)])


def test_a_request_that_names_no_memory_has_no_header(shared: SharedTensors) -> None:
    """Nor is one looked at that is too long; its worker refuses what it says."""
    assert header(shared, inputs=[tensor(binary_data_size=8)]) is None
    assert header(shared, id='"shared_memory_region"', inputs=[]) is None
    assert header(shared, inputs=[tensor(**HERE), tensor("z" * LOOKED_AT_BYTES)]) is None


def test_inputs_and_outputs_are_told_to_the_worker(shared: SharedTensors, tmp_path: Path) -> None:
    """Their places in the file; tensors elsewhere are not among them."""
    found = header(
        shared,
        inputs=[tensor(**HERE), tensor("body", binary_data_size=4)],
        outputs=[tensor("y", **HERE, shared_memory_offset=92), tensor("z", binary_data=True)],
    )

    at = (tmp_path / "a").stat()
    assert found == {
        "inputs": {"x": [str((tmp_path / "a").resolve()), at.st_dev, at.st_ino, 20, 8]},
        "outputs": {"y": [str((tmp_path / "a").resolve()), at.st_dev, at.st_ino, 112, 8]},
    }
    assert Request("1", [], server_headers=[(SHARED_TENSORS, "{}")]).shares_memory
    assert not Request("1", [], [(SHARED_TENSORS.encode(), b"{}")]).shares_memory
