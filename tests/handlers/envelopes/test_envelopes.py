"""Envelopes by the words of the settings, and what all of them share."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from marserve_handlers.envelopes import ENVELOPES, find_envelope
from marserve_handlers.envelopes.base import BaseEnvelope, document_of, list_of, split
from marserve_handlers.errors import PredictionException
from support.model_context import FakeItem, make_context


class Doubling(BaseEnvelope):
    """Unpacks nothing, and says how many rows there were."""

    rows = 0

    def parse_input(self, data: Any) -> Any:
        """The rows' bodies."""
        self.rows = len(data)
        return [row["body"] for row in data]

    def format_output(self, data: Any) -> Any:
        """Answers with the number of rows."""
        return [(self.rows, answer) for answer in data]


@pytest.mark.parametrize("word", ENVELOPES)
def test_every_word_names_an_envelope(word: str) -> None:
    """A class that is made of a handler's function."""
    pytest.importorskip("numpy")

    assert issubclass(find_envelope(word), BaseEnvelope)


def test_a_module_of_ones_own_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first class with `handle` is the envelope."""
    (tmp_path / "our_envelope.py").write_text(
        "class Ours:\n    def handle(self, data, context):\n        return data\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert find_envelope("our_envelope").__name__ == "Ours"
    finally:
        sys.modules.pop("our_envelope", None)


def test_a_module_without_a_class_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what is missing."""
    (tmp_path / "no_envelope.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with pytest.raises(ValueError, match="service_envelope=no_envelope names a module that defines no class"):
            find_envelope("no_envelope")
    finally:
        sys.modules.pop("no_envelope", None)


@pytest.mark.parametrize(("word", "hint"), [("kfserving", "kserve"), ("kfservingv2", "kservev2"), ("jsn", "json")])
def test_a_word_that_is_none_names_the_nearest(word: str, hint: str) -> None:
    """TorchServe's former words too."""
    with pytest.raises(ModuleNotFoundError, match=f"did you mean {hint}"):
        find_envelope(word)


def test_a_describe_request_goes_past_the_envelope() -> None:
    """It has nothing to unpack."""
    context = make_context()
    context.begin_batch([FakeItem(server_headers=[("describe", "True")])])

    assert Doubling(lambda data, context: data).handle([{"nothing": 1}], context) == [{"nothing": 1}]


def test_what_the_handler_gives_empty_stays_so() -> None:
    """The worker says what is wrong with it."""
    assert Doubling(lambda data, context: None).handle([{"body": 1}], make_context()) is None


def test_batches_of_a_coroutine_do_not_mix() -> None:
    """Two batches at once each have their own memory between unpacking and packing."""

    async def handle(data: Any, context: Any) -> Any:
        await asyncio.sleep(0)
        return data

    async def run() -> Any:
        envelope = Doubling(handle)
        first = envelope.handle_async([{"body": "a"}], make_context())
        second = envelope.handle_async([{"body": "b"}, {"body": "c"}], make_context())
        return await asyncio.gather(first, second)

    assert asyncio.run(run()) == [[(1, "a")], [(2, "b"), (2, "c")]]


@pytest.mark.parametrize(
    "row",
    [{"data": {"a": 1}}, {"body": {"a": 1}}, {"a": 1}, {"body": b'{"a": 1}'}, {"body": bytearray(b'{"a": 1}')}],
)
def test_a_rows_document_is_found(row: Any) -> None:
    """In `data`, in `body`, in the row itself; parsed where it is not yet."""
    assert document_of(row) == {"a": 1}


@pytest.mark.parametrize(
    "row", [{"body": b"{"}, {"body": b"\xff"}, {"body": {"a": 1}}, {"body": {"x": 1}}, {"body": []}]
)
def test_a_request_without_the_list_is_the_clients_fault(row: Any) -> None:
    """400, with a sentence."""
    with pytest.raises(PredictionException) as caught:
        list_of(row, "x")

    assert caught.value.error_code == 400


def test_answers_are_cut_back_to_rows() -> None:
    """One a value; of a single row all are its own; others cannot be told apart."""
    assert split([1, 2, 3], [2, 1]) == [[1, 2], [3]]
    assert split([1, 2, 3], [2]) == [[1, 2, 3]]
    with pytest.raises(ValueError, match="gave 2 for 3 inputs of 2 requests"):
        split([1, 2], [2, 1])


@pytest.mark.parametrize("word", ["json", "kserve"])
def test_an_instance_that_failed_fails_its_request(word: str) -> None:
    """Handlers give the exception in the answer's place."""
    fault = PredictionException("x: expected float32 [4], got [3]", 400)
    envelope = find_envelope(word)(lambda rows, context: [1.0, fault])

    with pytest.raises(PredictionException, match=r"expected float32 \[4\]"):
        envelope.handle([{"body": {"instances": [[1], [2]]}}], make_context())
