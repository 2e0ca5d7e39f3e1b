"""What a configuration says to the runtimes is judged before a worker starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from marserve.archive.contents.manifest import Manifest
from marserve.archive.contents.model_config import parse_model_config
from marserve.archive.contents.runtime_options import ONNX_KEYS, asks_to_compile, check_runtime_options
from marserve.errors import BadArchive
from marserve_handlers.support.devices.compilation import read_compile_options

ONNX = Manifest(handler="base_handler", serialized_file="m.onnx")


@pytest.mark.parametrize(
    ("onnx", "words"),
    [
        ([1], "onnx of the model's configuration is [1]; it must be a map, as {providers: [OpenVINO, CPU]}."),
        ({"provider": "CPU"}, "onnx.provider of the model's configuration is no key: there are providers, "),
        ({"providers": []}, "onnx.providers of the model's configuration is []; it must be a list of providers"),
        ({"providers": [3]}, "onnx.providers of the model's configuration is [3]; "),
        ({"fallback": "yes"}, "onnx.fallback of the model's configuration is 'yes'; it must be true or false."),
        ({"intra_op_num_threads": -1}, "it must be a whole number of 0 or more."),
        ({"inter_op_num_threads": True}, "it must be a whole number of 0 or more."),
        ({"graph_optimization_level": "most"}, "it must be one of disable, basic, extended, all."),
        ({"provider_options": "fast"}, "provider_options of the model's configuration is 'fast'; it must be a map."),
    ],
)  # fmt: skip
def test_what_onnx_runtime_cannot_use_is_refused_with_key_and_value(onnx: Any, words: str) -> None:
    """And what it must be."""
    with pytest.raises(BadArchive) as refused:
        check_runtime_options({"onnx": onnx}, ONNX)

    assert words in refused.value.message


@pytest.mark.parametrize("part", ["compile", "export"])
def test_parts_of_pt2_are_maps(part: str) -> None:
    """Backends that are not known are ignored, as TorchServe does."""
    manifest = Manifest(handler="base_handler", serialized_file="m.pt")
    with pytest.raises(BadArchive, match=rf"pt2\.{part} of the model's configuration is 3; it must be a map"):
        check_runtime_options({"pt2": {part: 3}}, manifest)
    check_runtime_options({"pt2": "inductor"}, manifest)


def test_keys_of_an_authors_handler_are_the_authors() -> None:
    """And so is `onnx` of a model that is none."""
    odd = {"onnx": 3, "pt2": {"compile": 3}}
    check_runtime_options(odd, Manifest(handler="mine.py", serialized_file="m.onnx"))
    check_runtime_options({"onnx": 3}, Manifest(handler="base_handler", serialized_file="m.pt"))
    check_runtime_options(None, ONNX)


def test_what_can_be_used_is() -> None:
    """Every key."""
    options = {
        "providers": ["OpenVINO", "CPU"],
        "provider_options": {"OpenVINO": {"device_type": "CPU"}},
        "fallback": True,
        "intra_op_num_threads": 0,
        "inter_op_num_threads": 2,
        "graph_optimization_level": "ORT_ENABLE_ALL",
        "execution_mode": "parallel",
        "enable_mem_pattern": False,
        "enable_cpu_mem_arena": True,
        "log_severity_level": 3,
        "config_entries": {"session.x": "1"},
    }
    assert list(options) == list(ONNX_KEYS)
    check_runtime_options({"onnx": options}, ONNX)
    check_runtime_options({"onnx": {"providers": "CPU"}}, ONNX)


@pytest.mark.onnx
def test_both_sides_know_the_same_keys() -> None:
    """The server has no ONNX Runtime to ask."""
    pytest.importorskip("onnxruntime")
    from marserve_handlers.runtimes.onnx import OPTIONS

    assert ONNX_KEYS == OPTIONS


@pytest.mark.parametrize("value", ["{intra: 0}", "{intra: 2, outer: 1}", "{}", "{inter: true}", "{intra: many}"])
def test_threads_that_cannot_be_are_refused(value: str) -> None:
    """Where values of TorchServe's keys are left out with a warning."""
    with pytest.raises(BadArchive, match=r"^threads of the model's .* is .*; it must be a map of intra, inter"):
        parse_model_config(f"threads: {value}\n".encode())


@pytest.mark.parametrize("value", ["4", "[4]", "many"])
def test_threads_that_are_no_map_are_the_handlers_own(value: str) -> None:
    """As archives made for TorchServe may have them: left out, with a warning, and the archive loads."""
    config = parse_model_config(f"threads: {value}\n".encode())

    assert config.said == {}
    assert [warning.startswith("threads is ") for warning in map(str, config.warnings)] == [True]


def test_it_is_read_with_the_configuration(tmp_path: Path) -> None:
    """So that a registration answers with it."""
    from marserve.archive.contents.model_config import read_model_config

    (tmp_path / "c.yaml").write_text("onnx: {providers: 3}\n")
    with pytest.raises(BadArchive, match=r"onnx\.providers"):
        read_model_config(tmp_path, Manifest(handler="base_handler", serialized_file="m.onnx", config_file="c.yaml"))


def test_a_plan_for_a_model_without_its_class_is_refused() -> None:
    """Only eager models can be divided. A handler of the author's own may load whatever it likes."""
    document = {"parallel": {"mesh": {"tp": 2}, "plan": {"up": "colwise"}}}

    with pytest.raises(
        BadArchive, match=r"^parallel divides eager models alone, and the archive has m\.onnx and no modelFi"
    ):
        check_runtime_options(document, ONNX)
    check_runtime_options(document, Manifest(handler="base_handler", model_file="model.py", serialized_file="m.pt"))
    check_runtime_options(document, Manifest(handler="handler.py", serialized_file="m.onnx"))
    check_runtime_options({"parallel": 3}, ONNX)


@pytest.mark.parametrize(
    "pt2",
    [
        None,
        "",
        "inductor",
        3,
        {},
        {"backend": "inductor"},
        {"export": {"aot_compile": True}},
        {"export": {}, "mode": "default"},
        {"compile": {}},
        {"compile": {"enable": True}},
        {"compile": {"enable": False, "backend": "inductor"}, "mode": "default"},
        {"compile": None, "backend": "inductor"},
    ],
)
def test_whether_a_model_is_compiled_is_read_as_its_handler_reads_it(pt2: object) -> None:
    """The server, which imports no handler, sends samples by it."""
    document = {"pt2": pt2}

    assert asks_to_compile(document) == (read_compile_options(document) is not None)
    assert not asks_to_compile(None)
