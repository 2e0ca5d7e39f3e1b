"""Reads `config.pbtxt`, protobuf's text format, as a tree: fields with their line and column. Pure.

protobuf's own reader says neither where a field stands nor which fields it passed over, and the report needs both; so
the syntax is read here, and the tests hold it against protobuf's. The names of fields are their readers' business: what
no reader has asked for is `unread`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

MOST_BYTES: Final = 1 << 20
MOST_DEPTH: Final = 32

_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    |(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<word>(?:-\s*)?[A-Za-z0-9_.][A-Za-z0-9_.+\-]*)
    |(?P<sign>[{}<>\[\]:,;])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|[xX]([0-9A-Fa-f]{1,2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_ESCAPED: Final = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_PLAIN_ESCAPES: Final = "\\'\"?"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WHOLE = re.compile(r"-?(?:0[xX][0-9A-Fa-f]+|0[0-7]*|[1-9][0-9]*)")
_FLAGS: Final = {
    "true": True,
    "True": True,
    "t": True,
    "1": True,
    "false": False,
    "False": False,
    "f": False,
    "0": False,
}


class ConfigFault(ValueError):
    """The text cannot be read, or a field has a wrong value; `line` and `column` count from 1."""

    def __init__(self, line: int, column: int, sentence: str) -> None:
        super().__init__(sentence)
        self.line, self.column, self.sentence = line, column, sentence


@dataclass(frozen=True, slots=True)
class Token:
    """One token: its sort (`text`, `word`, `sign`, `end`), its characters (a text's value), and its place."""

    kind: str
    value: str
    line: int
    column: int

    @property
    def words(self) -> str:
        """The token for messages."""
        return "the end of the file" if self.kind == "end" else repr(self.value[:60])

    def fault(self, sentence: str) -> ConfigFault:
        """A fault at this place."""
        return ConfigFault(self.line, self.column, sentence)


class Block:
    """A message: its fields in order. The methods read a field by its name, and raise ConfigFault for a wrong value."""

    def __init__(self, line: int = 1, column: int = 1) -> None:
        self.line, self.column = line, column
        self._fields: dict[str, list[tuple[Token, Token | Block]]] = {}
        self._read: set[str] = set()

    def add(self, name: Token, value: Token | Block) -> None:
        """Add one value of a field."""
        self._fields.setdefault(name.value, []).append((name, value))

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def line_of(self, name: str) -> int:
        """The line of a field; that of the message without one."""
        return self._fields[name][0][0].line if name in self._fields else self.line

    def text(self, name: str, default: str = "") -> str:
        """A field that is text."""
        token = self._one_token(name)
        if token is None:
            return default
        if token.kind != "text":
            raise token.fault(f"{name} is {token.words}; it must be text in quotes")
        return token.value

    def whole(self, name: str, default: int = 0, *, least: int = -(1 << 63)) -> int:
        """A field that is a whole number of `least` or more."""
        token = self._one_token(name)
        return default if token is None else _whole(name, token, least)

    def wholes(self, name: str) -> list[int]:
        """A repeated field of whole numbers."""
        return [_whole(name, token, -(1 << 63)) for token in self._tokens(name)]

    def flag(self, name: str) -> bool:
        """A field that is true or false; without one false."""
        token = self._one_token(name)
        if token is None:
            return False
        if token.kind != "word" or token.value not in _FLAGS:
            raise token.fault(f"{name} is {token.words}; it must be true or false")
        return _FLAGS[token.value]

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """A field that is one of these words, or its number; without one the first of them."""
        token = self._one_token(name)
        if token is None:
            return choices[0]
        if token.kind == "word" and token.value in choices:
            return token.value
        if token.kind == "word" and token.value.isdecimal() and int(token.value) < len(choices):
            return choices[int(token.value)]
        raise token.fault(f"{name} is {token.words}; it must be one of {', '.join(choices)}")

    def block(self, name: str) -> Block | None:
        """A field that is a message; None without one."""
        found = self.blocks(name)
        if len(found) > 1:
            raise ConfigFault(found[1].line, found[1].column, f"{name} stands twice")
        return found[0] if found else None

    def blocks(self, name: str) -> list[Block]:
        """A repeated field of messages."""
        self._read.add(name)
        found: list[Block] = []
        for _, value in self._fields.get(name, ()):
            if isinstance(value, Token):
                raise value.fault(f"{name} is {value.words}; it must be a message in braces")
            found.append(value)
        return found

    def entries(self, name: str) -> dict[str, Block]:
        """A map field whose keys are text, or numbers, and whose entries have a message as `value`."""
        found: dict[str, Block] = {}
        for entry in self.blocks(name):
            token = entry._one_token("key")
            found["" if token is None else token.value] = entry
        return found

    def unread(self, before: str = "") -> Iterator[tuple[str, int]]:
        """The fields that were not asked for, by their dotted names, and their lines."""
        for name, values in self._fields.items():
            path = f"{before}{name}"
            if name not in self._read:
                yield path, values[0][0].line
                continue
            for _, value in values:
                if isinstance(value, Block):
                    yield from value.unread(f"{path}.")

    def skip(self, name: str) -> None:
        """Count a field, with all that is in it, as read."""
        self._read.add(name)
        for _, value in self._fields.get(name, ()):
            if isinstance(value, Block):
                for inner in value._fields:
                    value.skip(inner)

    def _tokens(self, name: str) -> list[Token]:
        self._read.add(name)
        found: list[Token] = []
        for field, value in self._fields.get(name, ()):
            if isinstance(value, Block):
                raise field.fault(f"{name} is a message; it must be a plain value")
            found.append(value)
        return found

    def _one_token(self, name: str) -> Token | None:
        found = self._tokens(name)
        if len(found) > 1:
            raise found[1].fault(f"{name} stands twice")
        return found[0] if found else None


def read_config(data: bytes) -> Block:
    """The tree of a file's bytes. Raises ConfigFault."""
    if len(data) > MOST_BYTES:
        raise ConfigFault(1, 1, f"it has {len(data)} bytes or more, and may have {MOST_BYTES}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise ConfigFault(line, column, f"the byte 0x{data[error.start]:02X} is no UTF-8") from None
    return _Reader(list(_tokens(text))).message(Block(), "", 0)


def _tokens(text: str) -> Iterator[Token]:
    at, line, begin = 0, 1, 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        column = at - begin + 1
        if found is None:
            is_text = text[at] in "\"'"
            what = "this text has no end on its line" if is_text else f"{text[at]!r} cannot stand here"
            raise ConfigFault(line, column, what)
        kind = str(found.lastgroup)
        if kind == "text":
            yield Token(kind, _decoded(found[0][1:-1], line, column), line, column)
        elif kind != "space":
            yield Token(kind, "".join(found[0].split()), line, column)
        newlines = found[0].count("\n")
        if newlines:
            line, begin = line + newlines, at + found[0].rindex("\n") + 1
        at = found.end()
    yield Token("end", "", line, at - begin + 1)


def _decoded(text: str, line: int, column: int) -> str:
    if "\\" not in text:
        return text

    def replace(found: re.Match[str]) -> str:
        octal, hexadecimal, short, long, other = found.groups()
        if octal or hexadecimal:
            return (
                chr(0xDC00 + value) if (value := int(octal or hexadecimal, 8 if octal else 16)) > 0x7F else chr(value)
            )
        if short or long:
            number = int(short or long, 16)
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                raise ConfigFault(line, column, f"{found[0]!r} is no character")
            return chr(number)
        if other in _ESCAPED or other in _PLAIN_ESCAPES:
            return _ESCAPED.get(other, other)
        raise ConfigFault(line, column, f"{found[0]!r} is no escape")

    try:
        # Bytes above 127 stand as half surrogates until here, and are UTF-8 together.
        return _ESCAPE.sub(replace, text).encode("utf-8", "surrogateescape").decode()
    except UnicodeError:
        raise ConfigFault(line, column, "the escaped bytes of this text are no UTF-8") from None


class _Reader:
    """Tokens to messages."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._at = 0

    def message(self, block: Block, end: str, depth: int) -> Block:
        """Read fields into `block` up to the sign `end`, which is taken too; empty for the end of the file."""
        while True:
            token = self._take()
            if (token.kind == "end" and not end) or (token.kind == "sign" and token.value == end and end):
                return block
            name = self._name(token)
            has_colon = self._skip(":")
            self._values(block, name, depth, has_colon=has_colon)
            self._skip(",") or self._skip(";")

    def _name(self, token: Token) -> Token:
        if token.kind == "word" and _NAME.fullmatch(token.value):
            return token
        if token.kind == "sign" and token.value == "[":  # an extension, which none of Triton's messages has
            words = []
            while (part := self._take()).value != "]" or part.kind != "sign":
                if part.kind != "word":
                    raise part.fault(f"{part.words} stands where the name of an extension should")
                words.append(part.value)
            return Token("word", f"[{''.join(words)}]", token.line, token.column)
        raise token.fault(f"{token.words} stands where the name of a field should")

    def _values(self, block: Block, name: Token, depth: int, *, has_colon: bool) -> None:
        if not self._skip("["):
            block.add(name, self._value(name, depth, has_colon=has_colon))
            return
        if self._skip("]"):
            return
        while True:
            block.add(name, self._value(name, depth, has_colon=has_colon))
            if self._skip("]"):
                return
            if not self._skip(","):
                token = self._take()
                raise token.fault(f"{token.words} stands where a comma or ] should, in {name.value}")

    def _value(self, name: Token, depth: int, *, has_colon: bool) -> Token | Block:
        token = self._take()
        if token.kind == "sign" and token.value in "{<":
            if depth >= MOST_DEPTH:
                raise token.fault(f"messages are nested more than {MOST_DEPTH} deep")
            return self.message(Block(token.line, token.column), "}" if token.value == "{" else ">", depth + 1)
        if token.kind in ("text", "word"):
            if not has_colon:
                raise token.fault(f"{token.words} stands where a colon should, after {name.value}")
            return self._joined(token) if token.kind == "text" else token
        raise token.fault(f"{token.words} stands where the value of {name.value} should")

    def _joined(self, token: Token) -> Token:
        """A text with those that follow it at once, which are one with it."""
        value = token.value
        while self._tokens[self._at].kind == "text":
            value += self._take().value
        return Token("text", value, token.line, token.column)

    def _take(self) -> Token:
        token = self._tokens[self._at]
        self._at = min(self._at + 1, len(self._tokens) - 1)
        return token

    def _skip(self, sign: str) -> bool:
        token = self._tokens[self._at]
        if token.kind == "sign" and token.value == sign:
            self._at += 1
            return True
        return False


def _whole(name: str, token: Token, least: int) -> int:
    if token.kind != "word" or not _WHOLE.fullmatch(token.value):
        raise token.fault(f"{name} is {token.words}; it must be a whole number")
    digits = token.value.lstrip("-")
    base = 16 if digits[:2] in ("0x", "0X") else 8 if digits.startswith("0") else 10
    # int() of very many digits would take long, or raise.
    number = int(digits, base) if len(digits) <= 24 else 1 << 64
    number = -number if token.value.startswith("-") else number
    if not max(least, -(1 << 63)) <= number < 1 << 64:
        raise token.fault(f"{name} is {token.value[:60]}; it must be a whole number of {least} or more, in 64 bits")
    return number
