"""Exported programs: loaded, run with any batch, and nothing of them executed on the way."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from marserve_handlers.errors import ModelNotLoadable  # noqa: E402
from marserve_handlers.runtimes.exported import load_aot_compiled, load_exported  # noqa: E402

pytestmark = pytest.mark.torch


class Net(torch.nn.Module):  # type: ignore[misc, name-defined] # torch is imported by a test's helper
    """Uses the batch's size in arithmetic, so that the program holds shape expressions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        torch.nn.init.ones_(self.layer.weight)
        torch.nn.init.zeros_(self.layer.bias)

    def forward(self, x: Any) -> Any:
        """Sums, plus two thirds of the rows."""
        return self.layer(x) + x.shape[0] * 2 // 3


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The network, exported with a free batch."""
    path = tmp_path_factory.mktemp("exported") / "m.pt2"
    batch = torch.export.Dim("batch", min=1, max=64)
    torch.export.save(torch.export.export(Net().eval(), (torch.ones(2, 4),), dynamic_shapes={"x": {0: batch}}), path)
    return path


def rewrite(source: Path, target: Path, ending: str, change: Any) -> Path:
    """A copy with the member of that ending changed."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            content = old.read(info)
            new.writestr(info, change(content) if info.filename.endswith(ending) else content)
    return target


def test_a_program_runs_with_any_batch(program: Path) -> None:
    """One row, or more than it was exported with."""
    model = load_exported(str(program), torch.device("cpu"))

    with torch.inference_mode():
        assert model(torch.ones(1, 4)).tolist() == [[4.0, 4.0]]
        assert model(torch.ones(6, 4)).tolist() == [[8.0, 8.0]] * 6


def test_loading_leaves_the_environment_alone(program: Path) -> None:
    """What makes torch's loader strict is taken back."""
    before = dict(os.environ)
    load_exported(str(program), "cpu")

    assert dict(os.environ) == before


def test_an_operator_that_is_none_never_runs(program: Path, tmp_path: Path) -> None:
    """`torch.os.system` would be found by torch."""

    def change(content: bytes) -> bytes:
        return content.replace(b"torch.ops.aten.linear.default", b"torch.os.system")

    path = rewrite(program, tmp_path / "evil.pt2", "models/model.json", change)
    with pytest.raises(ModelNotLoadable, match=r"torch\.os\.system"):
        load_exported(str(path), "cpu")


def test_a_shape_that_is_code_never_runs(program: Path, tmp_path: Path) -> None:
    """Shapes are evaluated as Python by torch."""
    hatched = tmp_path / "hatched"

    def change(content: bytes) -> bytes:
        document = json.loads(content)
        expression = f"__import__('pathlib').Path({str(hatched)!r}).touch()"
        values = document["graph_module"]["graph"]["sym_int_values"]
        next(iter(values.values()))["as_expr"]["expr_str"] = expression
        return json.dumps(document).encode()

    path = rewrite(program, tmp_path / "evil.pt2", "models/model.json", change)
    with pytest.raises(ModelNotLoadable, match="no arithmetic"):
        load_exported(str(path), "cpu")
    assert not hatched.exists()


class Canary:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_sample_inputs_with_code_never_run(program: Path, tmp_path: Path) -> None:
    """torch's loader would unpickle them without restriction after a first refusal."""
    hatched = tmp_path / "hatched"
    buffer = io.BytesIO()
    torch.save((Canary(hatched),), buffer)

    path = rewrite(program, tmp_path / "evil.pt2", "sample_inputs/model.pt", lambda _: buffer.getvalue())
    with pytest.raises(ModelNotLoadable, match="no exported program"):
        load_exported(str(path), "cpu")
    assert not hatched.exists()


@pytest.mark.parametrize("content", [b"", b"nonsense"])
def test_what_is_no_program_is_refused(tmp_path: Path, content: bytes) -> None:
    """By the file's name or what is wrong with it."""
    (tmp_path / "m.pt2").write_bytes(content)

    with pytest.raises(ModelNotLoadable, match="no zip"):
        load_exported(str(tmp_path / "m.pt2"), "cpu")


def test_another_zip_is_refused(tmp_path: Path) -> None:
    """A zip that holds no program."""
    with zipfile.ZipFile(tmp_path / "m.pt2", "w") as archive:
        archive.writestr("a.txt", "b")

    with pytest.raises(ModelNotLoadable, match=r"m\.pt2"):
        load_exported(str(tmp_path / "m.pt2"), "cpu")


@pytest.mark.parametrize("load", [load_exported, load_aot_compiled])
def test_a_missing_file_is_named(tmp_path: Path, load: Any) -> None:
    """The manifest names a file that is not there."""
    with pytest.raises(ModelNotLoadable, match="gone is missing"):
        load(str(tmp_path / "gone"), "cpu")


def test_a_library_of_another_make_is_refused(tmp_path: Path) -> None:
    """With what it must be."""
    (tmp_path / "m.so").write_bytes(b"\x7fELF nonsense")

    with pytest.raises(ModelNotLoadable, match="AOTInductor"):
        load_aot_compiled(str(tmp_path / "m.so"), "cpu")
