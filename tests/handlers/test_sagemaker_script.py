"""Inference scripts as SageMaker's PyTorch toolkit takes them, in the worker's process."""

from __future__ import annotations

import io
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

from marserve_handlers.errors import ModelNotLoadable, PredictionException  # noqa: E402
from marserve_handlers.sagemaker_script import SageMakerScript, find_script  # noqa: E402
from support.model_context import FakeItem, make_context  # noqa: E402

pytestmark = pytest.mark.torch

STEPS = """
import json
def model_fn(model_dir):
    return 10
def input_fn(body, content_type):
    assert isinstance(body, str), type(body)
    return json.loads(body)
def predict_fn(data, model, context):
    return [model * number for number in data], context.model_name
def output_fn(prediction, accept):
    return json.dumps([prediction, accept]), "application/x-mine"
"""

WHOLE = """
def model_fn(model_dir, context):
    return context.system_properties["model_dir"]
def transform_fn(model, body, content_type, accept):
    return body[::-1]
"""


@pytest.fixture(autouse=True)
def _clean_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test's script is imported anew, and no variable of SageMaker's is set."""
    for variable in ("SAGEMAKER_PROGRAM", "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("inference", "mine"):
        sys.modules.pop(name, None)


def save_double(path: Path) -> None:
    """A TorchScript model that doubles."""

    class Double(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Twice the input."""
            return 2 * x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(Double()), str(path))


def started(folder: Path) -> SageMakerScript:
    """The handler, with the model in this folder loaded."""
    handler = SageMakerScript()
    handler.initialize(make_context(folder))
    return handler


def ask(handler: SageMakerScript, *bodies: object, **headers: str) -> list[tuple[object, str | None]]:
    """The answers to a batch of these bodies, each with its content type."""
    said = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    handler.context.begin_batch([FakeItem(id=str(number), headers=said) for number, _ in enumerate(bodies)])
    answers = handler.handle([{"body": body} for body in bodies], handler.context)
    return [(answer, handler.context.get_response_content_type(index)) for index, answer in enumerate(answers)]


def test_a_scripts_functions_are_called_in_turn_with_the_context_where_they_take_it(tmp_path: Path) -> None:
    """JSON comes as text; the type that the script says is the answer's."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "inference.py").write_text(STEPS)

    answers = ask(started(tmp_path), b"[1, 2]", b"[3]", Content_Type="application/json", accept="text/x")

    assert [(json.loads(str(answer)), kind) for answer, kind in answers] == [
        ([[[10, 20], "m"], "text/x"], "application/x-mine"),
        ([[[30], "m"], "text/x"], "application/x-mine"),
    ]


def test_transform_fn_stands_for_the_three_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of other types are handed on as they are; the script may lie beside the weights under another name."""
    (tmp_path / "mine.py").write_text(WHOLE)
    monkeypatch.setenv("SAGEMAKER_PROGRAM", "mine.py")
    handler = started(tmp_path)

    assert handler.model == str(tmp_path)
    assert ask(handler, b"abc", content_type="application/octet-stream") == [(b"cba", "application/json")]


def test_transform_fn_beside_its_steps_is_refused(tmp_path: Path) -> None:
    """One of the two would be ignored."""
    (tmp_path / "inference.py").write_text(STEPS + WHOLE)

    with pytest.raises(ModelNotLoadable, match=r"inference\.py defines transform_fn, and steps of it"):
        started(tmp_path)


def test_a_program_that_is_named_and_not_there_is_refused(tmp_path: Path) -> None:
    """With the variable, its value, and where it was looked for; without a name there may be none."""
    with pytest.raises(ModelNotLoadable, match=r"SAGEMAKER_PROGRAM is 'gone', .* code/gone\.py nor gone\.py"):
        find_script(tmp_path, "gone")
    assert find_script(tmp_path, None) is None


def npy(values: object) -> bytes:
    """An array as a file of NumPy's."""
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(values))
    return buffer.getvalue()


@pytest.mark.parametrize("name", ["model.pt", "weights.pth"])
def test_a_torchscript_model_needs_no_script(tmp_path: Path, name: str) -> None:
    """JSON, CSV and NPY in; what the client accepts out."""
    save_double(tmp_path / name)
    handler = started(tmp_path)

    ((answer, kind),) = ask(handler, b"[[1, 2.5]]")
    assert (json.loads(str(answer)), kind) == ([[2.0, 5.0]], "application/json")
    assert ask(handler, b"1,2\n3,4\n", content_type="text/csv", accept="text/csv") == [
        ("2.0,4.0\n6.0,8.0\n", "text/csv")
    ]
    ((answer, kind),) = ask(
        handler, npy([[7]]), content_type="application/x-npy", accept="image/png, application/x-npy"
    )
    assert isinstance(answer, bytes)
    assert (np.load(io.BytesIO(answer)).tolist(), kind) == ([[14]], "application/x-npy")


def test_a_body_that_the_server_decoded_will_do(tmp_path: Path) -> None:
    """Of a server that several models share, one may want JSON decoded."""
    save_double(tmp_path / "model.pt")

    ((answer, _),) = ask(started(tmp_path), [[1, 2]])

    assert json.loads(str(answer)) == [[2.0, 4.0]]


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"3", {}, 400),
        (b"\xff", {}, 400),
        (b'[["a"]]', {}, 400),
        (b"1,x", {"content_type": "text/csv"}, 400),
        (b"no array", {"content_type": "application/x-npy"}, 400),
        (b"..", {"content_type": "image/png"}, 415),
        (b"[1]", {"accept": "image/png"}, 406),
    ],
)
def test_what_cannot_be_read_or_written_is_the_clients_error(
    tmp_path: Path, body: bytes, headers: dict[str, str], status: int
) -> None:
    """And not a failure of the model's."""
    save_double(tmp_path / "model.pt")

    with pytest.raises(PredictionException) as error:
        ask(started(tmp_path), body, **headers)

    assert error.value.error_code == status


@pytest.mark.parametrize("names", [[], ["a.pt", "b.pth"]])
def test_without_a_script_there_is_exactly_one_model(tmp_path: Path, names: list[str]) -> None:
    """Else the sentence says what there is, and what to write."""
    for name in names:
        (tmp_path / name).write_bytes(b"")

    with pytest.raises(ModelNotLoadable, match=rf"{', '.join(names) or 'none'}\. Write model_fn"):
        started(tmp_path)
