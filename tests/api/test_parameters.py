"""Tests for reading the parameters of management calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from marserve.api.parameters import (
    REGISTER_PARAMETERS,
    JsonParameters,
    QueryParameters,
    read_registration,
    read_strictly,
)
from marserve.errors import BadInput
from marserve.model_options import Said, say
from marserve.registry.intake.registration import RegisterParameters

KNOWN = ("number", "flag", "word")


def from_json(**values: Any) -> JsonParameters:
    """Parameters of a JSON body."""
    return JsonParameters(json.dumps(values).encode(), KNOWN)


@pytest.mark.parametrize(("word", "number"), [("5", 5), ("-2", -2), ("+7", 7), ("007", 7), ("2147483647", 2**31 - 1)])
def test_an_integer_in_a_query_is_read(word: str, number: int) -> None:
    """Within 32 bits."""
    query = QueryParameters({"number": word}, KNOWN)

    assert query.integer("number") == number
    assert query.warnings == []


@pytest.mark.parametrize("word", ["", "x", "1.5", "1e3", " 1", "1 ", "2147483648", "9" * 5000, "١٢", "0x10"])
def test_an_integer_in_a_query_that_does_not_parse_counts_as_not_given(word: str) -> None:
    """And the word is told, cut where it is long."""
    query = QueryParameters({"number": word}, KNOWN)

    assert query.integer("number") is None
    assert len(query.warnings) == 1
    assert len(query.warnings[0]) < 200


@pytest.mark.parametrize("word", ["", "abc", "1.5", "2147483648", "9" * 5000])
def test_where_no_recorded_call_says_otherwise_what_does_not_parse_is_refused(word: str) -> None:
    """With the parameter's name and the value seen, cut where it is long."""
    query = QueryParameters({"number": word, "flag": "7"}, KNOWN)

    with pytest.raises(BadInput, match="it must be a whole number") as refused:
        query.whole("number")

    assert str(refused.value).startswith(f"number is {word[:57]!r}"[:60])
    assert len(str(refused.value)) < 200
    assert query.whole("flag") == 7
    assert query.whole("word") is None


@pytest.mark.parametrize(
    ("word", "expected", "told"),
    [(None, True, 0), ("true", True, 0), ("TRUE", True, 0), ("false", False, 0), ("yes", False, 1), ("", False, 1)],
)
def test_only_the_word_true_is_true_in_a_query(word: str | None, expected: bool, told: int) -> None:
    """In any case; without a word the default counts."""
    query = QueryParameters({} if word is None else {"flag": word}, KNOWN)

    assert query.flag("flag", True) is expected
    assert len(query.warnings) == told


@pytest.mark.parametrize("word", ["yes", "", "1", "tru" * 1000])
def test_where_no_recorded_call_says_otherwise_a_flag_is_true_or_false(word: str) -> None:
    """`failed=yes` would give requests that did not fail."""
    with pytest.raises(BadInput, match=r"^flag is '.*; it must be true or false\.$") as refused:
        read_strictly({"flag": word}, KNOWN).flag("flag", False)

    assert len(str(refused.value)) < 200
    assert read_strictly({"flag": "True"}, KNOWN).flag("flag", False)


def test_unknown_parameters_are_told_with_the_nearest_known_name() -> None:
    """They do no harm, however many there are."""
    many = {f"x{number}": "1" for number in range(1000)}

    query = QueryParameters({"nunber": "1", **many}, KNOWN)

    assert query.warnings[0] == "parameter 'nunber' is not known and not used; did you mean number?"
    assert len(query.warnings) == 20


@pytest.mark.parametrize(("value", "number"), [(3, 3), (3.0, 3), ("3", 3), (None, None)])
def test_a_number_in_json_is_read(value: object, number: int | None) -> None:
    """null is not given."""
    assert from_json(number=value).integer("number") == number


