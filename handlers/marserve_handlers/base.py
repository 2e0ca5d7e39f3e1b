"""`BaseHandler`: the life of a model in a worker, from `initialize` to the answers of a batch.

Authors subclass it and override the steps they need. Which runtime runs the model follows from the archive's manifest;
only that runtime is imported, and only when `initialize` runs: a worker with an ONNX model has no torch in it.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from abc import ABC
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from marserve_handlers.context import Checkpoint, Context
from marserve_handlers.declared.bodies import JSON, read_json, what_came
from marserve_handlers.errors import BadInput, ModelNotLoadable, PredictionException
from marserve_handlers.support.devices.compilation import read_compile_options, wants_aot_compile
from marserve_handlers.support.devices.devices import Device, choose_device
from marserve_handlers.support.labels import load_label_mapping
from marserve_handlers.support.shown import names_of, shown
from marserve_handlers.support.timing import timed

if TYPE_CHECKING:
    from marserve_handlers.declared.declaration import Declaration

logger = logging.getLogger(__name__)


class BaseHandler(ABC):  # noqa: B024 - authors combine it with ABC, so it must be one
    """Loads the archive's model and answers batches: preprocess, inference, postprocess.

    `model` is what the runtime gave: a torch module, a TorchScript module, an exported program's module, or an ONNX
    Runtime session. `device` is a `torch.device` wherever torch is loaded, else a `devices.Device`, which reads alike.
    `mapping` is `index_to_name.json` or None.
    """

    # For subclasses whose `__init__` leaves ours out.
    context: Any = None
    _named: Any = None
    _whole_numbers: Any = None
    takes_arrays = False
    """Whether the model takes and gives arrays (ONNX) and not tensors; set by `initialize`."""
    names_classes = False
    """Whether answers name classes: without `index_to_name.json` a worker then warns that they have numbers."""

    def __init__(self) -> None:
        self.model: Any = None
        self.mapping: dict[str, str] | None = None
        self.device: Any = None
        self.initialized = False
        self.context = None
        self.model_pt_path: str | None = None
        self.manifest: dict[str, Any] | None = None
        self.map_location: str | None = None
        self.explain = False
        self.target: Any = 0
        self.profiler_args: dict[str, Any] = {}
        self.model_yaml_config: dict[str, Any] = {}

    # ---------------------------------------------------------------------------------------------------- loading

    def initialize(self, context: Context) -> None:
        """Load the model that the manifest names onto the worker's device, and the labels of its classes.

        `modelFile` makes it eager; else the serialized file's ending decides: `.pt` (TorchScript), `.pt2`, `.onnx`,
        `.so` with `pt2: {export: {aot_compile: true}}`. Raises ModelNotLoadable, a RuntimeError, when that fails.
        """
        self.context = context
        self.model_yaml_config = context.model_yaml_config or {}
        self.manifest = context.manifest
        properties = context.system_properties
        model_dir = str(properties.get("model_dir"))
        entry = (self.manifest or {}).get("model") or {}
        serialized_file = entry.get("serializedFile")
        self.model_pt_path = os.path.join(model_dir, serialized_file) if serialized_file else None
        self.takes_arrays = not entry.get("modelFile") and str(serialized_file).endswith(".onnx")
        self.device = self._find_device(properties.get("gpu_id"))
        self.map_location = self.device.type

        self.model = self._load_served(model_dir, entry.get("modelFile"), serialized_file)
        sizes = tuple(getattr(context, "allowed_batch_sizes", ()))
        if sizes and self.device.type == "cuda":
            from marserve_handlers.runtimes.fixed_sizes import allow_graphs

            allow_graphs(sizes)
        is_compiled = False
        options = None if self.takes_arrays else read_compile_options(self.model_yaml_config)
        if options is not None and getattr(context, "one_rank", None) is not None:
            raise ModelNotLoadable(
                "parallel divides the model over ranks, and pt2 compiles it: a divided model is not compiled. Leave "
                "one of the two keys out."
            )
        if options is not None:
            from marserve_handlers.runtimes.tensors import compile_model

            eager = self.model
            self.model = compile_model(eager, options, self.device.type, context)
            is_compiled = self.model is not eager
        if sizes:
            from marserve_handlers.runtimes.fixed_sizes import with_fixed_sizes

            self.model = context.loaded_model = with_fixed_sizes(self.model, sizes, context)
            context.keeps_to_sizes = True
        if isinstance(context, Context):  # an author's tests may have another one
            context.engine = self._engine(entry, is_compiled=options is not None)
            context.is_compiled = is_compiled
        labels = os.path.join(model_dir, "index_to_name.json")
        if self.names_classes or os.path.isfile(labels):  # a missing one is a warning
            self.mapping = load_label_mapping(labels)
        if type(self) is BaseHandler:  # others read rows in their own way
            self._named = self._find_named_inputs(int(properties.get("batch_size") or 1), model_dir)
            if not self.takes_arrays:
                from marserve_handlers.runtimes.whole_numbers import WholeNumbers

                self._whole_numbers = WholeNumbers(self.model)
        self.initialized = True

    def _find_named_inputs(self, most_rows: int, model_dir: str) -> Any:
        """What answers rows that name the model's inputs, if it declares them; else None. Raises DeclarationError."""
        if self.takes_arrays:
            from marserve_handlers.runtimes.onnx import declare_session, is_session

            declaration: Any = declare_session(self.model) if is_session(self.model) else None
        else:
            declaration = getattr(self.model, "marserve_declaration", None)
        if declaration is None and self.model_yaml_config.get("signature") is None:
            return None
        # here: most models declare nothing, and need no numpy for it
        from marserve_handlers.declared.named import NamedInputs, row_by_row
        from marserve_handlers.declared.signature import Signature, read_signature

        signature = read_signature(self.model_yaml_config) or Signature(declaration)
        declared: Declaration = signature.declaration
        names = list(declared.inputs)
        if self.takes_arrays:
            from marserve_handlers.runtimes.onnx import its_outputs
            from marserve_handlers.runtimes.onnx import run as run_session

            outputs = its_outputs(self.model, declared.outputs)

            def run(arrays: list[Any]) -> Any:
                return run_session(self.model, dict(zip(names, arrays, strict=True)), outputs)
        else:
            from marserve_handlers.runtimes.tensors import run_on_arrays

            dtypes = [tensor.dtype for tensor in declared.inputs.values()]

            def run(arrays: list[Any]) -> Any:
                return run_on_arrays(self.model, arrays, self.device, dtypes)

        reshaped = signature.reshaping(run)
        if declaration is not None and declaration.takes_one_row and declared.has_batch_axis:
            reshaped = row_by_row(reshaped)
        return NamedInputs(declared, reshaped, most_rows, signature.read_labels(model_dir))

    @property
    def declaration(self) -> bytes:
        """The JSON of what the model declares, empty for nothing."""
        return b"" if self._named is None else bytes(self._named.text)

    @property
    def reads_open_inference(self) -> bool:
        """Whether the handler reads requests of the Open Inference Protocol itself, by what its model declares."""
        return self._named is not None

    def get_device(self) -> Any:
        """The device that the model is on."""
        return self.device

    def _find_device(self, gpu_id: int | None) -> Any:
        device_type = self.model_yaml_config.get("deviceType")
        if self.takes_arrays:
            from marserve_handlers.runtimes.onnx import available_kinds

            device = choose_device(gpu_id, available_kinds(), device_type)
            torch = sys.modules.get("torch")
            return device if torch is None else torch.device(str(device))
        from marserve_handlers.runtimes.tensors import own_device

        return own_device(self.context, gpu_id, device_type)

    def _load_served(self, model_dir: str, model_file: str | None, serialized_file: str | None) -> Any:
        """The build that an optimised archive holds, if it does what was promised; else the archive's model."""
        parent = functools.partial(self._load_model, model_dir, model_file, serialized_file)
        made_here = getattr(self.context, "build_folder", "")
        has_build = made_here or os.path.isfile(os.path.join(model_dir, "MAR-INF", "optimised.json"))
        is_whole = getattr(self.context, "parallel", None) is None
        if self.device.type != "cpu" or not is_whole or not has_build:
            model = parent()
        else:
            from marserve_handlers.runtimes.optimised import load_optimised

            model = load_optimised(made_here or model_dir, parent, getattr(self.context, "threads", 0), self.context)
        if isinstance(self.context, Context):  # an author's tests may have another one
            self.context.loaded_model = model
        return model

    def _engine(self, entry: Mapping[str, Any], *, is_compiled: bool) -> str:
        """The runtime and its version, in words; of an optimised archive the name of the build that serves."""
        if build := getattr(self.context, "build", ""):
            return f"{build}, an optimised build"
        if self.takes_arrays:
            return f"ONNX Runtime {getattr(sys.modules.get('onnxruntime'), '__version__', '')}".rstrip()
        ending = os.path.splitext(str(entry.get("serializedFile")))[1]
        kinds = {".pt": "TorchScript", ".pt2": "exported program", ".so": "AOTInductor"}
        kind = "eager" if entry.get("modelFile") else kinds.get(ending, "eager")
        if getattr(self.context, "one_rank", None) is not None:
            kind += f", divided over {self.context.one_rank.ranks} ranks"
        version = getattr(sys.modules.get("torch"), "__version__", "")
        return f"torch {version}, {'compiled, ' if is_compiled else ''}{kind}"

    def _load_model(self, model_dir: str, model_file: str | None, serialized_file: str | None) -> Any:
        path = self.model_pt_path
        if model_file:
            logger.debug("Loading eager model")
            return self._load_pickled_model(model_dir, model_file, path)
        if path is None or serialized_file is None:
            raise ModelNotLoadable("No model weights could be loaded: the manifest names no serializedFile.")
        if not os.path.isfile(path):
            raise ModelNotLoadable(f"No model weights could be loaded: {serialized_file} is not in the archive.")
        ending = os.path.splitext(serialized_file)[1]
        if ending == ".pt":
            return self._load_torchscript_model(path)
        if ending == ".pt2":
            return self._load_exported_program(path)
        if ending == ".onnx":
            return self._load_onnx_model(path)
        if ending == ".so" and self._use_torch_export_aot_compile():
            return self._load_torch_export_aot_compile(path)
        raise ModelNotLoadable(
            f"No model weights could be loaded: {serialized_file} is neither .pt (TorchScript), .pt2, .onnx nor, with "
            "pt2.export.aot_compile, .so; weights alone need a modelFile."
        )

    def _load_torchscript_model(self, model_pt_path: str) -> Any:
        """The TorchScript model of that path, on `self.device`."""
        from marserve_handlers.runtimes.torchscript import load_torchscript

        return load_torchscript(model_pt_path, self.device)

    def _load_pickled_model(self, model_dir: str, model_file: str, model_pt_path: str | None) -> Any:
        """The eager model of `model_file` with the weights of `model_pt_path` (None: its own), on `self.device`.

        With `parallel` this rank's part of it.
        """
        if getattr(self.context, "parallel", None) is not None:
            # here: few models are divided
            from marserve_handlers.sharding.parallel import load_parallel

            return load_parallel(model_dir, model_file, model_pt_path, self.device, self.context)
        checkpoint = getattr(self.context, "checkpoint", None)
        if isinstance(checkpoint, Checkpoint):
            # here: it imports torch, and few models have one
            from marserve_handlers.sharding.meta_load import load_with_checkpoint

            return load_with_checkpoint(model_dir, model_file, self.device, checkpoint, self.context)
        from marserve_handlers.runtimes.eager import load_eager

        return load_eager(model_dir, model_file, model_pt_path, self.device)

    def _load_exported_program(self, model_pt_path: str) -> Any:
        """The exported program of that path, on `self.device`; a package of native code if the archive is trusted."""
        from marserve_handlers.runtimes.exported import load_exported, load_native

        model = load_native(model_pt_path, self.device, self.context)
        return load_exported(model_pt_path, self.device) if model is None else model

    def _load_onnx_model(self, model_pt_path: str) -> Any:
        """A session of ONNX Runtime for that path, set up as `onnx` of the model's configuration says."""
        from marserve_handlers.runtimes.onnx import open_session

        threads = getattr(self.context, "threads", 0)
        options = self.model_yaml_config.get("onnx")
        inter = getattr(self.context, "inter_threads", 0)
        return open_session(model_pt_path, str(self.device), options, threads, self.context, inter_threads=inter)

    def _use_torch_export_aot_compile(self) -> bool:
        return wants_aot_compile(self.model_yaml_config)

    def _load_torch_export_aot_compile(self, model_so_path: str) -> Any:
        """The model that AOTInductor compiled into that shared library."""
        from marserve_handlers.runtimes.exported import load_aot_compiled

        return load_aot_compiled(model_so_path, self.device)

    # -------------------------------------------------------------------------------------------------- answering

    def handle(self, data: list[Any], context: Context) -> Any:
        """Answer a batch: a list as long as `data`. Describe and explain requests go their own ways."""
        began = time.perf_counter()
        self.context = context
        if os.environ.get("ENABLE_TORCH_PROFILER"):
            output, _ = self._infer_with_profiler(data)
        else:
            output = self._answer(data)
        metrics = context.metrics
        if metrics is not None:
            metrics.add_time("HandlerTime", round((time.perf_counter() - began) * 1000, 2), None, "ms")
        return output

    @timed
    def preprocess(self, data: list[Any]) -> Any:
        """What the model takes: rows (or their `data` or `body`) as one tensor [B, …] on the device.

        An ONNX model gets an array. Rows must be numbers or nested lists of one shape, or bytes that hold them as JSON,
        else this raises BadInput; overridden for anything else.
        """
        rows = [_read_value(row) for row in data] if isinstance(data, (list, tuple)) else data
        try:
            if self.takes_arrays:
                import numpy as np

                array = np.asarray(rows)
                if array.dtype.kind not in "OSUV":
                    return array
                raise TypeError(f"the rows are an array of {array.dtype}")
            from marserve_handlers.runtimes.tensors import as_tensor

            return as_tensor(rows, self.device)
        except (TypeError, ValueError, RuntimeError) as error:  # the last may be the device's
            raise _fault_of(rows, error) or error from None

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model on `data`: on the device and in inference mode, or through the ONNX session.

        Further arguments go to a torch model's call; an ONNX session takes none.
        """
        if self.takes_arrays:
            from marserve_handlers.runtimes.onnx import run as run_session

            return run_session(self.model, data)
        if self._whole_numbers is not None and not args and not kwargs:
            return self._whole_numbers.run(self.model, data, self.device)
        from marserve_handlers.runtimes.tensors import run

        return run(self.model, data, self.device, args, kwargs)

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        """One answer for each row of the model's output: nested lists of numbers."""
        rows: list[Any] = data.tolist()
        return rows

    def explain_handle(self, data_preprocess: Any, raw_data: list[Any]) -> Any:
        """Answer an explanation: `get_insights` with the first row's value and its field `target` (0 without one)."""
        row = raw_data[0]
        inputs, target = row, 0
        if isinstance(row, dict):
            inputs = value_of(row)
            target = row.get("target") or 0
        return self.get_insights(data_preprocess, inputs, target)

    def describe_handle(self) -> Any:
        """The answer to a describe request for the model; None unless overridden."""
        return None

    def get_insights(self, tensor_data: Any, raw_data: Any, target: Any = 0) -> Any:
        """Explain the model's answer. Overridden by handlers that can; this one answers 501."""
        raise PredictionException("This model's handler gives no explanations.", 501)

    def _answer(self, data: list[Any]) -> Any:
        if self._is_describe():
            return [self.describe_handle()] * max(1, len(data))
        if self._named is not None and not self._is_explain():
            return self._named.answer(data, self.context, _read_value, self._answer_rows)
        return self._answer_rows(data)

    def _answer_rows(self, data: list[Any]) -> Any:
        prepared = self.preprocess(data)
        if self._is_explain():
            return self.explain_handle(prepared, data)
        return self.postprocess(self.inference(prepared))

    def _is_explain(self) -> bool:
        """Whether the batch asks for explanations; the first request speaks for all."""
        is_explain = self.context is not None and self.context.get_request_header(0, "explain") == "True"
        if is_explain:
            self.explain = True
        return is_explain

    def _is_describe(self) -> bool:
        return self.context is not None and self.context.get_request_header(0, "describe") == "True"

    def _infer_with_profiler(self, data: list[Any]) -> tuple[Any, Any]:
        """Answer a batch under torch's profiler: the answers and the profiler. `profiler_args` are its arguments."""
        from marserve_handlers.runtimes.tensors import profile

        entry = (self.manifest or {}).get("model") or {}
        return profile(lambda: self._answer(data), str(entry.get("modelName") or "model"), self.profiler_args)


