"""ONNX models: sessions as configured, arrays in and out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnxruntime")
np = pytest.importorskip("numpy")
onnx = pytest.importorskip("onnx")

import onnxruntime as onnxruntime_module  # noqa: E402

from marserve_handlers.errors import ModelNotLoadable  # noqa: E402
from marserve_handlers.runtimes.onnx import available_kinds, is_session, open_session, run  # noqa: E402
from support.model_context import make_context  # noqa: E402

pytestmark = pytest.mark.onnx

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


def file_of(folder: Path) -> str:
    """A file that a made-up runtime takes for a model."""
    (folder / "m.onnx").touch()
    return str(folder / "m.onnx")


def save_model(path: Path, inputs: int = 1, outputs: int = 1) -> str:
    """A model whose outputs are each the sum of its inputs, float32 [n, 2]."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    ins = [helper.make_tensor_value_info(f"x{i}", kind, ["n", 2]) for i in range(inputs)]
    outs = [helper.make_tensor_value_info(f"y{i}", kind, ["n", 2]) for i in range(outputs)]
    nodes = [helper.make_node("Sum", [f"x{i}" for i in range(inputs)], [f"y{o}"]) for o in range(outputs)]
    graph = helper.make_graph(nodes, "g", ins, outs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), str(path))
    return str(path)


def test_a_session_takes_and_gives_arrays(tmp_path: Path) -> None:
    """One input, one output; other number types and nested lists are converted."""
    session = open_session(save_model(tmp_path / "m.onnx"))

    assert is_session(session)
    assert not is_session("model")
    for data in (np.ones((1, 2), np.float32), np.ones((1, 2), np.float64), [[1, 1]], np.ones((1, 2), np.int64)):
        result = run(session, data)
        assert result.dtype == np.float32
        assert result.tolist() == [[1.0, 1.0]]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are looked up in /proc")
def test_onnx_runtime_reports_to_nobody(tmp_path: Path) -> None:
    """No database of its telemetry is opened, neither by the import nor by a session."""
    path = save_model(tmp_path / "m.onnx")
    script = (
        "import os, pathlib\n"
        "from marserve_handlers.runtimes.onnx import open_session\n"
        f"session = open_session({path!r})\n"
        "links = [link for link in pathlib.Path('/proc/self/fd').iterdir() if link.exists()]\n"
        "print([name for name in map(os.readlink, links) if name.endswith(('.db', '.db-wal', '.db-shm'))])\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environment.update(PYTHONPATH=os.pathsep.join(sys.path), HOME=str(tmp_path))
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)

    assert run.stdout == "[]\n", run.stderr
    assert not (tmp_path / ".cache").exists()


def test_tensors_are_taken_too(tmp_path: Path) -> None:
    """For handlers that prepare in torch."""
    torch = pytest.importorskip("torch")
    session = open_session(save_model(tmp_path / "m.onnx"))

    assert run(session, torch.ones(1, 2, requires_grad=True)).tolist() == [[1.0, 1.0]]


def test_several_inputs_and_outputs(tmp_path: Path) -> None:
    """By name or in order; several outputs come as a list."""
    session = open_session(save_model(tmp_path / "m.onnx", inputs=2, outputs=2))
    ones = np.ones((1, 2), np.float32)

    for data in ({"x0": ones, "x1": ones * 2}, [ones, ones * 2]):
        assert [output.tolist() for output in run(session, data)] == [[[3.0, 3.0]]] * 2
    with pytest.raises(ValueError, match="x0, x1"):
        run(session, ones)


def test_options_reach_the_session(tmp_path: Path) -> None:
    """Every key of `onnx` of the configuration."""
    options = {
        "providers": ["CPU"],
        "provider_options": {"CPU": {}},
        "intra_op_num_threads": 2,
        "inter_op_num_threads": 1,
        "graph_optimization_level": "basic",
        "execution_mode": "sequential",
        "enable_mem_pattern": False,
        "enable_cpu_mem_arena": False,
        "log_severity_level": 3,
        "config_entries": {"session.intra_op.allow_spinning": 0},
    }
    session = open_session(save_model(tmp_path / "m.onnx"), "cpu", options, threads=1)

    used = session.get_session_options()
    assert (used.intra_op_num_threads, used.inter_op_num_threads) == (2, 1)
    assert used.graph_optimization_level.name == "ORT_ENABLE_BASIC"
    assert used.enable_mem_pattern is False
    assert used.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert session.get_providers() == ["CPUExecutionProvider"]