@pytest.mark.parametrize("value", ["many", 1.5, True, [1], {}, 2**31, "", float("inf")])
def test_a_number_in_json_of_the_wrong_type_is_an_error(value: object) -> None:
    """JSON says what it means."""
    with pytest.raises(BadInput, match="number must be a whole number"):
        from_json(number=value).integer("number")


@pytest.mark.parametrize(
    ("value", "expected"), [(True, True), (False, False), ("true", True), ("False", False), (None, True)]
)
def test_a_flag_in_json_is_read(value: object, expected: bool) -> None:
    """Words will do."""
    assert from_json(flag=value).flag("flag", True) is expected


@pytest.mark.parametrize("value", ["yes", 1, 0, [True]])
def test_a_flag_in_json_of_the_wrong_type_is_an_error(value: object) -> None:
    """1 is no flag."""
    with pytest.raises(BadInput, match="flag must be true or false"):
        from_json(flag=value).flag("flag", True)


@pytest.mark.parametrize(("value", "text"), [("a", "a"), (3, "3"), (None, None), ("", "")])
def test_text_in_json_is_read(value: object, text: str | None) -> None:
    """A number is its digits, as TorchServe reads it."""
    assert from_json(word=value).text("word") == text


@pytest.mark.parametrize("value", [True, [], {}, "\ud800"])
def test_text_in_json_of_the_wrong_type_is_an_error(value: object) -> None:
    """Half of a surrogate pair could not be answered with."""
    with pytest.raises(BadInput):
        from_json(word=value).text("word")


@pytest.mark.parametrize("body", [b"", b"  ", b"{", b"[]", b'"x"', b"null", b"\xff", b"[" * 100_000, b"9" * 5000])
def test_a_body_that_is_no_json_object_is_an_error(body: bytes) -> None:
    """Whatever is wrong with it."""
    with pytest.raises(BadInput):
        JsonParameters(body, KNOWN)


def test_a_registration_is_read_in_seconds() -> None:
    """From a query as from JSON."""
    values = {
        "url": "m.mar",
        "model_name": "n",
        "handler": "h.py",
        "runtime": "python",
        "batch_size": "5",
        "max_batch_delay": "77",
        "response_timeout": "44",
        "startup_timeout": "55",
        "initial_workers": "2",
        "synchronous": "false",
    }
    expected = RegisterParameters(
        "m.mar",
        "n",
        "h.py",
        "python",
        say(batch_size=5, max_batch_delay_s=0.077, response_timeout_s=44, startup_timeout_s=55),
        2,
        False,
    )

    assert read_registration(QueryParameters(values, REGISTER_PARAMETERS)) == expected
    assert read_registration(JsonParameters(json.dumps(values).encode(), REGISTER_PARAMETERS)) == expected


def test_what_clients_send_for_not_given_is_not_given() -> None:
    """TorchServe's own words for it, in query and JSON; a delay of 0 is a delay."""
    words = {"batch_size": "-1", "max_batch_delay": "-100", "response_timeout": "-1", "startup_timeout": "-1"}
    assert read_registration(QueryParameters({"url": "u", **words}, REGISTER_PARAMETERS)) == RegisterParameters("u")

    body = b'{"url": "u", "max_batch_delay": -10000}'
    assert read_registration(JsonParameters(body, REGISTER_PARAMETERS)) == RegisterParameters("u")

    zero = QueryParameters({"url": "u", "max_batch_delay": "0"}, REGISTER_PARAMETERS)
    assert read_registration(zero).options == say(max_batch_delay_s=0.0)


