"""What else the server did."""

from __future__ import annotations

from marserve.telemetry.happenings import MAX_TEXT, Bursts, Happening, Happenings


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


def test_a_burst_is_noted_when_it_begins_and_then_once_a_second() -> None:
    """A million refusals are a handful of happenings, without a gap between them."""
    bursts = Bursts(least=1)
    found = [(number / 1000, burst) for number in range(3500) if (burst := bursts.add(number / 1000)) is not None]

    assert [(burst.began, now, burst.amount) for now, burst in found] == [
        (0.0, 0.0, 1),
        (0.0, 1.0, 1000),
        (1.0, 2.0, 1000),
        (2.0, 3.0, 1000),
    ]


def test_a_burst_after_a_rest_begins_anew() -> None:
    """The rest is in no happening."""
    bursts = Bursts(least=1)
    bursts.add(0.0)

    assert bursts.add(0.5) is None
    assert bursts.add(5.0) == (5.0, 1)


def test_what_comes_slowly_is_no_burst() -> None:
    """However much it is in the long run; as much within a second is one."""
    bursts = Bursts(least=100)

    assert [bursts.add(float(number) / 2, 30) for number in range(1000)] == [None] * 1000
    assert bursts.add(600.0, 60) is None
    assert bursts.add(600.5, 60) == (600.0, 120)
