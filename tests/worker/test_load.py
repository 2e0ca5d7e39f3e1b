"""Tests for the way from an archive's folder to a handler: which module, which function or class (contract §8.3)."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pytest

from marserve.documents import pack
from marserve.messages import Checkpoint, Load
from marserve.worker.load import LoadedModel, enter_model_folder, load_model
from marserve_handlers.errors import ModelNotLoadable
from support.lit_api import write_litserve
from support.model_context import FakeItem
from support.model_folders import write_model


@pytest.fixture(autouse=True)
def _as_before(tmp_path: Path) -> Iterator[None]:
    """Loading makes the process the model's; afterwards it is the tests' again."""
    folder, paths, environment = Path.cwd(), sys.path[:], dict(os.environ)
    yield
    os.chdir(folder)
    sys.path[:] = paths
    os.environ.clear()
    os.environ.update(environment)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def load(folder: Path, source: str, handler: str = "handler.py", **fields: Any) -> LoadedModel:
    """Load a model whose `handler.py` holds `source`."""
    order = write_model(folder, source, handler=handler, **fields)
    enter_model_folder(order)
    return load_model(order)


# ------------------------------------------------------------------------------------------- which handler


@pytest.mark.parametrize(
    "word", ["handler.py", "handler", "some/folder/handler.py", "some\\folder\\handler.py", "./handler"]
)
def test_the_module_is_the_words_last_part(tmp_path: Path, word: str) -> None:
    """Folders and `.py` are taken off."""
    model = load(tmp_path, "def handle(data, context): return ['ours'] if data else None", word)

    assert model.handle([{}], model.context) == ["ours"]


def test_a_class_may_be_named_among_others(tmp_path: Path) -> None:
    """Behind the file's colon: TorchServe takes functions there alone."""
    source = """
    class Net: ...

    class Shout:
        def initialize(self, context): self.word = "ours"
        def handle(self, data, context): return [self.word for _ in data]
    """

    model = load(tmp_path, source, "handler.py:Shout")

    assert model.handle([{}], model.context) == ["ours"]


def test_a_file_of_litserve_is_served_as_it_is(tmp_path: Path) -> None:
    """With what it gives its API in literals; bodies are read as LitServe does."""
    write_litserve(tmp_path)
    sys.path.insert(0, str(tmp_path))
    source = """
    import litserve as ls

    class Twice(ls.LitAPI):
        def predict(self, batch): return [2 * each["x"] for each in batch]

    if __name__ == "__main__":
        ls.LitServer(Twice(max_batch_size=4)).run()
    """

    model = load(tmp_path, source, "handler.py:Twice")
    model.context.begin_batch([FakeItem(), FakeItem()])

    rows = [{"body": bytearray(b'{"x": 2}')}, {"body": bytearray(b'{"x": 3}')}]
    assert model.handle(rows, model.context) == [b"4", b"6"]
    assert not model.load.decode_input


def test_a_module_function_is_called_once_at_load(tmp_path: Path) -> None:
    """With no data; what it returns is ignored."""
    source = """
    calls = []
    def handle(data, context):
        calls.append((data, context.model_name))
        return calls
    """

    model = load(tmp_path, source)

    assert model.handle([{}], model.context) == [(None, "m"), ([{}], "m")]


def test_a_named_function_is_the_entry_point(tmp_path: Path) -> None:
    """What stands behind the colon."""
    source = """
    def handle(data, context): raise AssertionError
    def other(data, context): return ["other"]
    """

    model = load(tmp_path, source, "handler.py:other")

    assert model.handle([{}], model.context) == ["other"]


def test_a_function_wins_over_a_class(tmp_path: Path) -> None:
    """A module-level `handle` always does."""
    source = """
    def handle(data, context): return ["function"]
    class Handler:
        def handle(self, data, context): return ["class"]
    """

    model = load(tmp_path, source)

    assert model.handle([{}], model.context) == ["function"]


