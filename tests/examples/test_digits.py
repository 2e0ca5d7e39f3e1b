"""The digits example: four archives of one set of weights that answer alike, and the one in the model store."""

from __future__ import annotations

import importlib
import re
import sys
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.model_context import FakeItem, make_context

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples" / "digits"
STORE_ARCHIVE = ROOT / "model_store" / "digits.mar"
KINDS = ("torchscript", "eager", "exported", "onnx")
QUICK_KINDS = KINDS[:2]  # exporting takes ten seconds


@pytest.fixture(scope="module")
def example() -> Iterator[None]:
    """The example's modules, importable, and forgotten afterwards."""
    sys.path.insert(0, str(EXAMPLE))
    before = set(sys.modules)
    yield
    sys.path.remove(str(EXAMPLE))
    for name in set(sys.modules) - before:
        if str(EXAMPLE) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture(
    scope="module",
    params=[QUICK_KINDS, pytest.param(KINDS, marks=[pytest.mark.onnx, pytest.mark.long])],
    ids=["quick", "all"],
)
def folders(example: None, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Path]:
    """The archives of the weights that the model store's archive holds, built now and unpacked, by kind."""
    torch = pytest.importorskip("torch")
    kinds: tuple[str, ...] = request.param
    for package in ("onnxruntime", "onnx", "onnxscript") if "onnx" in kinds else ():
        pytest.importorskip(package)
    work = tmp_path_factory.mktemp("digits")
    unpack(STORE_ARCHIVE, work / "store")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights = torch.jit.load(str(work / "store" / "digits.pt")).state_dict()
    paths = importlib.import_module("archives").build_archives(weights, work / "archives", kinds)
    return {kind: unpack(path, work / kind) for kind, path in zip(kinds, paths, strict=True)}


def unpack(archive: Path, folder: Path) -> Path:
    """The folder that the archive's files lie in."""
    with zipfile.ZipFile(archive) as file:
        file.extractall(folder)
    return folder


def load_classifier(folder: Path) -> Any:
    """The built-in classifier as a worker would load it from that folder, told to answer all ten classes."""
    from marserve_handlers.image_classifier import ImageClassifier

    manifest = yaml.safe_load((folder / "MAR-INF" / "MANIFEST.json").read_text("utf-8"))
    config = yaml.safe_load((folder / manifest["model"]["configFile"]).read_text("utf-8"))
    context = make_context(folder, config=config)
    context.manifest = manifest
    handler = ImageClassifier()
    handler.initialize(context)
    handler.set_max_result_classes(10)
    return handler


def classify(handler: Any, bodies: list[bytes], batch_size: int = 16) -> list[dict[str, float]]:
    """An answer for each body, in batches."""
    answers: list[dict[str, float]] = []
    for start in range(0, len(bodies), batch_size):
        rows = [{"body": bytearray(body)} for body in bodies[start : start + batch_size]]
        handler.context.begin_batch([FakeItem() for _ in rows])
        answers += handler.handle(rows, handler.context)
    return answers


@pytest.mark.torch
def test_the_archives_answer_alike_on_all_held_out_digits(folders: dict[str, Path], example: None) -> None:
    """The same top-1 everywhere, probabilities within 1e-4, and at least 97 % of the digits right."""
    pytest.importorskip("sklearn")
    from support.pictures import encode_picture

    image = pytest.importorskip("PIL.Image")
    data = importlib.import_module("digits_data")
    pictures, digits = data.load_pictures()
    held_out = data.is_held_out(len(pictures))
    bodies = [encode_picture(image.fromarray(picture)) for picture in pictures[held_out]]

    answers = {kind: classify(load_classifier(folder), bodies) for kind, folder in folders.items()}

    first = answers["torchscript"]
    right = [int(next(iter(answer))) == digit for answer, digit in zip(first, digits[held_out], strict=True)]
    assert sum(right) >= 0.97 * len(bodies)
    for kind in list(folders)[1:]:
        for one, other in zip(first, answers[kind], strict=True):
            assert next(iter(one)) == next(iter(other)), kind
            assert one == pytest.approx(other, abs=1e-4), kind


@pytest.mark.torch
def test_no_archive_names_a_place_of_this_machine(folders: dict[str, Path]) -> None:
    """Neither in a file nor in a record of a file that is a zip itself."""
    places = [str(ROOT).encode(), str(Path.home()).encode(), str(sys.prefix).encode()]
    for folder in folders.values():
        for name, content in records_below(folder):
            assert not any(place in content for place in places), name


@pytest.mark.torch
def test_the_stores_archive_reads_the_examples_pictures(tmp_path: Path) -> None:
    """One held-out picture of each digit, ten of ten, three labels each as its configuration says."""
    pytest.importorskip("torch")
    handler = load_classifier(unpack(STORE_ARCHIVE, tmp_path / "store"))
    handler.set_max_result_classes(handler.model_yaml_config["handler"]["topk"])

    bodies = [(EXAMPLE / "pictures" / f"{digit}.png").read_bytes() for digit in range(10)]
    answers = classify(handler, bodies)

    assert [next(iter(answer)) for answer in answers] == [str(digit) for digit in range(10)]
    assert {len(answer) for answer in answers} == {3}


def test_the_stores_archive_is_small_and_anonymous(tmp_path: Path) -> None:
    """Under a megabyte, with no path of the machine that it was built on."""
    paths = re.compile(rb"/(?:home|root|work|tmp|usr|opt|Users|mnt|var)/|site-packages|\.debug_pkl")

    assert STORE_ARCHIVE.stat().st_size < 1_000_000
    for name, content in records_below(unpack(STORE_ARCHIVE, tmp_path / "store")):
        assert not paths.search(content), name
        assert not paths.search(name.encode()), name


def test_the_stores_archive_has_the_examples_configuration(tmp_path: Path) -> None:
    """What is committed was built from what is committed."""
    folder = unpack(STORE_ARCHIVE, tmp_path / "store")

    for name in ("model-config.yaml", "index_to_name.json"):
        assert (folder / name).read_bytes() == (EXAMPLE / name).read_bytes()
    manifest = yaml.safe_load((folder / "MAR-INF" / "MANIFEST.json").read_text("utf-8"))
    assert manifest["model"]["handler"] == "image_classifier"
    assert manifest["model"]["serializedFile"] == "digits.pt"


@pytest.mark.torch
@pytest.mark.long
def test_training_gives_a_good_network_and_the_same_twice(example: None) -> None:
    """At least 97 % of the held-out digits, and the seed decides the weights."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    train = importlib.import_module("train")
    threads = torch.get_num_threads()
    try:
        first, second = train.train(), train.train()
    finally:
        torch.set_num_threads(threads)

    assert train.measure_accuracy(first) >= 0.97
    for one, other in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def records_below(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Every file below the folder; of those that are zips, every record as well."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            yield name, path.read_bytes()
            if zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as file:
                    for record in file.namelist():
                        yield f"{name}/{record}", file.read(record)
