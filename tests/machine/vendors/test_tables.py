"""What vendors' tools print is read within bounds, and what cannot be read is told in a few words."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from marserve.machine.vendors.tables import Unreadable, read_figure, read_integer, read_lines, read_rows


@pytest.mark.parametrize("text", ["0, " + "F" * 200_000, "x" * 1_000_000, '0, "' + ("a" * 4000 + "\n") * 40])
def test_cells_that_are_too_long_are_told_in_few_words(text: str) -> None:
    """A cell that is quoted may go over many lines."""
    with pytest.raises(Unreadable) as told:
        list(read_rows(text))

    assert len(str(told.value)) < 200


@pytest.mark.parametrize(
    ("read", "cell"),
    [
        *((read_integer, cell) for cell in ("9" * 5000, "9" * 19, "1" + "0" * 19)),
        *((read_figure, cell) for cell in ("9" * 5000, "inf", "-inf", "nan", "1e300", "-1e19")),
    ],
)
def test_numbers_of_no_device_are_unreadable(read: Callable[[str], object], cell: str) -> None:
    """Python refuses to convert some, and to calculate with others."""
    with pytest.raises(Unreadable) as told:
        read(cell)

    assert len(str(told.value)) < 200


def test_words_in_place_of_a_figure_are_no_figure() -> None:
    """`nvidia-smi` has them for what a device does not tell."""
    assert read_figure("[N/A]") is None
    assert read_integer("[GPU is lost]") is None
    assert (read_figure("61"), read_integer("81559")) == (61.0, 81559)


def test_control_characters_are_escaped_where_a_line_is_shown() -> None:
    """They come from outside of the server."""
    with pytest.raises(Unreadable, match=r"\\x1b\[31m") as told:
        read_lines("\x1b[31m" * 10_000)

    assert str(told.value).isprintable()