def test_odd_values_that_torchserve_takes_are_taken_and_told() -> None:
    """Fewer than no workers are none; empty names are no names."""
    query = QueryParameters(
        {"url": "u", "model_name": "", "batch_size": "x", "initial_workers": "-2", "s3_sse_kms": "false"},
        REGISTER_PARAMETERS,
    )

    parameters = read_registration(query)

    assert (parameters.model_name, parameters.options, parameters.initial_workers) == (None, {}, 0)
    assert len(parameters.warnings) == 2


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"batch_size": "0"}, "batch_size must be 1 or more."),
        ({"max_batch_delay": "-1"}, "max_batch_delay must be 0 or more."),
        ({"response_timeout": "0"}, "response_timeout must be 1 or more."),
        ({"startup_timeout": "-5"}, "startup_timeout must be 1 or more."),
        ({"memory": "much"}, "memory is 'much'; it must be a number of bytes above 0, as 500MB or 2GiB."),
        ({"memory": "\u00b2"}, "memory is '\u00b2'; it must be a number of bytes above 0, as 500MB or 2GiB."),
        ({"load": "soon"}, "load is 'soon'; it must be one of start, on_demand."),
    ],
)
def test_an_option_that_cannot_be_meant_is_refused(values: dict[str, str], sentence: str) -> None:
    """With its name as a parameter and what it must be, in a query as in JSON."""
    said = {"url": "u", **values}

    for parameters in (QueryParameters, lambda each, known: JsonParameters(json.dumps(each).encode(), known)):
        with pytest.raises(BadInput) as raised:
            read_registration(parameters(said, REGISTER_PARAMETERS))
        assert raised.value.message == sentence


@pytest.mark.parametrize(
    ("url", "signed"),
    [
        ("s3://b/m.mar", "s3://b/m.mar"),
        ("S3A://b/m.mar", "S3A://b/m.mar"),
        ("https://b.s3.eu-west-1.amazonaws.com/m.mar", "s3+https://b.s3.eu-west-1.amazonaws.com/m.mar"),
    ],
)
def test_a_signature_is_asked_for_where_s3_has_the_archive(url: str, signed: str) -> None:
    """TorchServe's flag: what has an address of S3 is asked for with a signature."""
    query = QueryParameters({"url": url, "s3_sse_kms": "true"}, REGISTER_PARAMETERS)

    assert read_registration(query).url == signed


@pytest.mark.parametrize("url", ["u", "m.mar", "http://b.s3.amazonaws.com/m.mar", "gs://b/m.mar"])
def test_a_signature_for_what_is_not_in_s3_is_refused_with_a_sentence(url: str) -> None:
    """Whoever asks for it must not believe that it was used."""
    query = QueryParameters({"url": url, "s3_sse_kms": "true"}, REGISTER_PARAMETERS)

    with pytest.raises(BadInput, match=r"^s3_sse_kms=true asks .*; name s3://bucket/key or https://.* leave"):
        read_registration(query)


def test_a_registration_needs_a_url() -> None:
    """An empty one is the store's to refuse."""
    with pytest.raises(BadInput, match=r"^Parameter url is required\.$"):
        read_registration(QueryParameters({}, REGISTER_PARAMETERS))
    assert read_registration(QueryParameters({"url": ""}, REGISTER_PARAMETERS)).url == ""


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"memory": "2GiB", "load": "on_demand", "pinned": "true"},
            say(memory_bytes=2 << 30, load="on_demand", is_pinned=True),
        ),
        ({"memory": "5000", "load": "START", "pinned": "false"}, say(memory_bytes=5000, load="start", is_pinned=False)),
        ({}, say()),
    ],
)
def test_a_registration_says_what_it_takes_of_memory(values: dict[str, str], expected: Said) -> None:
    """In a query as in JSON."""
    said = {"url": "u", **values}

    assert read_registration(QueryParameters(said, REGISTER_PARAMETERS)).options == expected
    assert read_registration(JsonParameters(json.dumps(said).encode(), REGISTER_PARAMETERS)).options == expected


@pytest.mark.parametrize(
    ("name", "word", "right"),
    [("memory", "much", "a number of bytes"), ("memory", "0", "above 0"), ("load", "x", "start")],
)
def test_what_cannot_be_meant_of_memory_is_refused(name: str, word: str, right: str) -> None:
    """A model that is loaded at the wrong time, or charged nothing, is nothing that somebody asked for."""
    with pytest.raises(BadInput, match=right):
        read_registration(QueryParameters({"url": "u", name: word}, REGISTER_PARAMETERS))
