"""What else the server did."""

from __future__ import annotations

from marserve.telemetry.happenings import MAX_TEXT, Happening, Happenings


def test_what_went_on_in_a_time_is_found() -> None:
    """Also what began before it, or ended after it."""
    happenings = Happenings()
    for number, (began, ended) in enumerate([(0.0, 1.0), (0.5, 2.5), (2.0, 2.0), (2.5, 9.0), (4.0, 5.0)]):
        happenings.note("load", began, ended, str(number))

    assert [each.text for each in happenings if each.went_on(2.0, 3.0)] == ["1", "2", "3"]
    assert [each.text for each in happenings] == ["0", "1", "2", "3", "4"]


def test_the_oldest_leave_and_texts_are_cut() -> None:
    """Nothing grows."""
    happenings = Happenings(most=3)
    for number in range(10):
        happenings.note("death", number, number, "x" * 1000)

    assert [each.began for each in happenings] == [7, 8, 9]
    assert {len(each.text) for each in happenings} == {MAX_TEXT}


def test_how_long_two_times_overlap() -> None:
    """Never less than nothing."""
    happening = Happening("stall", 1.0, 3.0, "", "", "")

    assert happening.overlap_s(2.0, 9.0) == 1.0
    assert happening.overlap_s(0.0, 9.0) == 2.0
    assert happening.overlap_s(4.0, 9.0) == 0.0