def test_a_class_is_made_and_initialised_once(tmp_path: Path) -> None:
    """Classes that it imports do not count."""
    source = """
    from collections import OrderedDict
    from pathlib import Path
    class Handler:
        def initialize(self, context):
            self.folder = context.system_properties["model_dir"]
        def handle(self, data, context):
            return [self.folder]
    """

    model = load(tmp_path, source)

    assert model.handle([{}], model.context) == [str(tmp_path)]


def test_a_class_needs_no_initialize(tmp_path: Path) -> None:
    """Only `handle`."""
    model = load(tmp_path, "class Handler:\n    def handle(self, data, context): return data\n")

    assert model.handle([{"a": 1}], model.context) == [{"a": 1}]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("class A: pass\nclass B: pass\n", "Expected only one class .* A, B"),
        ("x = 1\n", "Expected only one class .* none"),
        ("class A: pass\n", "class A has no method handle"),
        ("handle = 7\n", "Expected only one class .* none"),
    ],
    ids=["two classes", "nothing", "no method", "no function"],
)
def test_a_module_that_names_no_handler_clearly_is_refused(tmp_path: Path, source: str, said: str) -> None:
    """TorchServe's words, and what was found."""
    with pytest.raises(ValueError, match=said):
        load(tmp_path, source)


def test_a_built_in_handler_needs_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is enough."""

    class BuiltIn:
        def initialize(self, context: Any) -> None:
            self.name = context.model_name

        def handle(self, data: Any, context: Any) -> list[str]:
            return [self.name]

    monkeypatch.setattr("marserve.worker.load.find_built_in", {"image_classifier": BuiltIn}.get)

    model = load(tmp_path, "", "image_classifier")

    assert model.handle([{}], model.context) == ["m"]


def test_an_installed_library_is_not_the_handler_of_its_name(tmp_path: Path) -> None:
    """Nor is a folder of the archive that is called so; the operator's trust reaches the handler."""
    library = tmp_path / "packages" / "lightgbm"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("def handle(data, context): return ['the library']\n")
    (tmp_path / "lightgbm").mkdir()

    with pytest.raises(ModelNotLoadable, match=r"lightgbm loads one file that ends in \.txt, and the archive has none"):
        load(tmp_path, "", "lightgbm", packages=str(library.parent))
    assert load(tmp_path, "def handle(data, context): return None", is_trusted=True).context.is_trusted


@pytest.mark.parametrize("name", ["image_classifier", "xgboost"])
def test_the_archives_own_module_wins_over_a_built_in_one(tmp_path: Path, name: str) -> None:
    """As in TorchServe."""
    (tmp_path / f"{name}.py").write_text("def handle(data, context): return ['mine'] if data else None\n")

    model = load(tmp_path, "", name)

    assert model.handle([{}], model.context) == ["mine"]


def test_a_handler_that_is_nowhere_is_named_with_what_there_is(tmp_path: Path) -> None:
    """So that a slip of the pen is seen."""
    with pytest.raises(ModuleNotFoundError, match=r"no module 'hnadler'.*image_classifier"):
        load(tmp_path, "", "hnadler.py")


@pytest.mark.parametrize("name", ["queue", "sys", "json"])
def test_a_handler_that_pythons_own_module_hides_is_told(tmp_path: Path, name: str) -> None:
    """It was imported before: what it lacks as a handler would only puzzle."""
    order = write_model(tmp_path, "def handle(data, context): ...", handler=f"{name}.py")
    (tmp_path / "handler.py").rename(tmp_path / f"{name}.py")
    enter_model_folder(order)

    with pytest.raises(ImportError, match=rf"the handler {name}\.py has the name .* rename the file"):
        load_model(order)


def test_a_module_that_the_handler_misses_is_the_one_that_is_named(tmp_path: Path) -> None:
    """And not the handler's."""
    with pytest.raises(ModuleNotFoundError, match="'no_such_package'"):
        load(tmp_path, "import no_such_package")


# ------------------------------------------------------------------------------------------- how long items are


