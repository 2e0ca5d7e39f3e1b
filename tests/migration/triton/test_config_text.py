"""Tests for the reader of `config.pbtxt`."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.migration.triton.config_text import MOST_BYTES, Block, ConfigFault, read_config

TEXT = """
name: "dig" 'its'  # a comment
max_batch_size: 0x10; input [
  { name: "INPUT__0" data_type: TYPE_FP32 dims: [ -1, 28 ] },
  < name: "\\xc3\\xbc\\n\\141\\u00e9" data_type: 11, dims: - 2 dims: 3 >
]
dynamic_batching { }
parameters: { key: "threads" value: { string_value: "2" } }
[a.b.c]: 3
"""


def test_every_form_of_the_text_format_is_read_with_its_lines() -> None:
    """Lists and repetition, braces and angles, joined texts, escapes, numbers in three bases, comments."""
    config = read_config(TEXT.encode())

    first, second = config.blocks("input")
    assert (config.text("name"), config.whole("max_batch_size"), config.line_of("max_batch_size")) == ("digits", 16, 3)
    assert (first.text("name"), first.wholes("dims"), first.line_of("dims")) == ("INPUT__0", [-1, 28], 4)
    types = ("TYPE_INVALID", *(f"TYPE_{number}" for number in range(10)), "TYPE_FP32")
    assert (second.text("name"), second.choice("data_type", types)) == ("ü\naé", "TYPE_FP32")
    assert second.wholes("dims") == [-2, 3]
    assert config.entries("parameters")["threads"].block("value") is not None
    assert list(config.unread()) == [
        ("input.data_type", 4),
        ("dynamic_batching", 7),
        ("parameters.value.string_value", 8),
        ("[a.b.c]", 9),
    ]


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ('name: "m', 1, 7, "this text has no end on its line"),
        ("input {\n  name: 3", 2, 10, "the end of the file stands where the name of a field should"),
        ("a: 1\nb 2", 2, 3, "'2' stands where a colon should, after b"),
        ("a: [1 2]", 1, 7, "'2' stands where a comma or ] should, in a"),
        ("a: }", 1, 4, "'}' stands where the value of a should"),
        ("a: 1 }", 1, 6, "'}' stands where the name of a field should"),
        ("9: 1", 1, 1, "'9' stands where the name of a field should"),
        ("[a 'b']: 1", 1, 4, "'b' stands where the name of an extension should"),
        ("a: @", 1, 4, "'@' cannot stand here"),
        ("a: '\\q'", 1, 4, "is no escape"),
        ("a: '\\xff'", 1, 4, "the escaped bytes of this text are no UTF-8"),
        ("a: '\\ud800'", 1, 4, "is no character"),
        ("a {" * 40, 1, 99, "messages are nested more than 32 deep"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused_by_line_and_column(
    text: str, line: int, column: int, words: str
) -> None:
    """With what was seen there."""
    with pytest.raises(ConfigFault) as caught:
        read_config(text.encode())

    assert (caught.value.line, caught.value.column) == (line, column)
    assert words in caught.value.sentence


def test_other_bytes_than_utf_8_and_too_many_of_them_are_refused() -> None:
    """Before anything is read of them."""
    with pytest.raises(ConfigFault, match="the byte 0xFF is no UTF-8") as caught:
        read_config(b"a: 1\n# \xff")
    with pytest.raises(ConfigFault, match="may have"):
        read_config(b" " * (MOST_BYTES + 1))

    assert (caught.value.line, caught.value.column) == (2, 3)


@pytest.mark.parametrize(
    ("text", "read", "words"),
    [
        ("a: 'x'", lambda block: block.whole("a"), "it must be a whole number"),
        ("a: 1.5", lambda block: block.whole("a"), "it must be a whole number"),
        (f"a: {'9' * 400}", lambda block: block.whole("a"), "in 64 bits"),
        ("a: -1", lambda block: block.whole("a", least=0), "of 0 or more"),
        ("a: 1", lambda block: block.text("a"), "it must be text in quotes"),
        ("a: 2", lambda block: block.flag("a"), "it must be true or false"),
        ("a: B", lambda block: block.choice("a", ("A",)), "it must be one of A"),
        ("a: 1", lambda block: block.choice("a", ("A",)), "it must be one of A"),
        ("a: 1", lambda block: block.blocks("a"), "it must be a message in braces"),
        ("a {}", lambda block: block.text("a"), "it must be a plain value"),
        ("a: 1 a: 2", lambda block: block.whole("a"), "a stands twice"),
        ("a {} a {}", lambda block: block.block("a"), "a stands twice"),
    ],
)
def test_a_field_of_another_sort_is_refused(text: str, read: object, words: str) -> None:
    """With its name, and the value seen."""
    with pytest.raises(ConfigFault, match=words.replace("[", "\\[")):
        read(read_config(text.encode()))  # type: ignore[operator]


@given(st.text("abz_019.-+{}<>[]:,;#'\"\\ \n", max_size=60) | st.text(max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    """By no other error."""
    with contextlib.suppress(ConfigFault):
        assert isinstance(read_config(text.encode("utf-8", "replace")), Block)


@given(st.text("ab:{}[]<>,;'\"\\x1-0 \n#", max_size=24))
def test_what_protobuf_reads_is_read(text: str) -> None:
    """Its own reader of the text format is the measure; unknown fields are no fault of the syntax."""
    text_format = pytest.importorskip("google.protobuf.text_format")
    empty = pytest.importorskip("google.protobuf.empty_pb2")
    try:
        text_format.Parse(text, empty.Empty(), allow_unknown_field=True)
    except (text_format.ParseError, UnicodeDecodeError, ValueError):
        return

    read_config(text.encode())


@given(st.text(max_size=12), st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=4), st.booleans())
def test_what_protobuf_writes_is_read_as_it_was_meant(name: str, numbers: list[int], is_ascii: bool) -> None:
    """Texts of any characters, escaped or not, and numbers."""
    pytest.importorskip("grpc")
    text_format = pytest.importorskip("google.protobuf.text_format")
    from marserve.api.grpc.schema import Schema  # late: only where protobuf is installed

    name = name.encode("utf-8", "replace").decode()
    config = Schema().message("inference.ModelConfig")(name=name)
    config.instance_group.add(name=name, gpus=numbers)
    written = text_format.MessageToString(config, as_utf8=not is_ascii, use_short_repeated_primitives=is_ascii)

    read = read_config(written.encode())

    (group,) = read.blocks("instance_group")
    assert (read.text("name"), group.text("name"), group.wholes("gpus")) == (name, name, numbers)
