"""The built-in handler `sagemaker_script`: an inference script as SageMaker's PyTorch toolkit takes it.

The model's folder has the script in `code/` (or beside the weights), called `inference.py` or as `SAGEMAKER_PROGRAM`
says. Of its functions `model_fn`, `input_fn`, `predict_fn` and `output_fn`, or `transform_fn` in place of the last
three, those that are missing are the toolkit's: a TorchScript model, and tensors out of JSON, CSV or NPY and back.
"""

from __future__ import annotations

import importlib
import inspect
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from marserve_handlers.context import Context
from marserve_handlers.errors import ModelNotLoadable, PredictionException

JSON, CSV, NPY, ANY = "application/json", "text/csv", "application/x-npy", "*/*"
DEFAULT_PROGRAM = "inference.py"

Function = Callable[..., Any]


class SageMakerScript:
    """Calls the script's functions for each request of a batch, one after the other, as the toolkit does.

    A function may take one argument more than it must: it is then given the context.
    """

    def __init__(self) -> None:
        self.model: Any = None
        self.device: Any = None
        self.context: Any = None
        self._transform: Function = self._transform_in_steps
        self._input: Function = self._read
        self._predict: Function = self._run
        self._output: Function = self._write

    def initialize(self, context: Context) -> None:
        """Import the script and have it load the model. Raises ModelNotLoadable, and whatever the script raises."""
        from marserve_handlers.runtimes.tensors import own_device

        self.context = context
        folder = Path(str(context.system_properties.get("model_dir")))
        self.device = own_device(context, context.system_properties.get("gpu_id"))
        script = find_script(folder, os.environ.get("SAGEMAKER_PROGRAM"))
        load: Function = self._load
        if script is not None:
            module = _import_script(script)
            names = ("model_fn", "transform_fn", "input_fn", "predict_fn", "output_fn")
            load_, transform, *steps = (getattr(module, name, None) for name in names)
            if transform is not None and any(steps):
                raise ModelNotLoadable(
                    f"{script.name} defines transform_fn, and steps of it as well; leave out transform_fn, or "
                    "input_fn, predict_fn and output_fn."
                )
            load = load_ or load
            self._transform = transform or self._transform
            self._input, self._predict, self._output = (
                mine or ours for mine, ours in zip(steps, (self._read, self._run, self._write), strict=True)
            )
        self.model = self._call(load, str(folder))

    def handle(self, data: list[Any], context: Context) -> list[Any]:
        """B rows in, B bodies out, each with the content type that its client accepts, or that the script says."""
        answers = []
        for index, row in enumerate(data):
            headers = {str(name).lower(): value for name, value in context.get_all_request_header(index).items()}
            content_type = str(headers.get("content-type") or JSON)
            accept = headers.get("accept")
            if not accept or accept == ANY:
                accept = os.environ.get("SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT", JSON)
            answer = self._call(self._transform, self.model, _body_of(row, content_type), content_type, accept)
            if isinstance(answer, tuple):
                answer, accept = answer
            context.set_response_content_type(index, str(accept))
            answers.append(answer)
        return answers

    def _call(self, function: Function, *arguments: Any) -> Any:
        takes_context = len(inspect.signature(function).parameters) == len(arguments) + 1
        return function(*arguments, self.context) if takes_context else function(*arguments)

    def _transform_in_steps(self, model: Any, body: Any, content_type: str, accept: str) -> Any:
        data = self._call(self._input, body, content_type)
        return self._call(self._output, self._call(self._predict, data, model), accept)

    # ------------------------------------------------------------------------- what a script need not say itself

    def _load(self, model_dir: str) -> Any:
        from marserve_handlers.runtimes.torchscript import load_torchscript

        folder = Path(model_dir)
        found = [folder / "model.pt"]
        if not found[0].is_file():
            found = sorted(file for file in folder.iterdir() if file.is_file() and file.suffix in (".pt", ".pth"))
        if len(found) != 1:
            names = ", ".join(file.name for file in found) or "none"
            raise ModelNotLoadable(
                f"No script says how the model is loaded, and of files .pt and .pth there is not exactly one: {names}. "
                f"Write model_fn(model_dir) into code/{DEFAULT_PROGRAM}, or leave one TorchScript model."
            )
        return load_torchscript(str(found[0]), self.device)

    def _read(self, body: Any, content_type: str) -> Any:
        from marserve_handlers.runtimes.tensors import as_tensor, stack

        rows = _decode(body, content_type)
        try:
            # An array says itself what its numbers are; of text they are floats.
            return stack(rows, self.device) if isinstance(rows, list) else as_tensor(rows, self.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise PredictionException("The request's rows are not numbers of one shape.", 400) from error

    def _run(self, data: Any, model: Any) -> Any:
        from marserve_handlers.runtimes.tensors import run

        return run(model, data, self.device, (), {})

    def _write(self, prediction: Any, accept: str) -> Any:
        if hasattr(prediction, "detach"):
            prediction = prediction.detach().cpu().numpy()
        rows = prediction.tolist() if hasattr(prediction, "tolist") else prediction
        for word in accept.split(","):
            kind = word.partition(";")[0].strip().lower()
            if kind in (JSON, ANY):
                return json.dumps(rows), JSON
            if kind == CSV:
                return _write_csv(rows), CSV
            if kind == NPY:
                return _write_npy(prediction), NPY
        raise PredictionException(
            f"Nothing accepted ({accept[:100]}) can be written; ask for {JSON}, {CSV}, {NPY}.", 406
        )


def find_script(folder: Path, program: str | None) -> Path | None:
    """The script of the model in `folder`; None if the folder has no script and the environment names none.

    `program` is SageMaker's word for it, a file's name or None. Raises ModelNotLoadable for a name that is not there.
    """
    name = program or DEFAULT_PROGRAM
    file = Path(name if name.endswith(".py") else f"{name}.py").name
    for place in (folder / "code" / file, folder / file):
        if place.is_file():
            return place
    if program:
        raise ModelNotLoadable(f"SAGEMAKER_PROGRAM is {program!r}, and the model has neither code/{file} nor {file}.")
    return None


def _import_script(script: Path) -> ModuleType:
    sys.path.insert(0, str(script.parent))
    importlib.invalidate_caches()
    return importlib.import_module(script.stem)


def _body_of(row: Any, content_type: str) -> Any:
    """What a script gets: text of JSON and CSV, bytes of everything else."""
    body = row.get("body", row.get("data")) if isinstance(row, dict) else row
    kind = content_type.partition(";")[0].strip().lower()
    if isinstance(body, bytes | bytearray | memoryview):
        try:
            return bytes(body).decode("utf-8") if kind in (JSON, CSV) else bytes(body)
        except UnicodeDecodeError:
            raise PredictionException(f"The request is no {content_type}: it is not UTF-8.", 400) from None
    # Where the server decodes JSON for its handlers (decode_input_request).
    return body if isinstance(body, str) else json.dumps(body)


def _decode(body: Any, content_type: str) -> Any:
    """The rows of a body in JSON, CSV or NPY. Raises PredictionException: 400 if malformed, 415 for other types."""
    kind = content_type.partition(";")[0].strip().lower()
    try:
        if kind == JSON:
            rows = json.loads(body)
            if not isinstance(rows, list):
                raise ValueError("no array")
            return rows
        if kind == CSV:
            return [[float(number) for number in line.split(",")] for line in body.splitlines() if line.strip()]
        if kind == NPY:
            import numpy as np

            return np.load(io.BytesIO(body), allow_pickle=False)
    except (TypeError, ValueError, EOFError) as error:
        raise PredictionException(f"The request is no {kind} with rows of numbers.", 400) from error
    raise PredictionException(f"Content type {content_type[:100]} cannot be read; send {JSON}, {CSV} or {NPY}.", 415)


def _write_csv(rows: Any) -> str:
    table = rows if isinstance(rows, list) else [rows]
    return "".join(",".join(map(str, row if isinstance(row, list) else [row])) + "\n" for row in table)


def _write_npy(prediction: Any) -> bytes:
    import numpy as np

    buffer = io.BytesIO()
    np.save(buffer, np.asarray(prediction), allow_pickle=False)
    return buffer.getvalue()
