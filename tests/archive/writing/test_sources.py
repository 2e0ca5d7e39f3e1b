"""From a file, a program or a folder to the plan of an archive: members, names, what is refused."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import yaml

from marserve.archive.contents.built_in_handlers import BUILT_IN_HANDLERS
from marserve.archive.writing.sources import (
    TASKS,
    Wishes,
    is_archive,
    is_of_transformers,
    is_source,
    missing_modules,
    plan_source,
    split_source,
)
from marserve.archive.writing.writer import write_archive
from marserve.errors import CannotArchive
from marserve_handlers.ready.transformers.tasks import TASKS as TASKS_OF_HANDLER

HANDLER = "def handle(data, context):\n    return data\n"


def write(folder: Path, files: dict[str, str]) -> None:
    """Write these files, and the folders that they lie in."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("nets.py", "There is no file or folder nets.py; did you mean net.py?"),
        ("net.bin", "net.bin is weights alone: name a Python file"),
        ("whole.pt", "whole.pt is a pickle with the class nets.Net, as of a whole module, and is not loaded: export"),
        ("net.onnx:Net", "net.onnx is no Python file, so Net cannot be looked for in it; leave out :Net."),
        ("notes.txt", "notes.txt is no model: name a Python file"),
        ("empty", "empty has no model: no model.py or handler.py, no other Python file with one, no program"),
        ("node", "node/model-config.yaml names a workerProgram, and nothing says which file is its handler: pack"),
        ("many", "2 files of many have one: a.py, b.py. Name the file."),
    ],
)
def test_what_is_no_source_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, sentence: str
) -> None:
    """With what is there, or what would be right."""
    monkeypatch.chdir(tmp_path)
    write(
        tmp_path,
        {
            "net.py": HANDLER,
            "net.bin": "x",
            "net.onnx": "x",
            "whole.pt": "cnets\nNet\n.",
            "notes.txt": "x",
            "empty/x.txt": "x",
            "node/worker.mjs": "x",
            "node/model-config.yaml": "workerProgram: [node, worker.mjs]\n",
        },
    )
    write(tmp_path, {"many/a.py": HANDLER, "many/b.py": HANDLER})

    with pytest.raises(CannotArchive) as refusal:
        plan_source(word)

    assert sentence in refusal.value.message
    assert "\n" not in refusal.value.message


def test_a_file_brings_what_it_imports_and_names(tmp_path: Path) -> None:
    """Modules beside it and theirs, packages whole, files by their names, its configuration and requirements."""
    write(
        tmp_path,
        {
            "m.py": "import json, net\nfrom pkg.a import x\nW = open('w.bin')\n" + HANDLER,
            "net.py": "import deep\nL = 'labels/l.txt'\n",
            "deep.py": "",
            "other.py": "raise SystemExit",
            "pkg/__init__.py": "",
            "pkg/a.py": "x = 1",
            "pkg/b.py": "",
            "labels/l.txt": "l",
            "w.bin": "w",
            "unnamed.bin": "u",
            "requirements.txt": "numpy\n",
        },
    )
    (tmp_path / "model-config.yaml").write_text("batchSize: 2\n")

    plan = plan_source(str(tmp_path / "m.py")).plan

    assert plan.spec.model_name == "m"
    assert sorted(plan.members) == [
        "deep.py",
        "labels/l.txt",
        "m.py",
        "model-config.yaml",
        "net.py",
        "pkg/__init__.py",
        "pkg/a.py",
        "pkg/b.py",
        "requirements.txt",
        "w.bin",
    ]
    assert not plan.made


def test_a_class_among_others_is_named_in_the_manifest(tmp_path: Path) -> None:
    """A file whose only class it is has TorchServe's word, so that both servers take the archive."""
    write(tmp_path, {"one.py": "class Shout:\n    def handle(self, d, c): return d\n"})
    write(tmp_path, {"two.py": "class Net: ...\nclass Shout:\n    def handle(self, d, c): return d\n"})

    handlers = [plan_source(str(tmp_path / name)).plan.spec.handler for name in ("one.py", "two.py", "two.py:Net")]

    assert [handler.rpartition("/")[2] for handler in handlers] == ["one.py", "two.py:Shout", "two.py:Net"]


