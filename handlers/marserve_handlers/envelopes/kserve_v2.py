"""The envelope `kservev2`: the Open Inference Protocol's JSON, named tensors in and out.

Tensors are nested lists to the handler: it has none of the protocol's types, and needs none.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from marserve_handlers.declared.open_inference.datatypes import BF16, NUMPY
from marserve_handlers.declared.open_inference.marking import has_raw_tensors, header_length, is_marked
from marserve_handlers.declared.open_inference.request import read_request
from marserve_handlers.envelopes.base import BaseEnvelope, document_of, split
from marserve_handlers.errors import PredictionException

# As in JSON, which has no BF16.
_DatatypeToNumpy = {**{datatype: dtype for datatype, dtype in NUMPY.items() if datatype != BF16}, "BYTES": "object"}

_NumpyToDatatype = {numpy: datatype for datatype, numpy in _DatatypeToNumpy.items()}


def _to_dtype(datatype: str) -> np.dtype[Any]:
    """numpy's type of the protocol's name. Raises KeyError for another word."""
    return np.dtype(_DatatypeToNumpy[datatype])


def _to_datatype(dtype: np.dtype[Any]) -> str:
    """The protocol's name of numpy's type; text, bytes and objects are `BYTES`. Raises KeyError for complex numbers."""
    return "BYTES" if dtype.kind in "USO" else _NumpyToDatatype[dtype.name]


class KServev2Envelope(BaseEnvelope):
    """The handler gets the data of all inputs, one list for the whole batch, and gives one answer for each of them.

    Answer i goes by the name of input i. Batches of several requests work: inputs are joined, answers cut back.

    With `passes_protocol` the handler reads the protocol itself, and gets the requests that came by its routes as they
    are. Others are unwrapped, as their clients may name inputs otherwise than the handler's model.
    """

    answers_nothing_itself = True
    passes_protocol = False

    def __init__(self, handle_fn: Any) -> None:
        super().__init__(handle_fn)
        self._requests: list[tuple[str | None, list[str]]] = []

    def handle(self, data: Any, context: Any) -> Any:
        """Answer a batch. Raises ValueError for one of both kinds, which the server then runs in parts."""
        if self.passes_protocol and data:
            marked = {is_marked(context, at) for at in range(len(data))}
            if len(marked) > 1:
                raise ValueError("Requests of the Open Inference Protocol's routes and of others share a batch.")
            if True in marked:
                return self._handle_fn(data, context)
        return super().handle(data, context)

    def parse_input(self, data: Any) -> list[Any]:
        """The data of all rows' inputs, reshaped; of `BYTES` the first element."""
        return self._batch_from_json(data)

    def format_output(self, data: Any) -> list[dict[str, Any]]:
        """`{"id", "model_name", "model_version", "outputs"}` for each row."""
        return self._batch_to_json(data)

    def _batch_from_json(self, rows: Any) -> list[Any]:
        """The inputs of all rows; what the answers need of them is kept."""
        self._requests, inputs = [], []
        for at, row in enumerate(rows):
            document = self._raw_document(at, row) or document_of(row)
            given = document.get("inputs") if isinstance(document, dict) else None
            if not isinstance(given, list) or not all(isinstance(tensor, dict) for tensor in given):
                raise PredictionException('The request must be a JSON object with a list "inputs" of objects.', 400)
            names = [str(tensor.get("name", f"input-{index}")) for index, tensor in enumerate(given)]
            request_id = document.get("id")
            self._requests.append((None if request_id is None else str(request_id), names))
            inputs += self._from_json(given)
        return inputs

    def _raw_document(self, at: int, row: Any) -> dict[str, Any] | None:
        """The document of a row with raw tensors, as though its values had come in JSON; None for another row.

        Elements of `BYTES` are texts where they are UTF-8. Raises BadInput.
        """
        items = getattr(self.context, "batch_items", ())
        if at >= len(items) or not has_raw_tensors(items[at]):
            return None
        asked = read_request(row.get("body"), header_length(items[at].headers))
        inputs = [
            {
                "name": name,
                "datatype": asked.datatypes[name],
                "shape": list(array.shape),
                "data": [_as_text(each) for each in array.reshape(-1).tolist()],
            }
            for name, array in asked.tensors.items()
        ]
        return {"id": asked.id or None, "inputs": inputs}

    def _from_json(self, body_list: list[dict[str, Any]]) -> list[Any]:
        """The data of one row's inputs."""
        return [_reshape(tensor) for tensor in body_list]

    def _batch_to_json(self, data: Any) -> list[dict[str, Any]]:
        """One response a row. `model_name` and `model_version` are the manifest's."""
        manifest = getattr(self.context, "manifest", None) or {}
        entry = manifest.get("model") or {}
        responses = []
        rows = split(data, [len(names) for _, names in self._requests])
        for idx, (row, (request_id, names)) in enumerate(zip(rows, self._requests, strict=True)):
            if request_id is None and self.context is not None:
                request_id = self.context.get_request_id(idx)
            outputs = [
                self._to_json(answer, names[at] if at < len(names) else f"output-{at}") for at, answer in enumerate(row)
            ]
            responses.append(
                {
                    "id": request_id,
                    "model_name": entry.get("modelName"),
                    "model_version": entry.get("modelVersion"),
                    "outputs": outputs,
                }
            )
        return responses

    def _to_json(self, data: Any, input_name: str) -> dict[str, Any]:
        """One answer as a tensor: its data in one row, its shape beside it; a single value has the shape [1]."""
        array = _as_array(data)
        return {
            "name": input_name,
            "datatype": _to_datatype(array.dtype),
            "data": array.reshape(-1).tolist(),
            "shape": list(array.shape),
        }


def _as_text(value: Any) -> Any:
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return value


def _reshape(tensor: dict[str, Any]) -> Any:
    """The data of one input as nested lists of its shape; of `BYTES` the first element."""
    name, data = tensor.get("name", "?"), tensor.get("data")
    if data is None:
        raise PredictionException(f'Input "{name}" of the request has no "data".', 400)
    datatype = tensor.get("datatype")
    if datatype is not None and datatype not in _DatatypeToNumpy:
        words = ", ".join(_DatatypeToNumpy)
        raise PredictionException(f'Input "{name}" has the datatype "{datatype}"; it must be one of {words}.', 400)
    if datatype == "BYTES":
        return data[0] if isinstance(data, list) and data else data
    shape = tensor.get("shape")
    if shape is None or not isinstance(data, list):
        return data
    flat: list[Any] = []
    _flatten(data, flat)
    is_shape = isinstance(shape, list) and all(type(side) is int and side >= 0 for side in shape)
    if not is_shape or math.prod(shape) != len(flat):
        raise PredictionException(f'Input "{name}" has {len(flat)} values, which is not its shape {shape}.', 400)
    for side in reversed(shape[1:]):
        flat = [flat[at : at + side] for at in range(0, len(flat), side)] if side else []
    return flat


def _flatten(values: list[Any], into: list[Any]) -> None:
    for value in values:
        if isinstance(value, list):
            _flatten(value, into)
        else:
            into.append(value)


def _as_array(data: Any) -> np.ndarray[Any, Any]:
    """An array of one dimension at least; dicts and ragged lists are an array of objects."""
    if hasattr(data, "detach"):  # a torch tensor, without torch imported here
        data = data.detach().cpu().numpy()
    if isinstance(data, (bytes, bytearray)):
        data = data.decode("utf-8", "replace")
    try:
        array = np.asarray(data)
    except ValueError:
        array = np.empty(len(data), dtype=object)
        array[:] = data
    return array.reshape(1) if array.ndim == 0 else array
