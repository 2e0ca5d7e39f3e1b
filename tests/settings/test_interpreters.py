"""Claims of `marserve.settings.interpreters`: what `allowed_interpreters` may say."""

from __future__ import annotations

from pathlib import Path

import pytest

from marserve.settings.interpreters import INTERPRETERS, AllowedInterpreter
from marserve.settings.values import Reading, Wrong


def read(text: str) -> tuple[AllowedInterpreter, ...]:
    """Read a value as settings do."""
    return INTERPRETERS.read(text, Reading("allowed_interpreters", Path("/srv"), lambda sentence: None))


def test_an_entry_is_a_path_or_a_name_and_a_path() -> None:
    """Relative paths begin where the server does; without a text there is no entry."""
    assert read("") == ()
    assert read(" torch-1 = /opt/t/bin/python , /usr/bin/python3.12, old=venv/bin/python") == (
        AllowedInterpreter(Path("/opt/t/bin/python"), "torch-1"),
        AllowedInterpreter(Path("/usr/bin/python3.12")),
        AllowedInterpreter(Path("/srv/venv/bin/python"), "old"),
    )


def test_a_path_may_have_an_equals_sign() -> None:
    """A name has no slash, so a path before the sign is no name."""
    assert read("/opt/a=b/bin/python") == (AllowedInterpreter(Path("/opt/a=b/bin/python")),)


def test_what_is_read_is_written_the_same() -> None:
    """For snapshots of settings."""
    text = "old=/opt/t/bin/python,/usr/bin/python3.12"

    assert INTERPRETERS.write(read(text)) == text
    assert INTERPRETERS.write(()) == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("=/opt/bin/python", "'=/opt/bin/python'; it must be the path of an interpreter, or NAME=PATH"),
        ("old=", "'old='"),
        ("two words=/opt/bin/python", "'two words=/opt/bin/python'"),
        ("a=/x,b=/y,a=/z", "has the name a twice"),
    ],
)
def test_what_names_no_interpreter_stops_the_start(text: str, said: str) -> None:
    """With the entry and what would be right."""
    with pytest.raises(Wrong, match=r"allowed_interpreters") as error:
        read(text)

    assert said in str(error.value)