def test_wishes_come_before_the_file_and_that_before_litserves_words(tmp_path: Path) -> None:
    """The merged configuration is a member without a file."""
    text = "import litserve as ls\nclass MyAPI(ls.LitAPI): ...\n"
    text += "s = ls.LitServer(MyAPI(max_batch_size=8, batch_timeout=0.05), workers_per_device=3)\n"
    write(tmp_path, {"s.py": text})
    (tmp_path / "model-config.yaml").write_text("batchSize: 4\nhandler: {topk: 2}\n")

    plan = plan_source(f"{tmp_path}/s.py", Wishes(options={"minWorkers": 1, "maxWorkers": 1})).plan

    assert yaml.safe_load(plan.made["model-config.yaml"]) == {
        "batchSize": 4,
        "batchPolicy": "fixed",
        "handler": {"topk": 2},
        "maxBatchDelay": 50,
        "maxWorkers": 1,
        "minWorkers": 1,
    }
    archive = write_archive(plan, tmp_path)
    with zipfile.ZipFile(archive) as packed:
        assert sorted(packed.namelist()) == ["MAR-INF/MANIFEST.json", "model-config.yaml", "s.py"]
        manifest = json.loads(packed.read("MAR-INF/MANIFEST.json"))
    assert manifest["model"]["configFile"] == "model-config.yaml"
    assert manifest["model"]["modelName"] == "my_api"
    assert manifest["model"]["handler"] == "s.py:MyAPI"


def test_a_spec_of_litserve_is_refused(tmp_path: Path) -> None:
    """Before anything is started."""
    text = "import litserve as ls\nclass A(ls.LitAPI): ...\nls.LitServer(A(), spec=ls.OpenAISpec())\n"
    write(tmp_path, {"s.py": text})

    with pytest.raises(CannotArchive, match="gives LitServe a spec, whose routes marserve does not serve"):
        plan_source(f"{tmp_path}/s.py")


@pytest.mark.parametrize("name", ["net.onnx", "net.pt2"])
def test_a_program_is_named_as_its_file_and_brings_its_data(tmp_path: Path, name: str) -> None:
    """Large weights of ONNX files lie beside them."""
    write(tmp_path, {"net.onnx": "x", "net.pt2": "x", "net.onnx.data": "w"})

    plan = plan_source(str(tmp_path / name)).plan

    assert (plan.spec.model_name, plan.spec.handler) == ("net", "base_handler")
    assert set(plan.members) == ({name, "net.onnx.data"} if name == "net.onnx" else {name})


def test_a_folder_goes_whole_but_for_what_is_no_part_of_a_model(tmp_path: Path) -> None:
    """Tests, hidden files, caches, environments and archives stay; the folder names the model."""
    folder = tmp_path / "my digits"
    write(folder, {"model.py": HANDLER, "test_model.py": "", "data/a.bin": "a", ".secret": "s", "old.mar": ""})
    write(folder, {".git/config": "", "venv/pyvenv.cfg": "", "venv/lib/x.py": "", "__pycache__/m.pyc": ""})

    plan = plan_source(str(folder)).plan

    assert plan.spec.model_name == "my_digits"
    assert set(plan.members) == {"model.py", "data/a.bin"}


AUTHORS = {"README.md": "", "request.json": "{}", "test_model.py": "import model", "m_test.py": "", "conftest.py": ""}


@pytest.mark.parametrize(
    ("further", "kept"),
    [
        ({}, []),
        ({"model.py": f'{HANDLER}\nREADME = open("README.md")\n'}, ["README.md"]),
        ({"model-config.yaml": "samples: [{file: request.json}]\n"}, ["request.json"]),
        ({"inner/parts.py": "from conftest import x", "conftest.py": "import m_test"}, ["conftest.py", "m_test.py"]),
        ({"docs/README.md": "", "tests/test_x.py": ""}, []),
    ],
)
def test_what_is_for_the_author_of_a_folder_is_left_out_unless_the_model_names_it(
    tmp_path: Path, further: dict[str, str], kept: list[str]
) -> None:
    """Only at the top of the folder; the list of what is left out has the rest."""
    write(tmp_path, {"model.py": HANDLER} | AUTHORS | further)

    planned = plan_source(str(tmp_path))

    assert sorted(AUTHORS.keys() & planned.plan.members.keys()) == sorted(kept)
    assert sorted(planned.left_out) == sorted(AUTHORS.keys() - set(kept))
    assert further.keys() - AUTHORS.keys() <= planned.plan.members.keys()


