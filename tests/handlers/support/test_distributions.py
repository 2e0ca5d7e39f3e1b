"""Which package brings a module, and what a model's author is advised to do."""

from __future__ import annotations

import pytest

from marserve_handlers.support.distributions import advice_for, package_of


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


@pytest.mark.parametrize("odd", ["", "a b", "x" * 100, "; rm -rf", "ä"])
def test_an_odd_name_gets_no_advice(odd: str) -> None:
    """It may be anything that the author's code has raised."""
    assert advice_for(odd) == ""
