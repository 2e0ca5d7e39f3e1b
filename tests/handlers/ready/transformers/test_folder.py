"""What a model's folder says, without the library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from marserve_handlers.errors import ModelNotLoadable
from marserve_handlers.ready.transformers.folder import ModelFolder, find_folder
from marserve_handlers.ready.transformers.tasks import KEYS_OF_TASKS, TASKS, task_of


def make(path: Path, config: Any = None, **files: Any) -> Path:
    """A folder with a config.json and these further files of JSON."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({} if config is None else config))
    for name, document in files.items():
        (path / name).write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("BertForSequenceClassification", "text-classification"),
        ("XLMRobertaForTokenClassification", "token-classification"),
        ("RobertaForMaskedLM", "fill-mask"),
        ("BartForConditionalGeneration", "summarization"),
        ("LlamaForCausalLM", "text-generation"),
        ("GPT2LMHeadModel", "text-generation"),
        ("ViTForImageClassification", "image-classification"),
        ("BertModel", "embeddings"),
    ],
)
def test_the_task_follows_from_the_class(architecture: str, task: str) -> None:
    """By the end of its name."""
    found = task_of(architecture)

    assert found is TASKS[task]
    assert ModelFolder(Path(), {"architectures": [architecture]}).find_task() is found


@pytest.mark.parametrize("config", [{}, {"architectures": []}, {"architectures": ["BertForPreTraining"]}])
def test_a_class_of_no_task_is_an_error_that_lists_the_tasks(config: dict[str, Any]) -> None:
    """The configuration may name one."""
    with pytest.raises(ModelNotLoadable, match=r"task is not known: .* Set handler\.task .* text-classification, "):
        ModelFolder(Path(), config).find_task()


def test_keys_are_of_tasks_that_exist() -> None:
    """Each is for some of them."""
    assert {task for tasks in KEYS_OF_TASKS.values() for task in tasks} == set(TASKS)


def test_the_model_lies_at_the_top_or_in_the_only_folder(tmp_path: Path) -> None:
    """The top comes first: sentence-transformers puts a config.json into folders of it."""
    with pytest.raises(ModelNotLoadable, match=r"The archive holds no config\.json, .*marserve archive --extra-file"):
        find_folder(str(tmp_path), None)

    inner = make(tmp_path / "model")
    assert find_folder(str(tmp_path), None).path == inner

    make(tmp_path, {"architectures": ["BertModel"]})
    assert find_folder(str(tmp_path), None).path == tmp_path
    assert find_folder(str(tmp_path), "model").path == inner


@pytest.mark.parametrize("name", ["gone", "..", "/", "../model"])
def test_a_named_folder_is_one_of_the_archive(tmp_path: Path, name: str) -> None:
    """Not of the machine."""
    make(tmp_path / "archive" / "model")
    make(tmp_path / "model")

    with pytest.raises(ModelNotLoadable, match=r"handler\.model .* must be a folder of the archive"):
        find_folder(str(tmp_path / "archive"), name)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "config.json is not JSON"), ("[]", "config.json is no JSON object")]
)
def test_a_config_that_cannot_be_read_is_named(tmp_path: Path, text: str, message: str) -> None:
    """With what is wrong."""
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(ModelNotLoadable, match=message):
        find_folder(str(tmp_path), None)


def test_weights_are_safetensors_unless_the_operator_trusts(tmp_path: Path) -> None:
    """Of a sharded model, too."""
    folder = ModelFolder(tmp_path, {})
    with pytest.raises(ModelNotLoadable, match=r"holds no weights: a file that ends in \.safetensors is missing"):
        folder.check_weights(is_trusted=True)

    (tmp_path / "pytorch_model-00001-of-00002.bin").touch()
    with pytest.raises(ModelNotLoadable, match=r"pytorch_model-00001-of-00002\.bin are not loaded.*trusted_models"):
        folder.check_weights(is_trusted=False)
    folder.check_weights(is_trusted=True)

    (tmp_path / "model-00001-of-00002.safetensors").touch()
    folder.check_weights(is_trusted=False)


def test_pooling_is_read_from_what_sentence_transformers_writes(tmp_path: Path) -> None:
    """A way that is not known is an error, and not another vector."""
    folder = ModelFolder(tmp_path, {})
    assert folder.pooling() is None
    assert not folder.is_normalized()

    make(tmp_path / "1_Pooling", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False})
    make(tmp_path, **{"modules.json": [{"type": "sentence_transformers.models.Normalize"}]})
    assert folder.pooling() == "mean"
    assert folder.is_normalized()

    make(tmp_path / "1_Pooling", {"pooling_mode_max_tokens": True})
    with pytest.raises(ModelNotLoadable, match=r"pools by pooling_mode_max_tokens; set handler\.pooling"):
        folder.pooling()
