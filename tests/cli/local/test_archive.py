"""`marserve archive`: what it makes, what it prints for a person and for a script, and how it fails."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from marserve.archive.contents.manifest import read_manifest
from marserve.cli.local.archive import archive
from support.archives import zip_of
from support.checkpoints import safetensors_bytes
from support.fake_apis import fake_apis

app = typer.Typer()
app.command()(archive)
runner = CliRunner(env={"COLUMNS": "200", "SOURCE_DATE_EPOCH": "0"})


@pytest.fixture(autouse=True)
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a handler, a TorchScript file in form, and an extra file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "h.py").write_text("def handle(data, context):\n    return data\n")
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    records = ("net/data.pkl", "net/code/net.py.debug_pkl", "net/constants.pkl")
    script = dict.fromkeys(records, b"\x80\x02).")
    (tmp_path / "net.pt").write_bytes(zip_of(script))
    (tmp_path / "net.onnx").write_bytes(b"\x08\x07")
    (tmp_path / "state.pt").write_bytes(zip_of({"state/data.pkl": b"\x80\x02)."}))
    return tmp_path


def test_a_person_sees_what_went_in(tmp_path: Path) -> None:
    """A table of members with sizes and digests, what was left out, and one line with the archive."""
    result = runner.invoke(app, ["net", "-s", "net.pt", "--handler", "h.py", "-x", "labels.txt"])

    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["member", "size", "sha256"]
    assert [line.split()[0] for line in lines[1:5]] == ["MAR-INF/MANIFEST.json", "h.py", "labels.txt", "net.pt"]
    assert "8 bytes" in lines[3]
    assert hashlib.sha256(b"cat\ndog\n").hexdigest()[:16] in lines[3]
    assert lines[5] == "net.pt: 1 debug records with paths of this machine were left out"
    assert lines[6].startswith("net.mar (")
    assert lines[6].endswith("): model net, version 1.0, handler h.py")
    assert result.stderr == ""


def test_a_script_gets_one_json_document(tmp_path: Path) -> None:
    """With every digest whole and every warning in it."""
    (tmp_path / "c.yaml").write_text("batchsize: 2\n")

    result = runner.invoke(app, ["net", "-s", "net.pt", "-c", "c.yaml", "--version", "7", "--json"])

    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["path"] == "net.mar"
    assert document["sizeBytes"] == (tmp_path / "net.mar").stat().st_size
    assert (document["model"], document["version"], document["handler"]) == ("net", "7", "base_handler")
    assert document["warnings"] == ["batchsize is no key of the server; did you mean batchSize?"]
    members = {member["name"]: member for member in document["members"]}
    with zipfile.ZipFile(tmp_path / "net.mar") as file:
        assert list(members) == file.namelist()
        for name, member in members.items():
            assert hashlib.sha256(file.read(name)).hexdigest() == member["sha256"]
            assert len(file.read(name)) == member["sizeBytes"]
    assert members["net.pt"]["leftOut"] == ["net/code/net.py.debug_pkl"]


@pytest.mark.parametrize("name", ["net.pt", "net.onnx"])
def test_a_whole_program_needs_no_handler_named(tmp_path: Path, name: str) -> None:
    """Tensors in, tensors out."""
    assert runner.invoke(app, ["m", "-s", name, "--format", "no-archive"]).exit_code == 0

    assert read_manifest(tmp_path / "m").handler == "base_handler"


@pytest.mark.parametrize("arguments", [["-s", "state.pt"], [], ["-s", "gone.pt"]])
def test_weights_alone_ask_for_a_handler(arguments: list[str]) -> None:
    """Nobody can guess what to do with them."""
    result = runner.invoke(app, ["m", *arguments])

    assert result.exit_code == 2
    assert "Name a handler with --handler" in result.stderr
    assert result.stdout == ""


def test_what_servers_would_refuse_is_told_while_it_is_made(tmp_path: Path) -> None:
    """The archive is made all the same: the operator may trust it."""
    (tmp_path / "whole.pkl").write_bytes(pickle.dumps(Path("x")))

    result = runner.invoke(app, ["m", "--handler", "h.py", "-x", "whole.pkl", "-x", "*.none"])

    assert result.exit_code == 0, result.output
    assert "Warning: No file matches *.none" in result.stderr
    assert "Warning: servers will refuse this archive. Refused archive member 'whole.pkl'" in result.stderr
    assert (tmp_path / "m.mar").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-x", "weights"], []),
        ([], ["checkpoint is weights, which is not packed: servers look in their model store"]),
        (["-x", "cut/weights"], ["servers will refuse this archive. The checkpoint cannot be used: m.safetensors"]),
        (["-x", "weights", "-s", "net.pt"], ["it has the weights net.pt, and checkpoint too"]),
    ],
)
def test_weights_that_the_configuration_names_are_packed_with_extra_files(
    arguments: list[str], said: list[str]
) -> None:
    """And what a server would say of them is said."""
    file = safetensors_bytes({"a": ("F32", [2])})
    for folder, content in (("weights", file), ("cut/weights", file[:-1])):
        Path(folder).mkdir(parents=True)
        Path(folder, "m.safetensors").write_bytes(content)
    Path("net.py").write_text("class Net: pass\n")
    Path("net.pt").write_bytes(b"")
    Path("c.yaml").write_text("checkpoint: weights\n")

    result = runner.invoke(
        app, ["m", "--handler", "base_handler", "--model-file", "net.py", "-c", "c.yaml", *arguments]
    )

    assert result.exit_code == 0, result.output
    warnings = result.stderr.replace("\n", " ")
    assert warnings.count("Warning:") == len(said)
    assert all(each in warnings for each in said)


def test_a_failure_is_a_sentence_and_status_1(tmp_path: Path) -> None:
    """No traceback; a second archive of the name is not written over."""
    assert runner.invoke(app, ["m", "--handler", "h.py"]).exit_code == 0
    first = (tmp_path / "m.mar").read_bytes()

    again = runner.invoke(app, ["m", "--handler", "image_classifier"])

    assert again.exit_code == 1
    assert "m.mar already exists" in again.stderr
    assert "Traceback" not in again.output
    assert (tmp_path / "m.mar").read_bytes() == first
    assert runner.invoke(app, ["m", "--handler", "image_classifier", "--force"]).exit_code == 0
    assert (tmp_path / "m.mar").read_bytes() != first


def test_a_failure_is_json_for_a_script() -> None:
    """The same sentence in an object."""
    result = runner.invoke(app, ["m", "--handler", "gone.py", "--json"])

    assert result.exit_code == 2
    assert "Handler file does not exist: gone.py" in json.loads(result.stdout)["error"]["message"]


@pytest.mark.parametrize("word", ["yesterday", "-1", "10000000000000000000"])
def test_a_date_that_is_none_is_refused(word: str) -> None:
    """SOURCE_DATE_EPOCH must not be ignored silently."""
    result = runner.invoke(app, ["m", "--handler", "h.py"], env={"SOURCE_DATE_EPOCH": word})

    assert result.exit_code == 1
    assert word in result.stderr


def test_hostile_configuration_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """No server would take it, whatever the operator trusts."""
    (tmp_path / "c.yaml").write_text("a: !!python/object/apply:os.system [echo]\n")

    result = runner.invoke(app, ["m", "--handler", "h.py", "-c", "c.yaml"])

    assert result.exit_code == 1
    assert "objects are not built" in result.stderr
    assert not (tmp_path / "m.mar").exists()


def test_the_command_of_a_shell_makes_the_same_bytes(tmp_path: Path) -> None:
    """As users run it."""
    runner.invoke(app, ["m", "-s", "net.pt", "--handler", "h.py", "--export-path", "one"])

    done = subprocess.run(
        [sys.executable, "-m", "marserve.cli", "archive", "m", "-s", "net.pt", "--handler", "h.py", "-o", "two"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "SOURCE_DATE_EPOCH": "0", "COLUMNS": "200"},
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "two/m.mar" in done.stdout
    assert (tmp_path / "two" / "m.mar").read_bytes() == (tmp_path / "one" / "m.mar").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--handler", "densenet"], "Built-in handlers are base_handler, image_classifier, image_segmenter"),
        (["--handler", "image_clasifier"], "did you mean image_classifier?"),
        (["--handler", "image_classifier", "-s", "labels.txt"], "must end in .pt, .pt2, .onnx"),
        (["--handler", "image_classifier", "-s", "state.pth"], "weights alone need --model-file"),
        (["--handler", "h.py", "-c", "broken.yaml"], "broken.yaml cannot be used: it is no YAML in line 1"),
        (["--handler", "h.py", "-o", "no/such"], "there is no folder no. Create that first"),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path: Path, arguments: list[str], said: str) -> None:
    """With a sentence and status 1, before anything is written."""
    (tmp_path / "broken.yaml").write_text("a: [1")
    (tmp_path / "state.pth").write_bytes(b"")

    result = runner.invoke(app, ["m", *arguments])

    assert result.exit_code == 2
    assert said in result.stderr
    assert list(tmp_path.rglob("*.mar")) == []


def test_numbers_that_count_as_others_are_told(tmp_path: Path) -> None:
    """The server raises them without a word; the export path's last folder is made."""
    (tmp_path / "c.yaml").write_text("batchSize: 0\nresponseTimeout: 0\nmaxBatchDelay: 0\nminWorkers: 2\n")

    result = runner.invoke(app, ["m", "--handler", "h.py", "-c", "c.yaml", "-o", "new"])

    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines() == [
        "Warning: responseTimeout is 0, which is not used: it must be a whole number of 1 or more",
        "Warning: batchSize is 0, which counts as 1",
        "Warning: minWorkers 2 of the model's configuration is not used: it needs maxWorkers beside it",
    ]
    assert (tmp_path / "new" / "m.mar").is_file()