@pytest.mark.parametrize(
    "source",
    [
        "def handle(data, context): return data\ndef length_of(row): return 7",
        "class H:\n    def handle(self, data, context): return data\n    def length_of(self, row): return 7",
        "class H:\n    def handle(self, data, context): return data\ndef length_of(row): return 7",
    ],
)
def test_length_of_is_found_in_the_class_or_the_module(tmp_path: Path, source: str) -> None:
    """Of an author who can say how long an item is."""
    model = load(tmp_path, source)

    assert model.length_of is not None
    assert model.length_of({"body": b"x"}) == 7


def test_most_handlers_cannot_say_how_long_an_item_is(tmp_path: Path) -> None:
    """Nor is a value of that name a function."""
    model = load(tmp_path, "length_of = 5\ndef handle(data, context): return data")

    assert model.length_of is None


# ------------------------------------------------------------------------------------------- what it finds around it


def test_the_process_stands_in_the_models_folder(tmp_path: Path) -> None:
    """Handlers open their files by relative paths."""
    (tmp_path / "labels.txt").write_text("cat")

    model = load(
        tmp_path, "with open('labels.txt') as file: label = file.read()\ndef handle(data, context): return [label]\n"
    )

    assert model.handle([{}], model.context) == ["cat"]
    assert Path.cwd() == tmp_path


def test_the_archives_modules_are_found_first_then_those_that_were_named(tmp_path: Path) -> None:
    """Then what stands in for `ts`, then everything that is installed."""
    extra = tmp_path / "extra"
    extra.mkdir()
    (extra / "shared_code.py").write_text("where = 'extra'\n")

    load(
        tmp_path / "model",
        "import shared_code\ndef handle(data, context): return [shared_code.where]\n",
        import_paths=[str(extra)],
    )

    assert sys.path[:2] == [str(extra), str(tmp_path / "model")]
    assert sys.path[2].endswith("ts_compat")
    assert "" not in sys.path


def test_the_order_on_the_path_is_torchserves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Handler's folder, inherited, archive, `ts`, the model's packages, what is installed; programs get it as well."""
    for name in ("archive/sub", "inherited", "packages"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "inherited"), "relative"]))
    monkeypatch.chdir(tmp_path)
    order = write_model(
        tmp_path / "archive",
        "",
        import_paths=[str(tmp_path / "archive" / "sub")],
        packages=str(tmp_path / "packages"),
    )

    enter_model_folder(order)

    names = [Path(path).name for path in sys.path[:6]]
    assert names == ["sub", "inherited", "relative", "archive", "ts_compat", "packages"]
    assert os.environ["PYTHONPATH"].split(os.pathsep) == sys.path[:6]
    assert sys.path[2] == str(tmp_path / "relative")


def test_a_models_own_package_wins_over_an_installed_one_and_the_archive_over_both(tmp_path: Path) -> None:
    """Behind the archive, before site-packages."""
    for folder, names in {"installed": "abc", "packages": "ab", "model": "a"}.items():
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / f"in_{name}.py").write_text(f"where = {folder!r}\n")
    sys.path.append(str(tmp_path / "installed"))
    source = """
    import in_a, in_b, in_c
    def handle(data, context): return [in_a.where, in_b.where, in_c.where]
    """

    model = load(tmp_path / "model", source, packages=str(tmp_path / "packages"))

    assert model.handle([{}], model.context) == ["model", "packages", "installed"]


def test_entering_a_folder_twice_adds_nothing(tmp_path: Path) -> None:
    """A worker forked before loading has a path already."""
    order = write_model(tmp_path, "")
    enter_model_folder(order)
    once = sys.path[:]

    enter_model_folder(order)

    assert sys.path == once


def test_the_models_environment_is_set(tmp_path: Path) -> None:
    """Before its code is imported."""
    source = "import os\nvalue = os.environ['OF_THE_MODEL']\ndef handle(data, context): return [value]\n"

    model = load(tmp_path, source, environment={"OF_THE_MODEL": "yes"})

    assert model.handle([{}], model.context) == ["yes"]


def test_the_context_knows_what_the_order_said(tmp_path: Path) -> None:
    """All of the contract's §8.4 that is known before a request."""
    order = msgspec.structs.replace(
        write_model(tmp_path, "def handle(data, context): return context"),
        manifest={"model": {"modelName": "m"}},
        model_config=pack({"minWorkers": 2, "day": date(2024, 5, 6)}),
        batch_size=8,
        gpu_id=1,
        limit_max_image_pixels=False,
        threads=3,
    )
    enter_model_folder(order)

    context = load_model(order).context

    assert context.model_name == "m"
    assert context.manifest == {"model": {"modelName": "m"}}
    assert context.model_yaml_config == {"minWorkers": 2, "day": date(2024, 5, 6)}
    assert context.threads == 3
    properties = context.system_properties
    assert properties["model_dir"] == str(tmp_path)
    assert properties["gpu_id"] == 1
    assert properties["batch_size"] == 8
    assert properties["limit_max_image_pixels"] is False
    assert properties["server_name"] == "MMS"
    assert context.metrics is not None


