"""Sentences for people that carry, beside the text, what code asks of them: no reader takes the text apart. Pure."""

from __future__ import annotations


class Place(str):
    """Where a value was written: `config.properties, line 14`, `--models`. `line` is 0 where the place has no lines."""

    line: int = 0

    @classmethod
    def in_file(cls, file: str, line: int) -> Place:
        """A line of a file, counted from 1."""
        made = cls(f"{file}, line {line}")
        made.line = line
        return made


class Remark(str):
    """A sentence about a value that was read.

    `key` names the option, `source` the place that stands in brackets at the end of the text. `line` is 0 where it is
    not known. `is_wrong`: the value cannot be used, and the default counts.
    """

    sentence: str
    source: str
    key: str
    line: int
    is_wrong: bool

    def __new__(
        cls, sentence: str, *, source: str = "", key: str = "", line: int = 0, is_wrong: bool = False
    ) -> Remark:
        """Make the text of the sentence and its source."""
        made = super().__new__(cls, f"{sentence} ({source})" if source else sentence)
        made.sentence, made.source, made.key, made.line, made.is_wrong = sentence, source, key, line, is_wrong
        return made

    def said_at(self, source: str) -> Remark:
        """The same with another word for its source."""
        return Remark(self.sentence, source=source, key=self.key, line=self.line, is_wrong=self.is_wrong)
