"""Documents of an archive (YAML, JSON) as msgpack can carry them, and back: a date stays a date.

msgpack has no dates, sets or tuples, no integers beyond 64 bits, no text with lone surrogates, and `messages.py` takes
maps with words as keys alone. Such values travel as extensions; everything else is as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime
from typing import Any, Final

import msgspec
from msgspec.msgpack import Ext

# What an extension holds.
_DATE, _DATE_AND_TIME, _INTEGER, _TEXT, _MAP, _SET, _TUPLE = range(1, 8)
_AS_IT_IS: Final = frozenset((type(None), bool, float, bytes))
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1
_decode = msgspec.msgpack.Decoder().decode
_encode = msgspec.msgpack.Encoder().encode


def pack(value: Any) -> Any:
    """The value as a message may hold it. A value of another type than YAML and JSON have is left as it is."""
    kind = type(value)
    if kind is str:
        return value if _is_encodable(value) else Ext(_TEXT, value.encode("utf-8", "surrogatepass"))
    if kind in _AS_IT_IS:
        return value
    if kind is int:
        return value if _LEAST <= value <= _MOST else Ext(_INTEGER, f"{value:x}".encode())
    if kind is dict:
        if all(type(key) is str and _is_encodable(key) for key in value):
            return {key: pack(each) for key, each in value.items()}
        return Ext(_MAP, _encode([[pack(key), pack(each)] for key, each in value.items()]))
    if kind is list:
        return [pack(each) for each in value]
    if kind is tuple or kind is set:
        return Ext(_TUPLE if kind is tuple else _SET, _encode([pack(each) for each in value]))
    if kind is date or kind is datetime:
        return Ext(_DATE if kind is date else _DATE_AND_TIME, value.isoformat().encode())
    return value


def unpack(value: Any) -> Any:
    """What `pack` was given."""
    kind = type(value)
    if kind is dict:
        return {key: unpack(each) for key, each in value.items()}
    if kind is list:
        return [unpack(each) for each in value]
    if kind is Ext:
        return _UNPACK[value.code](bytes(value.data))
    return value


_UNPACK: Final[dict[int, Callable[[bytes], Any]]] = {
    _DATE: lambda data: date.fromisoformat(data.decode()),
    _DATE_AND_TIME: lambda data: datetime.fromisoformat(data.decode()),
    _INTEGER: lambda data: int(data, 16),
    _TEXT: lambda data: data.decode("utf-8", "surrogatepass"),
    _MAP: lambda data: {unpack(key): unpack(each) for key, each in _decode(data)},
    _SET: lambda data: {unpack(each) for each in _decode(data)},
    _TUPLE: lambda data: tuple(unpack(each) for each in _decode(data)),
}


def _is_encodable(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