def test_an_extra_file_is_packed_whatever_its_name(tmp_path: Path) -> None:
    """The author has named it."""
    write(tmp_path, {"model.py": HANDLER, "README.md": "", "request.json": "{}"})

    planned = plan_source(str(tmp_path), Wishes(extra_files=(str(tmp_path / "README.md"),)))

    assert "README.md" in planned.plan.members
    assert planned.left_out == ("request.json",)


def test_a_missing_import_is_found_without_running_the_file(tmp_path: Path) -> None:
    """Those that may fail, that lie beside the file, or are TorchServe's names are none."""
    text = "import nosuchthing.sub\nimport json, beside, ts.context\n"
    text += "try:\n    import nofast\nexcept ImportError: pass\n"
    write(tmp_path, {"m.py": text + HANDLER, "beside.py": "import alsomissing\n"})

    missing = [
        (source.label, each.module, each.line) for source, each in missing_modules(plan_source(f"{tmp_path}/m.py"))
    ]

    assert missing == [("m.py", "nosuchthing.sub", 1), ("beside.py", "alsomissing", 1)]


def test_sources_are_told_from_names_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A colon, a known ending, a slash, or a folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()

    assert [
        word for word in ("digits", "m.py", "m.py:X", "a/b", "net.onnx", "folder", ".", "m-1.0") if is_source(word)
    ] == [
        "m.py",
        "m.py:X",
        "a/b",
        "net.onnx",
        "folder",
        ".",
    ]
    assert split_source("a/m.py:X") == (Path("a/m.py"), "X")
    assert split_source("a/m.py") == (Path("a/m.py"), None)


def test_archives_are_told_by_their_names_and_manifests(tmp_path: Path) -> None:
    """A folder with a manifest is an unpacked archive."""
    write(tmp_path, {"a.mar": "", "b.tar.gz": "", "c/MAR-INF": ""})
    (tmp_path / "d" / "MAR-INF").mkdir(parents=True)
    (tmp_path / "d" / "MAR-INF" / "MANIFEST.json").write_text("{}")

    assert [is_archive(str(tmp_path / name)) for name in ("a.mar", "b.tar.gz", "c", "d", "e.mar")] == [
        True,
        True,
        False,
        True,
        False,
    ]


@pytest.mark.skipif("transformers" not in BUILT_IN_HANDLERS, reason="this marserve has no handler for transformers")
def test_a_folder_of_transformers_goes_whole_with_its_task(tmp_path: Path) -> None:
    """The task takes precedence over that of a configuration, whose other keys stay."""
    folder = tmp_path / "sentiment"
    write(folder, {"config.json": '{"architectures": ["X"]}', "model.safetensors": "w", "tokenizer.json": "{}"})
    (folder / "model-config.yaml").write_text("batchSize: 4\nhandler: {task: fill-mask, top_k: 2}\n")

    plan = plan_source(str(folder), Wishes(task="text-classification")).plan

    assert (plan.spec.model_name, plan.spec.handler) == ("sentiment", "transformers")
    assert set(plan.members) == {"config.json", "model.safetensors", "tokenizer.json"}
    assert yaml.safe_load(plan.made["model-config.yaml"]) == {
        "batchSize": 4,
        "handler": {"task": "text-classification", "top_k": 2},
    }
    assert not plan_source(str(folder)).plan.made


def test_the_known_tasks_are_the_handlers() -> None:
    """Written twice, as the server's process never imports a handler; another one is refused with the list."""
    assert set(TASKS) == set(TASKS_OF_HANDLER)
    with pytest.raises(CannotArchive, match="embeddings; it got 'fill-masks'; did you mean fill-mask"):
        plan_source(".", Wishes(task="fill-masks"))


@pytest.mark.parametrize("config", ["[" * 100_000, "[]", "{", "{}", '{"model_type": \xff}'])
def test_a_folder_with_another_config_is_not_one_of_transformers(tmp_path: Path, config: str) -> None:
    """Files of a hub are anybody's: JSON may be nested deeper than Python reads."""
    write(tmp_path, {"m/config.json": config})

    assert not is_of_transformers(tmp_path / "m")


def test_a_task_is_for_folders_of_transformers_alone(tmp_path: Path) -> None:
    """A folder with code of its own is that code's."""
    write(tmp_path, {"m/model.py": HANDLER, "m/config.json": '{"model_type": "x"}'})

    with pytest.raises(CannotArchive, match="--task is for the folder of a model of transformers"):
        plan_source(f"{tmp_path}/m", Wishes(task="fill-mask"))
