"""What `pt2` of a model's configuration asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from marserve_handlers.support.devices.compilation import (
    PT2Backend,
    check_valid_pt2_backend,
    find_missing_compiler,
    read_compile_options,
    wants_aot_compile,
)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (None, None),
        ({}, None),
        ({"pt2": None}, None),
        ({"pt2": "inductor"}, {"backend": "inductor"}),
        ({"pt2": {"backend": "eager", "mode": "default"}}, {"backend": "eager", "mode": "default"}),
        (
            {"pt2": {"compile": {"enable": True, "backend": "openvino", "options": {"device": "CPU"}}}},
            {"backend": "openvino", "options": {"device": "CPU"}},
        ),
        ({"pt2": {"compile": {"enable": True}}}, {}),
        ({"pt2": {"compile": {"enable": False, "backend": "inductor"}}}, None),
        ({"pt2": {"export": {"aot_compile": True}}}, None),
    ],
)
def test_each_form_is_read(config: Any, options: Any) -> None:
    """The three forms of the configuration, and none."""
    assert read_compile_options(config) == options


@pytest.mark.parametrize(
    ("pt2", "words"),
    [
        ("turbo", "turbo"),
        ({"compile": {"enable": True, "backend": "turbo"}}, "turbo"),
        ({"compile": {"backend": "inductor"}}, "no `enable`"),
        (5, "must be a backend's name or a map"),
    ],
)
def test_what_cannot_be_used_is_warned_of(pt2: Any, words: str, caplog: pytest.LogCaptureFixture) -> None:
    """The model then runs without compilation."""
    assert read_compile_options({"pt2": pt2}) is None
    assert words in caplog.text


def test_backends_are_those_of_the_contract() -> None:
    """Names, as text too."""
    assert check_valid_pt2_backend("inductor")
    assert check_valid_pt2_backend(PT2Backend.EAGER)
    assert not check_valid_pt2_backend(["inductor"][0].upper())
    assert len(PT2Backend) == 14
    assert f"{PT2Backend.EAGER}" == str(PT2Backend.EAGER) == "eager"


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, False),
        ({"pt2": "inductor"}, False),
        ({"pt2": {"export": {}}}, False),
        ({"pt2": {"export": {"aot_compile": True}}}, True),
    ],
)
def test_compiling_ahead_of_time_is_asked_for(config: Any, wanted: bool) -> None:
    """`pt2: {export: {aot_compile: true}}`."""
    assert wants_aot_compile(config) is wanted


@pytest.mark.parametrize(
    ("there", "environment", "device", "options", "missing"),
    [
        ((), {}, "cpu", {}, "there is no C++ compiler: neither g++ nor what CXX names"),
        ((), {}, "cpu", {"backend": "inductor"}, "there is no C++ compiler: neither g++ nor what CXX names"),
        (("gcc", "clang++"), {}, "cpu", {}, "there is no C++ compiler: neither g++ nor what CXX names"),
        (("g++",), {}, "cpu", {}, ""),
        (("clang++",), {"CXX": "clang++ -O2"}, "cpu", {}, ""),
        (("g++",), {"CXX": "clang++"}, "cpu", {}, "there is no C++ compiler: neither g++ nor what CXX names"),
        (("g++",), {"CXX": " "}, "cpu", {}, ""),
        ((), {"CXX": "no 'end"}, "cpu", {}, ""),
        ((), {"TORCH_INDUCTOR_INSTALL_GXX": "1"}, "cpu", {}, ""),
        ((), {}, "cuda", {}, "there is no C compiler for Triton: neither gcc, clang nor what CC names"),
        (("g++",), {}, "cuda", {}, "there is no C compiler for Triton: neither gcc, clang nor what CC names"),
        (("clang",), {}, "cuda", {}, ""),
        (("tcc",), {"CC": "tcc"}, "cuda", {}, ""),
        ((), {}, "cpu", {"backend": "openvino"}, ""),
        ((), {}, "xpu", {}, ""),
    ],
)
def test_what_a_backend_lacks_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    there: tuple[str, ...],
    environment: dict[str, str],
    device: str,
    options: dict[str, Any],
    missing: str,
) -> None:
    """As torch and Triton look for it: a variable goes before the usual names."""
    for name in there:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX", "TORCH_INDUCTOR_INSTALL_GXX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert find_missing_compiler(options, device) == missing