def _fault_of(rows: Any, error: Exception) -> BadInput | None:
    """What in rows is no number, as the client's mistake; None if that is not why they make no tensor."""
    for value in _leaves(rows):
        if value is None or isinstance(value, (str, bytes, dict)):
            kind = shown(value)
            if isinstance(value, dict):
                kind = _kind_of_object(value)
            return BadInput(f"expected numbers as JSON, alone or in nested lists of one shape, got {kind}")
    is_one = isinstance(rows, list) and len(rows) == 1 and isinstance(error, ValueError)
    return BadInput("expected nested lists of one shape, got lists of unequal lengths") if is_one else None


def _kind_of_object(value: dict[Any, Any]) -> str:
    if len(value) == 1 and str(next(iter(value))).lstrip()[:1] in ("[", "{"):
        return what_came(value, JSON)
    return f"an object with {names_of(map(str, value))}" if value else "an object"


def _read_value(row: Any) -> Any:
    """A row's value; of bytes, as a body is that came without a content type, what they say as JSON if they are JSON.

    A bytearray would else be a row of numbers by itself, one a byte.
    """
    value = _value_of(row)
    if not isinstance(value, (bytes, bytearray)):
        return value
    try:
        return read_json(value)
    except BadInput:
        return bytes(value)


def _leaves(rows: Any) -> Iterator[Any]:
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, list):
            yield from _leaves(row)
        else:
            yield row


def _value_of(row: Any) -> Any:
    """As `value_of`; what an envelope has taken out of a request is the value itself, as is a form of other fields."""
    value = value_of(row)
    is_itself = value is None and isinstance(row, dict) and row and "data" not in row and "body" not in row
    return row if is_itself else value


def value_of(row: Any) -> Any:
    """A row's value: its `data` unless that is empty or absent, else its `body`; a row that is no dict is the value."""
    if not isinstance(row, dict):
        return row
    data = row.get("data")
    if data is None:
        return row.get("body")
    if isinstance(data, (bytes, bytearray, str, list, dict)) and not data:
        body = row.get("body")
        return data if body is None else body
    return data


__all__ = ["BaseHandler", "Device", "value_of"]