def test_the_more_specific_key_for_threads_wins(tmp_path: Path) -> None:
    """`onnx.…_op_num_threads`, then what the worker has of `threads` or `worker_threads`."""
    path = save_model(tmp_path / "m.onnx")

    used = [
        open_session(path, options=options, threads=3, inter_threads=2).get_session_options()
        for options in ({}, {"intra_op_num_threads": 1}, {"inter_op_num_threads": 1})
    ]

    assert [(each.intra_op_num_threads, each.inter_op_num_threads) for each in used] == [(3, 2), (1, 2), (3, 1)]


def test_the_workers_threads_count_unless_configured(tmp_path: Path) -> None:
    """What the server deals out."""
    session = open_session(save_model(tmp_path / "m.onnx"), threads=3)

    assert session.get_session_options().intra_op_num_threads == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"thread": 1}, "unknown keys: thread"),
        ({"intra_op_num_threads": "2"}, "intra_op_num_threads"),
        ({"intra_op_num_threads": -1}, "intra_op_num_threads"),
        ({"inter_op_num_threads": True}, "inter_op_num_threads"),
        ({"graph_optimization_level": "most"}, "disable, basic, extended, all"),
        ({"execution_mode": "fast"}, "sequential, parallel"),
        ({"providers": ["Imaginary"]}, "ImaginaryExecutionProvider.*installed are"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    """Loading fails by the key, instead of running otherwise than asked."""
    with pytest.raises(ModelNotLoadable, match=words):
        open_session(save_model(tmp_path / "m.onnx"), "cpu", options)


@pytest.mark.parametrize("word", ["all", "ALL", "ORT_ENABLE_ALL", "ORT_DISABLE_ALL", "extended"])
def test_levels_may_be_written_as_onnx_runtime_does(tmp_path: Path, word: str) -> None:
    """With or without its prefix."""
    assert open_session(save_model(tmp_path / "m.onnx"), "cpu", {"graph_optimization_level": word})


def test_a_cuda_device_without_cuda_falls_to_the_cpu(tmp_path: Path) -> None:
    """Only providers that are installed are asked for where the configuration names none."""
    session = open_session(save_model(tmp_path / "m.onnx"), "cuda:1")

    assert session.get_providers()[-1] == "CPUExecutionProvider"
    assert available_kinds() <= {"cuda"}


class FakeRuntime:
    """An ONNX Runtime that has these providers, of which only those `begun` come to be used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *available: str, begun: tuple[str, ...] | None = None) -> None:
        runtime = onnxruntime_module
        self.available = [*available, CPU]
        self.begun = available if begun is None else begun
        self.preloads = 0
        self.can_fall_back = True
        self.asked: dict[str, Any] = {}
        self.trouble: Exception | None = None
        monkeypatch.setattr(runtime, "get_available_providers", lambda: self.available)
        monkeypatch.setattr(runtime, "preload_dlls", self._preload, raising=False)
        monkeypatch.setattr(runtime, "InferenceSession", self._session)

    def _preload(self) -> None:
        self.preloads += 1

    def _session(self, path: str, sess_options: Any, providers: list[str], provider_options: list[Any]) -> Any:
        if self.trouble is not None:
            raise self.trouble
        self.asked = dict(zip(providers, provider_options, strict=True))
        return self

    def get_providers(self) -> list[str]:
        """Of a session."""
        return [*(name for name in self.asked if name in self.begun), CPU]

    def disable_fallback(self) -> None:
        """Of a session."""
        self.can_fall_back = False


def context_of(gpu_id: int | None, *, must_use_device: bool = True, **config: Any) -> Any:
    """A worker's."""
    context = make_context(gpu_id=gpu_id, config=config)
    context.must_use_device = must_use_device
    return context


def test_a_workers_device_is_used_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's libraries are loaded before, and a failing call does not go on on the CPU."""
    fake = FakeRuntime(monkeypatch, CUDA)
    context = context_of(1)

    open_session(file_of(tmp_path), "cuda:1", None, 0, context)

    assert fake.asked == {CUDA: {"device_id": "1"}, CPU: {}}
    assert fake.preloads == 1
    assert not fake.can_fall_back
    assert context.computes_on == f"{CUDA}, {CPU}"
    assert context.load_warnings == []


@pytest.mark.parametrize(
    ("available", "begun", "options", "words"),
    [
        (
            (),
            (),
            {},
            r"given device 1, and ONNX Runtime .* installed are CPUExecutionProvider.*onnxruntime-gpu",
        ),
        ((CUDA,), (), {}, r"given device 1.* it uses CPUExecutionProvider; why .* model log \(the driver is "),
        ((CUDA,), (), {"providers": ["CUDA", "CPU"]}, r"names CUDAExecutionProvider; it uses CPU"),
        ((CUDA,), (CUDA,), {"providers": ["Tensorrt", "CUDA"]}, r"names TensorrtExecutionP.*; installed are CUDA"),
    ],
)
def test_a_wanted_provider_that_is_not_in_use_fails_the_load_or_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: Any, begun: Any, options: Any, words: str
) -> None:
    """With `fallback` it is a warning, told once; and where devices need not be used."""
    fake = FakeRuntime(monkeypatch, *available, begun=begun)
    with pytest.raises(ModelNotLoadable, match=words + r".*fallback: true"):
        open_session(file_of(tmp_path), "cuda:1", options, 0, context_of(1))

    for context, more in ((context_of(1), {"fallback": True}), (context_of(1, must_use_device=False), {})):
        open_session(file_of(tmp_path), "cuda:1", {**options, **more}, 0, context)
        (warning,) = context.load_warnings
        assert re.search(words, warning)
        assert context.computes_on.endswith(CPU)
        assert fake.can_fall_back


