"""How one line of text becomes a value: what is right, what is let pass with a warning, what is refused."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.model_options import say
from marserve.option_values import parse_size
from marserve.settings.table import KEYS
from marserve.settings.values import (
    BOOL,
    FOLDERS,
    HOSTS,
    INT,
    LENIENT_CHOICE,
    LOAD_MODELS,
    MINUTES,
    MODEL_MEMORY,
    MODELS,
    REGEXES,
    SIZE,
    Address,
    Kind,
    ModelDefaults,
    ModelToLoad,
    Reading,
    Wrong,
    address_kind,
)


def read(kind: Kind[Any], text: str, warnings: list[str] | None = None, **bounds: Any) -> Any:
    """What `kind` makes of `text`."""
    heard = warnings if warnings is not None else []
    return kind.read(text, Reading("some_key", Path("/here"), heard.append, **bounds))


ADDRESS = address_kind(8081, 8444)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://127.0.0.1:9000", Address("http", "127.0.0.1", 9000)),
        ("HTTP://localhost", Address("http", "localhost", 8081)),
        ("https://0.0.0.0", Address("https", "0.0.0.0", 8444)),
        ("https://example.org:8443/", Address("https", "example.org", 8443)),
        (" http://a:0 ", Address("http", "a", 0)),
        ("http://[::1]:80", Address("http", "::1", 80)),
        ("unix:/run/ts.sock", Address("unix", path="/run/ts.sock")),
        ("UNIX:/run/ts.sock", Address("unix", path="/run/ts.sock")),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    """Scheme in any case; the listener's own ports where none is given; and back as text."""
    assert read(ADDRESS, text) == address
    assert read(ADDRESS, str(address)) == address


@pytest.mark.parametrize(
    "text", ["", "127.0.0.1:8080", "ftp://a", "http://", "http://a:b", "http://a/b", "unix:x", "http://::1"]
)
def test_what_is_no_address_is_named(text: str) -> None:
    """TorchServe's words, and what would be right."""
    with pytest.raises(Wrong, match=rf"^Invalid binding address: {text}.*some_key is http://host:port"):
        read(ADDRESS, text)


@pytest.mark.parametrize("port", [65535, 70000, 10**9])
def test_a_port_out_of_range_is_named(port: int) -> None:
    """65535 and above, as in TorchServe."""
    with pytest.raises(Wrong, match=rf"^Invalid port number: http://a:{port}; .* under 65535"):
        read(ADDRESS, f"http://a:{port}")


@pytest.mark.parametrize(
    ("address", "is_loopback"),
    [
        ("http://127.0.0.1:1", True),
        ("http://127.8.9.1:1", True),
        ("http://LocalHost:1", True),
        ("http://[::1]:1", True),
        ("unix:/x", True),
        ("http://0.0.0.0:1", False),
        ("http://10.0.0.1:1", False),
        ("http://example.org:1", False),
        ("http://127.0.0.1.example.org:1", False),
    ],
)
def test_only_addresses_of_this_machine_are_loopback(address: str, is_loopback: bool) -> None:
    """A name that is not known to be this machine counts as open."""
    assert read(ADDRESS, address).is_loopback is is_loopback


@pytest.mark.parametrize(
    ("text", "value", "warns"),
    [("true", True, 0), (" TRUE ", True, 0), ("false", False, 0), ("", False, 0), ("yes", False, 1), ("1", False, 1)],
)
def test_only_the_word_true_is_true(text: str, value: bool, warns: int) -> None:
    """Other words count as false, as in TorchServe, but not in silence."""
    warnings: list[str] = []

    assert read(BOOL, text, warnings) is value
    assert len(warnings) == warns


@pytest.mark.parametrize("text", ["", "x", "1.5", "0x10", "1_000", "٣", "0", "11", "9" * 30])
def test_a_bad_number_says_what_is_right(text: str) -> None:
    """Name, value seen, bounds."""
    with pytest.raises(Wrong) as error:
        read(INT, text, minimum=1, maximum=10)

    assert str(error.value) == f"Invalid configuration: some_key is {text!r}; it must be a whole number from 1 to 10"


