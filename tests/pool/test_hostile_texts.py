"""Tests for what handlers say in texts, numbers and objects that no protocol carries: the request's answer is the
handler's affair, the worker's life is not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from marserve.errors import HandlerFailed, MarserveError
from marserve.messages import Answer
from marserve.pool.slots.slot import MOST_TRACEBACK_LINES
from marserve.telemetry.logs.line_ids import TRACEBACK
from support.hostile_handler import KINDS, LONE
from support.running_pool import RunningPool

pytestmark = pytest.mark.anyio

HOSTILE = Path(__file__).parents[1] / "support" / "hostile_handler.py"
ESCAPED = "\\ud800 and \\udfff"


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """As the server runs: on uvloop."""
    return "asyncio", {"use_uvloop": True}


MODES: dict[str, Any] = {
    "batches": {},
    "coroutines": {
        "is_concurrent": True,
        "load": {"is_concurrent": True, "handler": "handler:handle_async"},
    },
    "steps": {"continuous_batching": True, "load": {"is_continuous": True}},
}
RANKS = {"parallel_type": "tp", "parallel_level": 2}


@pytest.mark.parametrize(
    "options",
    [
        *(pytest.param(options, id=name) for name, options in MODES.items()),
        pytest.param(RANKS, id="ranks", marks=[pytest.mark.long, pytest.mark.torch]),
    ],
)
@pytest.mark.timeout(180)
async def test_no_text_or_number_of_a_handlers_costs_its_worker(tmp_path: Path, options: dict[str, Any]) -> None:
    """Each request is answered or fails, whole and as a stream, and the next one has the same worker."""
    async with RunningPool(tmp_path, HOSTILE, batch_size=2, **options) as running:
        await running.start()
        pids = running.pids

        for kind in KINDS:
            ends: list[Answer | MarserveError] = [await running.ask(word.encode()) for word in (kind, f"stream {kind}")]

            for end in ends:
                assert isinstance(end, Answer | HandlerFailed), (kind, end)
            assert running.pids == pids, (kind, running.pool.last_death)
            assert await running.ask_body(b"well") == b"well", kind
        assert not running.metrics.worker_deaths


async def test_what_utf_8_cannot_say_is_told_escaped(tmp_path: Path) -> None:
    """To the client, in headers and in the log: a text of the client's own may have it."""
    async with RunningPool(tmp_path, HOSTILE) as running:
        await running.start()

        told = await running.ask(b"raise told with lone surrogates")
        phrase = await running.ask(b"phrase 0")
        header = await running.ask(b"header value 0")
        await running.ask(b"raise lone surrogates")

        assert isinstance(told, HandlerFailed)
        assert (told.message, told.code) == (ESCAPED, 400)
        assert isinstance(phrase, Answer)
        assert phrase.reason == ESCAPED
        assert isinstance(header, Answer)
        assert header.headers == [("x-a", ESCAPED)]
        assert any(f"ValueError: {ESCAPED}" in text for text in running.log.texts)
        assert LONE not in "".join(running.log.texts)


async def test_long_texts_are_cut_in_the_worker(tmp_path: Path) -> None:
    """The log would have the exception's text a line each, and the server would hold them all."""
    async with RunningPool(tmp_path, HOSTILE) as running:
        await running.start()

        told = await running.ask(b"raise told at length")
        await running.ask(b"raise a long text")

        assert isinstance(told, HandlerFailed)
        assert len(told.message) < 1.1 * (1 << 20)
        assert "characters are left out" in told.message
        assert sum(map(len, running.log.texts)) < 3_000_000


@pytest.mark.parametrize("name", ["lone surrogates", "no words", "no words of its argument", "a long text", "a nest"])
async def test_a_load_that_fails_in_such_words_is_told(tmp_path: Path, name: str) -> None:
    """In describe, from a template and from a worker."""
    source = f"""
    import sys
    sys.path.insert(0, {str(HOSTILE.parent)!r})
    import hostile_handler
    def handle(data, context):
        hostile_handler.SAID[{f"raise {name}"!r}](context)
    """
    async with RunningPool(tmp_path, source, max_restarts=1) as running:
        running.pool.start()
        with pytest.raises(MarserveError):
            await running.pool.wait_until_ready()

        assert running.pool.last_death is not None
        assert running.pool.last_death.cause == "load_failed"
        assert running.pool.last_death.detail
        running.pool.last_death.detail.encode()
        assert len(running.pool.last_death.traceback) < 100_000


async def test_a_load_that_fails_in_many_lines_is_logged_in_few(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server's own log has the author's traceback in one record."""
    source = """
    def handle(data, context):
        raise ValueError("line\\n" * 12_000)
    """
    async with RunningPool(tmp_path, source, max_restarts=1) as running:
        running.pool.start()
        with pytest.raises(MarserveError):
            await running.pool.wait_until_ready()

    tracebacks = [str(getattr(record, TRACEBACK, "")) for record in caplog.records]
    [said] = [text for text in tracebacks if "lines are left out" in text]
    assert said.count("\n") <= MOST_TRACEBACK_LINES
    assert len(caplog.records) < 50
