"""What `marserve top` shows, and what its keys do."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from marserve.cli.top.view import Ask, Explain, Quit, Scale, View
from support.fake_apis import server_activity, version_activity, worker_activity


def shown(view: View, width: int = 140, height: int = 30) -> list[str]:
    """The screen's lines, without colours."""
    console = Console(width=width, height=height, force_terminal=False, highlight=False)
    with console.capture() as captured:
        console.print(view.draw(width, height))
    return [line.rstrip() for line in captured.get().splitlines()]


def a_view(*rows: dict[str, Any], **changes: Any) -> View:
    """A view that has figures."""
    view = View("http://127.0.0.1:8081")
    view.take(server_activity(*rows, **changes))
    return view


def test_a_version_is_one_line_with_its_figures() -> None:
    """Its workers are below, with why one is not up, and the devices."""
    why = "waits: a GPU; died: killed: killed by SIGKILL"
    device = {"gpuId": 0, "busyPercent": 75.0, "usedBytes": 1 << 30, "totalBytes": 8 << 30, "celsius": 61.0}
    workers = [
        worker_activity(),
        worker_activity(id="9001", status="LOADING", memoryBytes=0, restarts=3, why=why, gpuId=0),
    ]

    lines = shown(
        a_view(version_activity(workers=workers, maxWorkers=4), devices=[device, {"gpuId": 1, "trouble": "lost"}])
    )

    assert lines[0].startswith("marserve at http://127.0.0.1:8081: 12.5 req/s, 7 queued, 3 running, 412 MiB; 1 of 1")
    assert lines[1].split() == [
        *("model", "version", "state", "req/s", "p50", "p99", "queue", "running", "batch", "errors"),
        *("refused", "workers", "memory"),
    ]
    assert " ".join(lines[2].split()) == "digits 1.0 * ready 12.5 3.25 ms 1.25 s 7 3 8 (3.2) 1 2 1 of 1 to 4 412 MiB"
    text = "\n".join(lines)
    assert f"9001   LOADING            - gpu 0  restarts 3  {why}" in text
    assert "gpu 0: 75 % busy 1,024 MiB of 8,192 MiB 61 °C" in text
    assert "gpu 1: lost" in text
    assert lines[-1].startswith("q quit · ↑↓ select · e explain its slowest · + - scale it · sort: r rate")


@pytest.mark.parametrize("width", [40, 60, 75, 85, 95, 200])
def test_a_narrow_terminal_has_fewer_columns_and_no_broken_lines(width: int) -> None:
    """A line for each version, whatever the width."""
    lines = shown(a_view(version_activity("a" * 300), version_activity("b")), width)

    assert max(map(len, lines)) <= width
    assert [line for line in lines if line.startswith("b ")]
    assert "req/s" in lines[1]
    assert lines[-1].startswith("q quit")
    assert not lines[-1].endswith("…")


def test_no_name_and_no_reason_commands_the_terminal() -> None:
    """They are escaped, and no markup."""
    odd = "a\x1b[2J[red]b\u202e"
    view = a_view(
        version_activity(odd, odd, workers=[worker_activity(why=odd)]), devices=[{"gpuId": 0, "trouble": odd}]
    )
    view.message = odd

    text = "\n".join(shown(view, 400))

    assert "\x1b" not in text
    assert "\u202e" not in text
    assert text.count(r"a\x1b[2J[red]b\u202e") >= 4
    view.overlay = [odd]
    assert r"a\x1b[2J[red]b\u202e" in shown(view)[1]


def test_the_selected_version_is_kept_when_the_order_changes() -> None:
    """And its neighbour is selected when it is gone."""
    view = a_view(version_activity("a"), version_activity("b"), version_activity("c"))
    assert view.press("down") is None
    assert view.selected == ("b", "1.0")

    view.take(server_activity(version_activity("b"), version_activity("c"), version_activity("a")))
    assert view.selected == ("b", "1.0")
    view.press("down")
    view.press("down")
    view.press("down")
    assert view.selected == ("a", "1.0")
    view.take(server_activity(version_activity("b")))
    assert view.selected == ("b", "1.0")
    view.take(server_activity())
    assert view.selected is None
    assert "No model is registered." in "\n".join(shown(view))
    view.press("up")
    view.press("+")
    assert view.press("e") is None


def test_the_selected_of_many_versions_is_on_the_screen() -> None:
    """The list moves with it."""
    view = a_view(*[version_activity(f"model-{number:03}") for number in range(100)])
    for _ in range(60):
        view.press("j")

    lines = shown(view, height=24)

    assert len(lines) <= 24
    assert any(line.startswith("model-060 ") for line in lines)


@pytest.mark.parametrize(("key", "sort"), [("r", "rate"), ("p", "p99"), ("u", "queue"), ("m", "memory"), ("n", "name")])
def test_keys_sort(key: str, sort: str) -> None:
    """The server sorts, as it has versions that are not listed."""
    view = a_view(version_activity())

    assert view.press(key) == Ask()
    assert view.sort == sort


def test_the_slowest_of_the_selected_model_is_explained_over_the_list() -> None:
    """Until a key is pressed."""
    view = a_view(version_activity("a"), version_activity("b"))
    view.press("down")

    assert view.press("e") == Explain("b")
    view.overlay = ["r-1", "Why: queue"]
    assert shown(view) == ["any key goes back", "r-1", "Why: queue"]
    assert view.press("x") is None
    assert shown(view)[0].startswith("marserve at")


@pytest.mark.parametrize(
    ("bounds", "key", "wanted"),
    [
        ((1, 1), "+", Scale("digits", "1.0", 2, 2)),
        ((2, 2), "-", Scale("digits", "1.0", 1, 1)),
        ((1, 1), "-", Scale("digits", "1.0", 0, 0)),
        ((1, 4), "+", Scale("digits", "1.0", 2, 4)),
        ((1, 4), "-", Scale("digits", "1.0", 0, 4)),
    ],
)
def test_scaling_asks_first(bounds: tuple[int, int], key: str, wanted: Scale) -> None:
    """`y` does it; any other key leaves all as it is."""
    view = a_view(version_activity(minWorkers=bounds[0], maxWorkers=bounds[1]))

    assert view.press(key) is None
    assert f"Scale digits/1.0 to {wanted.minimum}" in "\n".join(shown(view))
    assert view.press("n") is None
    assert "Nothing was changed." in "\n".join(shown(view))
    view.press(key)
    assert view.press("q") is None  # it answers the question
    view.press(key)
    assert view.press("y") == wanted
    assert view.question is None


def test_no_fewer_than_no_workers() -> None:
    """It says so."""
    view = a_view(version_activity(minWorkers=0, maxWorkers=0, workers=[]))

    assert view.press("-") is None
    assert view.question is None
    assert "digits/1.0 has no worker that could go." in "\n".join(shown(view))


def test_old_figures_are_said_to_be_old() -> None:
    """Nothing is scaled by them."""
    view = a_view(version_activity())
    view.trouble = "No server answers; trying again."

    view.press("+")

    assert view.question is None
    assert "No server answers; trying again." in "\n".join(shown(view))
    view.take(server_activity(version_activity()))
    assert "trying again" not in "\n".join(shown(view))


def test_q_ends_it() -> None:
    """Also from an explanation."""
    view = a_view(version_activity())
    assert view.press("z") is None
    assert view.press("q") == Quit()
    view.overlay = ["x"]
    assert view.press("q") == Quit()