def test_an_inference_script_needs_no_weights(tmp_path: Path) -> None:
    """`sagemaker_script` has its script load what it likes; without a script the handler says what it takes."""
    (tmp_path / "inference.py").write_text("def model_fn(folder):\n    return None\n")

    with_script = runner.invoke(app, ["net", "--handler", "sagemaker_script", "-x", "inference.py", "--json"])
    without = runner.invoke(app, ["plain", "--handler", "sagemaker_script", "-s", "net.pt", "--json"])

    assert with_script.exit_code == without.exit_code == 0, with_script.output + without.output
    with zipfile.ZipFile(tmp_path / "net.mar") as opened:
        assert read_manifest(opened.read("MAR-INF/MANIFEST.json")).handler == "sagemaker_script"
        assert "inference.py" in opened.namelist()
    assert json.loads(with_script.stdout)["warnings"] == []
    (warning,) = json.loads(without.stdout)["warnings"]
    assert "neither code/inference.py nor inference.py" in warning


def test_densenets_handler_takes_what_it_can_load(tmp_path: Path) -> None:
    """TorchScript alone or weights with a model file; it opens no ONNX file."""
    good = runner.invoke(app, ["net", "--handler", "densenet_handler", "-s", "net.pt"])
    bad = runner.invoke(app, ["other", "--handler", "densenet_handler", "-s", "net.onnx"])

    assert good.exit_code == 0, good.output
    assert bad.exit_code == 2
    assert "net.onnx is no file that densenet_handler can load: it must end in .pt, .pth." in bad.output


