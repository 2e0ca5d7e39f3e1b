"""The values of a pickle, built without its classes: a global is its name, an object what it was built with. Pure.

Only what `pickle.dump` of Python 3 writes for plain data and objects of data classes is understood. Maps are kept as
pairs: nothing is hashed and nothing compared, so that values nested without end do no harm. Which globals a pickle may
name is judged before, by `pickle_program`.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass, field
from typing import Any


class NotPlain(Exception):
    """The pickle is not one of plain data; the text says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Name:
    """A global, as `module.name`."""

    full: str


@dataclass(slots=True, eq=False)
class Built:
    """An object: what was called, with which arguments, and the state it was given."""

    callee: Name
    arguments: tuple[Any, ...]
    state: Any = None


@dataclass(slots=True, eq=False)
class Pairs:
    """A map as it was filled: the same key may be in it twice."""

    items: list[tuple[Any, Any]] = field(default_factory=list)


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_PUSHED = frozenset(
    [
        *_CONSTANTS,
        *("INT", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
        *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES"),
    ]
)
_EMPTY: dict[str, Any] = {"EMPTY_LIST": list, "EMPTY_DICT": Pairs, "EMPTY_TUPLE": tuple}


def read_values(data: bytes) -> Any:
    """The value that the pickle makes. Raises NotPlain."""
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.stack.pop()
            machine.step(opcode.name, argument)
    except NotPlain:
        raise
    except (ValueError, IndexError, KeyError, AttributeError, TypeError, OverflowError) as error:
        raise NotPlain(f"it cannot be read to its end ({type(error).__name__})") from None
    raise NotPlain("it has no end")


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _PUSHED:
            stack.append(_CONSTANTS.get(name, argument))
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "MARK":
            self._below.append(stack)
            self.stack = []
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            self._take_tuple(int(name[-1]))
        elif name == "TUPLE":
            self._pop_to_mark(tuple)
        elif name == "STACK_GLOBAL":
            last, first = stack.pop(), stack.pop()
            stack.append(Name(f"{_text(first)}.{_text(last)}"))
        elif name == "GLOBAL":
            stack.append(Name(argument.replace(" ", ".", 1)))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, callee = stack.pop(), stack.pop()
            if not isinstance(callee, Name) or not isinstance(arguments, tuple):
                raise NotPlain(f"{name} calls what is no global")
            stack.append(Built(callee, arguments))
        elif name == "BUILD":
            state, built = stack.pop(), stack[-1]
            if not isinstance(built, Built) or built.state is not None:
                raise NotPlain("BUILD changes what is no new object")
            built.state = state
        else:
            self._fill(name)

    def _take_tuple(self, length: int) -> None:
        if len(self.stack) < length:
            raise NotPlain("its stack is too short")
        taken = tuple(self.stack[-length:])
        self.stack[-length:] = [taken]

    def _pop_to_mark(self, kind: Any) -> None:
        above, self.stack = self.stack, self._below.pop()
        self.stack.append(kind(above))

    def _fill(self, name: str) -> None:
        """Put what was pushed last into a list or a map."""
        if name in ("APPEND", "SETITEM"):
            length = 1 if name == "APPEND" else 2
            if len(self.stack) <= length:
                raise NotPlain("its stack is too short")
            values = self.stack[-length:]
            del self.stack[-length:]
        elif name in ("APPENDS", "SETITEMS"):
            values, self.stack = self.stack, self._below.pop()
        elif name in ("PROTO", "FRAME"):
            return
        else:
            raise NotPlain(f"its opcode {name} is not one of plain data")
        target = self.stack[-1]
        if name.startswith("APPEND"):
            if type(target) is not list:
                raise NotPlain(f"{name} changes what is no list")
            target.extend(values)
        elif not isinstance(target, Pairs) or len(values) % 2:
            raise NotPlain(f"{name} changes what is no map")
        else:
            target.items.extend(zip(values[::2], values[1::2], strict=True))


def _text(value: Any) -> str:
    if type(value) is not str:
        raise NotPlain("a global's name is no text")
    return value