def test_without_a_configuration_the_context_has_an_empty_one(tmp_path: Path) -> None:
    """Handlers call `.get` on it."""
    order: Load = write_model(tmp_path, "def handle(data, context): return context")
    enter_model_folder(order)

    assert load_model(order).context.model_yaml_config == {}


def test_a_handler_finds_the_metrics_of_the_metrics_file(tmp_path: Path) -> None:
    """By name and type, and nothing but those; without a file there are the two ready-made ones."""
    file = tmp_path / "metrics.yaml"
    file.write_text("model_metrics: {counter: [{name: Jobs, unit: Count, dimensions: [ModelName]}]}")
    source = """
    def handle(data, context):
        return [list(known) for known in context.metrics.cache.values()] if data else None
    """

    with_file = load(tmp_path / "a", source, metrics_file=str(file))
    without = load(tmp_path / "b", source)

    assert with_file.handle([{}], with_file.context) == [["Jobs"]]
    assert with_file.context.metrics.get_metric("Jobs").dimension_names == ["ModelName"]
    assert with_file.context.metrics.config_file_path == str(file)
    assert without.handle([{}], without.context) == [["HandlerTime", "PredictionTime"]]


# ------------------------------------------------------------------------------------------------- envelopes


@pytest.mark.parametrize(
    "source",
    [
        "def handle(data, context): return [value + 1 for value in data] if data else None",
        "class H:\n    def handle(self, data, context): return [value + 1 for value in data]",
    ],
)
def test_an_envelope_stands_around_the_handler(tmp_path: Path, source: str) -> None:
    """Around a function and around a class; loading goes past it."""
    model = load(tmp_path, source, envelope="kserve")

    assert model.handle([{"body": {"instances": [1, 2]}}], model.context) == [{"predictions": [2, 3]}]


def test_an_envelope_around_a_coroutine_is_one(tmp_path: Path) -> None:
    """So that a worker that waits for such handlers waits for it."""
    model = load(tmp_path, "class H:\n    async def handle(self, data, context): return data", envelope="body")

    assert inspect.iscoroutinefunction(model.handle)


def test_an_unknown_envelope_fails_the_load(tmp_path: Path) -> None:
    """With the words there are."""
    with pytest.raises(ModuleNotFoundError, match="is not one of body, json, kserve, kservev2"):
        load(tmp_path, "def handle(data, context): return data", envelope="kfserving")


def test_an_envelope_of_the_archives_own_may_be_named(tmp_path: Path) -> None:
    """A module beside the handler."""
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "wrapped.py").write_text(
        "class Wrapped:\n    def __init__(self, handle): self._handle = handle\n"
        "    def handle(self, data, context): return ['wrapped', *self._handle(data, context)]\n"
    )

    model = load(tmp_path, "def handle(data, context): return [1]", envelope="wrapped")

    assert model.handle([{}], model.context) == ["wrapped", 1]


def test_the_built_in_base_classes_are_found_by_their_dotted_names(tmp_path: Path) -> None:
    """TorchServe looks below its folder of handlers."""
    pytest.importorskip("torch")
    with pytest.raises(ModelNotLoadable, match="needs a group of ranks"):
        load(tmp_path, "", "distributed.base_pippy_handler")