def test_ready_handlers_take_the_files_of_their_libraries(tmp_path: Path) -> None:
    """Others are refused with the endings; a folder without config.json is a warning."""
    for name in ("booster.json", "booster.txt", "bert/config.json", "empty/vocab.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")

    good = runner.invoke(app, ["a", "--handler", "xgboost", "-s", "booster.json"])
    bad = runner.invoke(app, ["b", "--handler", "xgboost", "-s", "booster.txt"])
    folder = runner.invoke(app, ["c", "--handler", "transformers", "-x", "bert"])
    empty = runner.invoke(app, ["d", "--handler", "transformers", "-x", "empty"])

    assert "Warning" not in good.output + folder.output
    assert "booster.txt is no file that xgboost can load: it must end in .json, .ubj." in bad.output
    assert "there is no config.json, neither at the archive's top nor in a folder" in empty.output


def test_a_folder_of_extra_files_keeps_its_name_and_layout(tmp_path: Path) -> None:
    """Its contents alone are meant by a dot at its end, and by the working directory."""
    for name in ("tokenizer/vocab.txt", "tokenizer/deep/er/x.json", "assets/a/b.txt", "assets/c.txt"):
        path = tmp_path / "inputs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)

    words = ["-x", "inputs/tokenizer/", "-x", "inputs/assets/.", "-x", "inputs/toke*"]
    result = runner.invoke(app, ["net", "--handler", "h.py", *words])

    assert result.exit_code == 0, result.output
    assert sorted(set(zipfile.ZipFile("net.mar").namelist()) - {"MAR-INF/MANIFEST.json", "h.py"}) == [
        "a/b.txt",
        "c.txt",
        "tokenizer/deep/er/x.json",
        "tokenizer/vocab.txt",
    ]