def test_blanks_around_a_number_do_no_harm() -> None:
    """Java would refuse them; nobody sees them."""
    assert read(INT, " 7 ", minimum=1) == 7


def test_an_unknown_metrics_mode_means_log() -> None:
    """TorchServe logs it and goes on; case and blanks do not count."""
    warnings: list[str] = []
    modes = ("log", "prometheus", "legacy")

    assert read(LENIENT_CHOICE, " Prometheus ", warnings, choices=modes) == "prometheus"
    assert read(LENIENT_CHOICE, "statsd", warnings, choices=modes) == "log"
    assert warnings == ["some_key is 'statsd', which is not one of log, prometheus, legacy; log is taken"]


def test_a_bad_life_time_of_tokens_means_an_hour() -> None:
    """TorchServe's rule for this key alone."""
    warnings: list[str] = []

    assert read(MINUTES, "0.05", warnings) == 0.05
    assert read(MINUTES, "soon", warnings) == 60.0
    assert len(warnings) == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", ()),
        ("ALL", "all"),
        ("a.mar", (ModelToLoad("a.mar"),)),
        (
            "a.mar, one=b.mar ,,two = c.mar",
            (ModelToLoad("a.mar"), ModelToLoad("b.mar", "one"), ModelToLoad("c.mar", "two")),
        ),
        ("https://h/m.mar?key=x", (ModelToLoad("https://h/m.mar?key=x"),)),
        ("m.mar#sha256=ab", (ModelToLoad("m.mar#sha256=ab"),)),
        ("m=m.mar#sha256=ab", (ModelToLoad("m.mar#sha256=ab", "m"),)),
        ("m=https://h/m.mar?key=x", (ModelToLoad("https://h/m.mar?key=x", "m"),)),
    ],
)
def test_models_to_load(text: str, value: object) -> None:
    """`all`, or names and URLs; blanks around commas are trimmed; a URL keeps its own equals signs."""
    assert read(LOAD_MODELS, text) == value
    assert read(LOAD_MODELS, LOAD_MODELS.write(value)) == value


def test_folders_are_below_the_working_directory_unless_they_are_absolute() -> None:
    """And back as text."""
    folders = (Path("/here/models"), Path("/srv/shared models"))

    assert read(FOLDERS, " models ,, /srv/shared models ") == folders
    assert read(FOLDERS, FOLDERS.write(folders)) == folders
    assert read(FOLDERS, "") == ()


def test_models_become_seconds_and_numbers() -> None:
    """Milliseconds and seconds of the JSON are seconds inside; a snapshot's keys are passed over."""
    text = (
        '{"noop": {"1.0": {"defaultVersion": true, "marName": "noop.mar", "minWorkers": 1, "maxWorkers": 2,'
        ' "batchSize": 6, "maxBatchDelay": 40, "responseTimeout": 25, "startupTimeout": 30, "runtimeType": "python"}}}'
    )
    warnings: list[str] = []

    models = read(MODELS, text, warnings)

    assert models["noop"]["1.0"] == ModelDefaults(
        say(
            min_workers=1,
            max_workers=2,
            batch_size=6,
            max_batch_delay_s=0.04,
            response_timeout_s=25.0,
            startup_timeout_s=30.0,
        ),
        "python",
    )
    assert warnings == []
    assert read(MODELS, MODELS.write(models)) == models


def test_odd_values_of_models_count_as_absent_and_are_reported() -> None:
    """Not positive, of a wrong type, or no key at all. A batch delay of 0 means 0."""
    warnings: list[str] = []

    models = read(
        MODELS,
        '{"m": {"1": {"minWorkers": 0, "batchSize": "8", "maxWorkers": true, "maxBatchDelay": 0, "x": 1}}}',
        warnings,
    )

    assert models["m"]["1"] == ModelDefaults(say(max_batch_delay_s=0))
    assert warnings[0] == (
        "some_key: minWorkers of m 1 is 0, which counts as not given; it must be a whole number of 1 or more"
    )
    assert warnings[-1] == "some_key: x of m 1 is no key that is read here; it is ignored"
    assert len(warnings) == 4