# ------------------------------------------------------------------------------------------- declared handlers


DECLARED = """
from marserve_handlers import Tensor, model

@model(inputs={"x": Tensor("float32", ["batch"])}, outputs={"y": Tensor("float32", ["batch"])})
class Twice:
    def load(self, context):
        self.by = 2

    def predict(self, x):
        return {"y": self.by * x}
"""


@pytest.mark.parametrize("word", ["handler.py", "handler.py:Twice", "handler:Twice"])
def test_a_declared_class_is_found_and_loaded(tmp_path: Path, word: str) -> None:
    """Alone in its module or by name; its bodies are not decoded before it reads them."""
    model = load(tmp_path, DECLARED, word)
    model.context.begin_batch([])

    (answer,) = model.handle([{"body": bytearray(b"[3]")}], model.context)

    assert answer.body == b'{"y":[6.0]}'
    assert not model.load.decode_input
    assert msgspec.json.decode(model.declaration)["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["batch"]}]


def test_several_declared_models_need_a_name(tmp_path: Path) -> None:
    """The sentence names them, and how to choose."""
    source = DECLARED + "\n@model\ndef other(text: str) -> str: return text\n"

    with pytest.raises(ValueError, match=r"handler.py defines several models, Twice and other: name one, as"):
        load(tmp_path, source)


def test_a_class_that_is_not_marked_follows_torchserves_rules(tmp_path: Path) -> None:
    """Also in a module that has a marked base class from elsewhere."""
    source = """
    from marserve_handlers import model

    class Handler:
        def handle(self, data, context): return ["handled"]
    """

    loaded = load(tmp_path, source)

    assert loaded.handle([{}], loaded.context) == ["handled"]
    assert loaded.declaration == b""


IN_ARCHIVE = b'{"version":1,"kind":"tensors","inputs":[{"name":"x","dtype":"int8","shape":["batch"]}],"outputs":[]}'


def test_another_declaration_than_the_archives_is_not_loaded(tmp_path: Path) -> None:
    """Both are named."""
    with pytest.raises(ValueError, match=r'at inputs\[0\].dtype: the archive "int8", the handler "float32"'):
        load(tmp_path, DECLARED, declaration=IN_ARCHIVE)


def test_a_handler_that_declares_nothing_is_not_loaded_for_a_declaration(tmp_path: Path) -> None:
    """As when its file was replaced in the archive."""
    with pytest.raises(ValueError, match="declares nothing"):
        load(tmp_path, "def handle(data, context): return data", declaration=IN_ARCHIVE)


def test_envelopes_are_for_torchserves_shape(tmp_path: Path) -> None:
    """A declared handler reads its bodies itself; describe warns."""
    model = load(tmp_path, DECLARED, envelope="json")
    model.context.begin_batch([])

    assert model.handle([{"body": bytearray(b"3")}], model.context)[0].body == b'{"y":6.0}'
    assert model.context.load_warnings == ["the envelope json is not used: the handler declares its input"]


_LEAVES = "def handle(data, context):\n    TAKEN\n    return [context.checkpoint.folder for row in data or []]"
_CHECKPOINT = Checkpoint("weights", may_map=True, size=8)


def test_a_handler_that_leaves_its_checkpoint_where_it_is_is_refused(tmp_path: Path) -> None:
    """Its model would serve with other weights than those of the configuration."""
    with pytest.raises(ModelNotLoadable, match="checkpoint is weights, and this handler has loaded no weights of it"):
        load(tmp_path, _LEAVES.replace("TAKEN", "pass"), checkpoint=_CHECKPOINT)


def test_a_handler_may_load_its_checkpoint_by_itself(tmp_path: Path) -> None:
    """It says so, and knows the folder."""
    model = load(tmp_path, _LEAVES.replace("TAKEN", "context.has_taken_checkpoint = True"), checkpoint=_CHECKPOINT)

    assert model.handle([{}], model.context) == [str(tmp_path / "weights")]