def test_an_archive_is_sent_and_registered(tmp_path: Path) -> None:
    """What the server says of it stands in the document; with `--force` it may take another one's place."""
    with fake_apis() as apis:
        apis.answer("GET /models", {"models": []})
        apis.answer("PUT /archives/net.mar", {"archive": "net.mar", "sha256": "0" * 64, "bytes": 7}, 201)
        apis.answer("POST /models", {"status": "registered"})
        words = ["net", "--handler", "h.py", "--register", "--workers", "2", "--management", apis.url, "--json"]

        first = runner.invoke(app, words)
        again = runner.invoke(app, [*words, "--force"])

    assert (first.exit_code, again.exit_code) == (0, 0), first.output
    assert json.loads(first.stdout)["status"] == "registered"
    assert json.loads(first.stdout)["upload"]["archive"] == "net.mar"
    assert apis.orders("PUT")[0].body == (tmp_path / "net.mar").read_bytes()
    assert [put.parameters for put in apis.orders("PUT")] == [{}, {"replace": "true"}]
    assert apis.orders("POST")[0].parameters == {"url": "net.mar", "initial_workers": "2", "synchronous": "true"}


def test_what_cannot_be_sent_is_made_all_the_same_or_refused_before() -> None:
    """A server without uploads leaves the archive; a folder is no file to send."""
    with fake_apis() as apis:
        words = ["net", "--handler", "h.py", "--register", "--management", apis.url]

        folder = runner.invoke(app, [*words, "--format", "no-archive"])
        asked = list(apis.asked)
        made = runner.invoke(app, words)

    assert (folder.exit_code, asked) == (2, [])
    assert made.exit_code == 1
    assert "net.mar is made" in made.stderr
    assert Path("net.mar").is_file()


def test_a_source_is_packed_by_itself(tmp_path: Path) -> None:
    """The members that `marserve run` serves; `--name` gives another name, and is for sources alone."""
    (tmp_path / "m.py").write_text("import helper\nclass Net: ...\nclass Shout:\n    def handle(self, d, c): ...\n")
    (tmp_path / "helper.py").write_text("")

    results = [
        runner.invoke(app, words) for words in (["m.py"], ["m.py:Shout", "--name", "loud"], ["m", "--name", "x"])
    ]

    assert [result.exit_code for result in results] == [0, 0, 2], [result.output for result in results]
    assert (tmp_path / "shout.mar").is_file()
    with zipfile.ZipFile(tmp_path / "loud.mar") as file:
        assert file.namelist() == ["MAR-INF/MANIFEST.json", "helper.py", "m.py"]
        assert json.loads(file.read("MAR-INF/MANIFEST.json"))["model"]["handler"] == "m.py:Shout"


def test_a_source_without_a_model_is_refused(tmp_path: Path) -> None:
    """Nothing is written."""
    (tmp_path / "m.py").write_text("x = 1\n")

    result = runner.invoke(app, ["m.py"])

    assert result.exit_code == 2
    assert "m.py has no model" in result.stderr
    assert not list(tmp_path.glob("*.mar"))