@pytest.mark.parametrize("text", ["{", "[]", '{"m": []}', '{"m": {"1": 3}}', "nonsense"])
def test_models_of_another_shape_are_refused(text: str) -> None:
    """Malformed JSON stops the server, and the message shows the shape."""
    with pytest.raises(Wrong, match=r'^Invalid configuration: some_key .*it must be \{"name": \{"version"'):
        read(MODELS, text)


def test_patterns_must_be_regular_expressions() -> None:
    """Found at start rather than at the first download."""
    assert read(REGEXES, "http://a/.*, file:///b/.*") == ("http://a/.*", "file:///b/.*")
    with pytest.raises(Wrong, match=r"'\(', which is no regular expression"):
        read(REGEXES, "http://a/.*,(")


@given(st.sampled_from(sorted(KEYS)), st.text(max_size=40))
def test_no_text_breaks_a_kind(name: str, text: str) -> None:
    """Whatever stands in a file, reading it gives a value or a sentence."""
    key = KEYS[name]
    with contextlib.suppress(Wrong):
        value = read(key.kind, text, [], minimum=key.minimum, maximum=key.maximum, choices=key.choices)
        assert isinstance(key.kind.write(value), str)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1500000", 1_500_000),
        ("500MB", 500_000_000),
        (" 1.5 GiB ", 1_610_612_736),
        ("2g", 2_000_000_000),
        ("2Gi", 2 << 30),
        ("8k", 8000),
        ("10B", 10),
    ],
)
def test_sizes_are_read_in_bytes(text: str, size: int) -> None:
    """Thousands, or with an `i` 1024s; the case does not matter."""
    assert read(SIZE, text) == parse_size(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1", "1,5GB", "5iB", "1e9", "GB", "10 bytes", "9" * 30])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    """No unit is guessed."""
    assert parse_size(text) is None
    with pytest.raises(Wrong, match=r"some_key is .*; it must be a number of bytes, as 500MB or 2GiB"):
        read(SIZE, text)


def test_models_say_what_they_take_of_memory() -> None:
    """As text or as a number; what cannot be meant counts as absent and is reported."""
    warnings: list[str] = []
    text = """{"m": {"1.0": {"memory": "2GiB", "load": "on_demand", "pinned": true},
                    "2.0": {"memory": -1, "load": "soon", "pinned": 3}}}"""

    models = read(MODELS, text, warnings)

    assert models["m"]["1.0"].options == say(memory_bytes=2 << 30, load="on_demand", is_pinned=True)
    assert models["m"]["2.0"].options == {}
    assert len(warnings) == 3
    assert "memory of m 2.0 is -1, which counts as not given; it must be a number of bytes above 0" in warnings[0]
    assert read(MODELS, MODELS.write(models)) == models


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("AUTO", "auto"), ("0", 0), ("2GiB", 2 << 30)])
def test_memory_for_models_is_a_size_or_a_word(text: str, value: object) -> None:
    """`auto` in any case."""
    assert read(MODEL_MEMORY, text) == value
    assert read(MODEL_MEMORY, MODEL_MEMORY.write(value)) == value


def test_memory_for_models_that_is_no_size_is_refused() -> None:
    """With what would be right."""
    with pytest.raises(Wrong, match="it must be a number of bytes"):
        read(MODEL_MEMORY, "much")


def test_hosts_are_names_and_addresses_in_one_form() -> None:
    """Names below one and all of them by a star; whatever else an address has is refused with the form."""
    assert read(HOSTS, "Models.Example.com., *.a-b.org ,10.0.0.7,[FD00:0::7],*,") == (
        "models.example.com",
        "*.a-b.org",
        "10.0.0.7",
        "fd00::7",
        "*",
    )
    for wrong in ("https://a.b", "a.b:8081", "a/b", "a b", "a*.b", "*.*.b", "-a", "[::1", "ü.example", "a..b"):
        with pytest.raises(Wrong, match="without scheme, port and path"):
            read(HOSTS, wrong)
