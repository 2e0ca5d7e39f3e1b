"""Which package brings a module, and what a model's author is advised to do."""

from __future__ import annotations

import pytest

from marserve_handlers.support.distributions import OTHER_INTERPRETER, advice_for, package_of


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("cv2", "opencv-python-headless"),
        ("sklearn.linear_model", "scikit-learn"),
        ("PIL", "pillow"),
        ("yaml", "PyYAML"),
        ("google.protobuf.message", "protobuf"),
        ("google", None),
        ("pandas", "pandas"),
        ("my_helpers", None),
    ],
)
def test_a_package_is_named_where_it_is_known(module: str, package: str | None) -> None:
    """By the module's first name; a package is never guessed."""
    assert package_of(module) == package


def test_what_an_extra_brings_is_installed_with_marserve() -> None:
    """The versions of an extra are those that marserve was tried with."""
    assert advice_for("onnxruntime.capi") == "The extra onnx of marserve brings it: pip install 'marserve[onnx]'"


def test_a_known_package_is_advised_with_the_archives_requirements_first() -> None:
    """They go where the archive goes; the command is for this machine alone."""
    said = advice_for("sklearn")

    assert "name it in the archive's requirements.txt" in said
    assert said.endswith("pip install scikit-learn")


def test_an_unknown_module_may_be_a_file_that_was_not_packed() -> None:
    """The most common reason, and a package of that name may be somebody else's."""
    said = advice_for("my_helpers.text")

    assert "--extra-files my_helpers.py" in said
    assert "pip install" not in said


@pytest.mark.parametrize(
    ("module", "advice"),
    [
        ("torch.nn", "The package torch brings it: '/opt/old 1/bin/python' -m pip install torch"),
        ("cv2", "The package opencv-python-headless brings it: '/opt/old 1/bin/python' -m pip install opencv-"),
        (
            "mine",
            "If it is a file of yours, pack it with --extra-files mine.py; if a package brings it, install that with "
            "'/opt/old 1/bin/python' -m pip",
        ),
        ("a b", ""),
    ],
)
def test_under_another_interpreter_packages_are_installed_there(
    monkeypatch: pytest.MonkeyPatch, module: str, advice: str
) -> None:
    """Neither an extra of marserve nor the archive's requirements would get there."""
    monkeypatch.setenv(OTHER_INTERPRETER, "/opt/old 1/bin/python")

    assert advice_for(module).startswith(advice)
    assert bool(advice_for(module)) == bool(advice)


@pytest.mark.parametrize("odd", ["", "a b", "x" * 100, "; rm -rf", "ä"])
def test_an_odd_name_gets_no_advice(odd: str) -> None:
    """It may be anything that the author's code has raised."""
    assert advice_for(odd) == ""