@pytest.mark.parametrize(
    ("gpu_id", "config", "options"),
    [(None, {}, {}), (1, {"deviceType": "cpu"}, {}), (1, {}, {"providers": ["CPU"]})],
)
def test_a_worker_for_the_cpu_wants_no_provider(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_id: int | None, config: Any, options: Any
) -> None:
    """Without a device, or where the configuration says so."""
    fake = FakeRuntime(monkeypatch)
    context = context_of(gpu_id, **config)

    open_session(file_of(tmp_path), "cpu", options, 0, context)

    assert fake.asked == {CPU: {}}
    assert fake.preloads == 0
    assert (context.computes_on, context.load_warnings) == (CPU, [])


def test_amds_provider_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for CUDA's libraries by nothing."""
    fake = FakeRuntime(monkeypatch, "MIGraphXExecutionProvider")

    assert available_kinds() == {"cuda"}
    open_session(file_of(tmp_path), "cuda:0", None, 0, context_of(0))

    assert fake.asked == {"MIGraphXExecutionProvider": {"device_id": "0"}, CPU: {}}
    assert fake.preloads == 0


def test_a_session_that_memory_runs_out_for_is_told_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is a model all the same; with the runtime's own words where libraries cannot be loaded."""
    fake = FakeRuntime(monkeypatch, CUDA)
    fake.trouble = MemoryError("CUDA failure 2: out of memory")
    monkeypatch.setattr(onnxruntime_module, "preload_dlls", lambda: 1 / 0)

    with pytest.raises(MemoryError):
        open_session(file_of(tmp_path), "cuda:1", None, 0, context_of(1))


def test_fallback_is_a_boolean(tmp_path: Path) -> None:
    """And is named where it is none."""
    with pytest.raises(ModelNotLoadable, match=r"onnx\.fallback .* 'yes'; it must be a boolean"):
        open_session(file_of(tmp_path), "cpu", {"fallback": "yes"})


@pytest.mark.parametrize("content", [b"", b"nonsense"])
def test_what_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    """By the file's name."""
    (tmp_path / "m.onnx").write_bytes(content)

    with pytest.raises(ModelNotLoadable, match=r"m\.onnx"):
        open_session(str(tmp_path / "m.onnx"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """The manifest names a file that is not there."""
    with pytest.raises(ModelNotLoadable, match=r"gone\.onnx is missing"):
        open_session(str(tmp_path / "gone.onnx"))


def test_data_outside_the_archive_is_not_read(tmp_path: Path) -> None:
    """External data by a parent's path is refused."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    (tmp_path / "secret").write_bytes(bytes(8))
    folder = tmp_path / "archive"
    folder.mkdir()
    weight = onnx.TensorProto(name="w", data_type=kind, dims=[2], data_location=onnx.TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="../secret")
    out = helper.make_tensor_value_info("y", kind, [2])
    graph = helper.make_graph([helper.make_node("Identity", ["w"], ["y"])], "g", [], [out], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    (folder / "m.onnx").write_bytes(model.SerializeToString())

    with pytest.raises(ModelNotLoadable, match=r"m\.onnx"):
        open_session(str(folder / "m.onnx"))
