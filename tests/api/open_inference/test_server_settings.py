"""Tests for the settings of traces and of the log in Triton's words."""

from __future__ import annotations

from typing import Any

import pytest

from marserve.api.open_inference.server_settings import TRACE, LogSettings, TraceSettings
from marserve.errors import BadInput


class Levels:
    """Levels that note what they are set to."""

    def __init__(self, server: str = "info") -> None:
        self.server = server
        self.asked: list[tuple[str, str | None]] = []

    def set(self, level: str, model: str | None) -> None:
        """Note it."""
        self.asked.append((level, model))
        self.server = level


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"log_info": 1}, "log_info is 1; it must be true or false"),
        ({"log_info": None}, "log_info is None; it must be true or false"),
        ({"log_errors": False}, "errors are always logged"),
        ({"log_verbose_level": 2}, "log_verbose_level is 2; it must be 0, or 1"),
        ({"log_verbose_level": True}, "log_verbose_level is true"),
        ({"log_verbose_level": "1"}, "log_verbose_level is '1'"),
        ({"log_file": "/var/x.log"}, "log_file is '/var/x.log'; while the server runs it stays 'ts_log.log'"),
        ({"log_format": "ISO8601"}, "log_format is 'ISO8601'; while the server runs it stays 'default'"),
        ({"log_other" * 100: True}, "is no log setting; there are log_file, log_info"),
        ({"log_info": True, "log_warnings": False}, "log_info is on and log_warnings is off; the log has one level"),
        ({"log_verbose_level": 1, "log_info": False}, "log_verbose_level is on and log_info is off"),
    ],
)
def test_settings_that_cannot_be_change_nothing(wanted: dict[str, Any], words: str) -> None:
    """The sentence names the setting and what it may be; what was fine beside it is not done."""
    levels = Levels()

    with pytest.raises(BadInput) as caught:
        LogSettings(levels, "ts_log.log", "default").change({"log_errors": True, **wanted})

    assert words in str(caught.value)
    assert len(str(caught.value)) < 400
    assert levels.asked == []


@pytest.mark.parametrize(
    ("before", "wanted", "after"),
    [
        ("info", {}, "info"),
        ("info", {"log_verbose_level": 1}, "debug"),
        ("debug", {"log_verbose_level": 0}, "info"),
        ("error", {"log_verbose_level": 0}, "error"),
        ("info", {"log_info": False}, "warning"),
        ("debug", {"log_info": False}, "warning"),
        ("info", {"log_warnings": False}, "error"),
        ("error", {"log_info": True}, "info"),
        ("error", {"log_warnings": True}, "warning"),
        ("debug", {"log_info": True}, "debug"),
        ("info", {"log_info": False, "log_warnings": True, "log_errors": True, "log_file": ""}, "warning"),
    ],
)
def test_the_switches_move_one_level(before: str, wanted: dict[str, Any], after: str) -> None:
    """As little as they must; a level that stays is not set again."""
    levels = Levels(before)
    settings = LogSettings(levels, "", "default")
    settings.change(wanted)

    assert levels.server == after
    assert levels.asked == ([] if before == after else [(after, None)])
    document = settings.document()
    assert (document["log_verbose_level"], document["log_info"], document["log_warnings"]) == (
        int(after == "debug"),
        after in ("debug", "info"),
        after != "error",
    )
    assert document["log_errors"] is True
    settings.change(document)
    assert levels.server == after


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"trace_level": ["TIMESTAMPS"]}, "trace_level is ['TIMESTAMPS']; this server makes no traces"),
        ({"trace_level": "TENSORS"}, "trace_level is 'TENSORS'; "),
        ({"trace_rate": 1}, "trace_rate is 1; "),
        ({"trace_file": "/etc/x"}, "trace_file is '/etc/x'; "),
        ({"trace_level": ["A" * 100] * 1000}, "trace_level is "),
        ({"trace_rate": {"a": 1}}, "trace_rate is an object"),
        ({"trace_depth": "1"}, "'trace_depth' is no trace setting; there are trace_file, trace_level"),
    ],
)
def test_traces_that_are_not_written_are_refused_by_name(wanted: dict[str, Any], words: str) -> None:
    """The sentence says what is there in their place, and is bounded."""
    with pytest.raises(BadInput) as caught:
        TraceSettings().check(wanted)

    assert str(caught.value).startswith(words)
    assert len(str(caught.value)) < 400


def test_the_trace_settings_in_force_may_be_set() -> None:
    """By their values, as lists, and by clearing them."""
    settings = TraceSettings()

    settings.check({})
    settings.check(settings.document())
    settings.check({"trace_level": "OFF", "trace_rate": ["0"]})
    settings.check(dict.fromkeys(TRACE, None))
    settings.check({name: [] for name in TRACE})


@pytest.mark.parametrize(("share", "rate"), [(1.0, "1"), (0.01, "100"), (0.3, "3"), (0.0, "0")])
def test_a_server_that_sends_traces_says_so(share: float, rate: str) -> None:
    """Of how many requests one is sent; a client cannot change it."""
    settings = TraceSettings(share)

    document = settings.document()

    assert document == {**TRACE, "trace_level": ["TIMESTAMPS"], "trace_rate": rate, "trace_count": "-1"}
    settings.check(document)
    with pytest.raises(BadInput, match="trace_level is 'OFF'; this server stays as it was started, so it can only be"):
        settings.check({"trace_level": "OFF"})
