"""What a pickle would do, found without doing it. Knows no files, no archives and no torch.

A pickle is a program for a small stack machine. `run` follows it symbolically: it keeps for every value only whether it
is a text, a global (and which), an object made by calling a global, or anything else. So it knows which globals are
imported, also when their names come from the memo, and refuses what would call, or change, something it does not know.

It follows the opcode table of `pickletools` but reads the arguments itself: `genops` loads them into memory, and stops
at some (hexadecimal INT) that the real machine takes, which would hide what comes after. Here a program that fails
would fail, at the same place, in the real machines too: the one in C, and that in Python which some libraries use.
"""

from __future__ import annotations

import pickletools
import re
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO, Literal

_LONGEST_LINE = 1 << 16
_LONGEST_NAME = 512
_LARGEST_MEMO = 10_000_000
_CROSSES = "an opcode crosses the end of its FRAME"
_PLAUSIBLE = re.compile(r"^[\w.]{1,255}$")


class Refused(Exception):
    """The program must not run; the text says why, naming the opcode."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended: at its STOP, or with a `failure` in words. `operations` were followed until then.

    `is_cut`: it failed because the data ended. `is_mistaken`: it failed for want of what it takes from its stack or
    memo, or at a byte that is no opcode, as other data than pickles does. `is_unfinished`: it was not followed to its
    end. `has_noted`: what it imports would have been refused at the next call.
    """

    failure: str | None
    operations: int
    is_cut: bool = False
    is_mistaken: bool = False
    is_unfinished: bool = False
    has_noted: bool = False


class Span:
    """The bytes `start` to `end` of a file that can seek, as a file of their own. Never reads more than is asked."""

    def __init__(self, file: BinaryIO, start: int, end: int) -> None:
        self.file, self.start, self.end = file, start, end
        self._at = start
        self._buffer = b""
        self._used = 0

    def __len__(self) -> int:
        return self.end - self.start

    def tell(self) -> int:
        """Bytes from the start of the span."""
        return self._at - len(self._buffer) + self._used - self.start

    def seek(self, offset: int) -> None:
        """Go to `offset` bytes from the start of the span."""
        self._at, self._buffer, self._used = self.start + offset, b"", 0

    def read(self, size: int) -> bytes:
        """Give `size` bytes, fewer at the end of the span."""
        if len(self._buffer) - self._used < size:
            self._fill(size)
        data = self._buffer[self._used : self._used + size]
        self._used += len(data)
        return data

    def skip(self, size: int) -> bool:
        """Go on by `size` bytes; False when there are not so many."""
        left = len(self._buffer) - self._used
        if size <= left:
            self._used += size
            return True
        at = self.tell() + size
        if at > len(self):
            return False
        self.seek(at)
        return True

    def readline(self) -> bytes | None:
        """A line without its end, None when there is none or it is longer than any name."""
        at = self._buffer.find(b"\n", self._used)
        if at < 0:
            self._fill(_LONGEST_LINE)
            at = self._buffer.find(b"\n", self._used)
        if at < 0:
            return None
        line = self._buffer[self._used : at]
        self._used = at + 1
        return line

    def skip_line(self) -> bool:
        """Go on behind the next end of line, however far; False when there is none."""
        while True:
            at = self._buffer.find(b"\n", self._used)
            if at >= 0:
                self._used = at + 1
                return True
            self._used = len(self._buffer)
            self._fill(1)
            if not self._buffer:
                return False

    def _fill(self, size: int) -> None:
        kept = self._buffer[self._used :]
        self.file.seek(self._at)
        more = self.file.read(min(max(size - len(kept), _LONGEST_LINE), self.end - self._at))
        self._at += len(more)
        self._buffer, self._used = kept + more, 0


@dataclass(frozen=True, slots=True)
class _Text:
    text: str


@dataclass(frozen=True, slots=True)
class _Global:
    name: str


class _Mark:
    pass


_MARK = _Mark()
_OTHER = None
_Value = _Text | _Global | _Mark | None


class _Failed(Exception):
    def __init__(self, text: str, kind: Literal["cut", "mistaken"]) -> None:
        self.kind = kind
        super().__init__(text)


def run(
    span: Span, allows: Callable[[str], bool], *, must_call: bool = False, max_operations: int = 10_000_000
) -> Outcome:
    """Follow the program at the span's position up to its STOP, or to where it fails.

    `allows` is asked for each global, as `module.name`. Raises Refused for a global it does not allow, for INST, OBJ
    and EXT opcodes, and for calling or changing what is no known global. With `must_call`, for data that may be no
    pickle at all, a global is refused only when the program goes on to call something, and its name must be one.
    """
    machine = _Machine(span, allows, must_call)
    while machine.operations < max_operations:
        try:
            if machine.step():
                return Outcome(None, machine.operations, has_noted=machine.has_noted)
        except _Failed as failed:
            return Outcome(
                str(failed),
                machine.operations,
                is_cut=failed.kind == "cut",
                is_mistaken=failed.kind == "mistaken",
                has_noted=machine.has_noted,
            )
    return Outcome(
        f"it has more than {max_operations} operations",
        machine.operations,
        is_unfinished=True,
        has_noted=machine.has_noted,
    )


class _Machine:
    def __init__(self, span: Span, allows: Callable[[str], bool], must_call: bool) -> None:
        self._span, self._allows, self._must_call = span, allows, must_call
        self._stack: list[_Value] = []
        self._memo: dict[int, _Value] = {}
        self._noted: str | None = None
        self._frame_end: int | None = None
        self.operations = 0

    @property
    def has_noted(self) -> bool:
        """Whether something is imported that is not allowed."""
        return self._noted is not None

    def step(self) -> bool:
        """Follow one opcode; True at STOP."""
        code = self._span.read(1)
        if not code:
            raise _Failed("it ends before its STOP", "cut")
        opcode = _OPCODES.get(code)
        if opcode is None:
            raise _Failed(f"the byte {code[0]:#04x} is no opcode", "mistaken")
        if code not in (b"\x80", b"\x95"):  # PROTO and FRAME do nothing
            self.operations += 1
        special = _SPECIAL.get(opcode.name)
        is_end = False
        try:
            if special is not None:
                is_end = special(self, opcode) or False
            else:
                self._skip_argument(opcode)
                self._pop_and_push(opcode)
        except _Failed as failed:
            if self._frame_end is not None and (failed.kind == "cut" or self._span.tell() > self._frame_end):
                raise Refused(_CROSSES) from None  # it fails here, but the real machine reads other bytes
            raise
        if self._frame_end is not None:
            self._leave_frame(is_end)
        return is_end

    # ---------------------------------------------------------------------------------------------------- frames

    def _frame(self, opcode: pickletools.OpcodeInfo) -> None:
        if self._frame_end is not None:
            raise Refused("FRAME begins inside of a frame")
        size = self._span.read(8)
        if len(size) < 8:
            raise _Failed("the argument of FRAME is cut", "cut")
        end = self._span.tell() + int.from_bytes(size, "little")
        if end <= len(self._span):
            self._frame_end = end
        elif not self._must_call:
            # Python's own machine does not mind and goes on, the one in C fails.
            raise Refused("FRAME says it is longer than the file")

    def _leave_frame(self, is_end: bool) -> None:
        """Refuse what does not end with its frame: the real machine then reads on behind the frame, not where it was.

        Bytes that it skips in that way would hide from us what it does next.
        """
        at = self._span.tell()
        assert self._frame_end is not None
        if at > self._frame_end or (is_end and at < self._frame_end):
            raise Refused(
                "an opcode crosses the end of its FRAME" if not is_end else "its FRAME goes on behind its STOP"
            )
        if at == self._frame_end:
            self._frame_end = None

    # ------------------------------------------------------------------------------------------------- arguments

    def _skip_argument(self, opcode: pickletools.OpcodeInfo) -> None:
        argument = opcode.arg
        if argument is None:
            return
        if argument.n >= 0:
            size = argument.n
        elif argument.n == pickletools.UP_TO_NEWLINE:
            if not self._span.skip_line():
                raise _Failed(f"the argument of {opcode.name} is cut", "cut")
            return
        else:
            size = self._length(argument)
        if not self._span.skip(size):
            raise _Failed(f"the argument of {opcode.name} is cut", "cut")

    def _length(self, argument: pickletools.ArgumentDescriptor) -> int:
        width = _WIDTHS[argument.n]
        data = self._span.read(width)
        if len(data) < width:
            raise _Failed("a length is cut", "cut")
        is_signed = argument.n == pickletools.TAKEN_FROM_ARGUMENT4
        length = int.from_bytes(data, "little", signed=is_signed)
        if length < 0:
            raise _Failed("a length is below 0", "mistaken")
        return length

    def _line(self) -> bytes:
        line = self._span.readline()
        if line is None:
            raise _Failed("a line is cut", "cut")
        return line

    def _names(self) -> tuple[str, str]:
        """The two lines of GLOBAL and INST. Python's own machine takes a last line that is cut."""
        try:
            module, name = self._line(), self._line()
        except _Failed as failed:
            if self._must_call:
                raise
            raise Refused(f"a global's name cannot be read to its end: {failed}") from None
        return module.decode(errors="replace"), name.decode(errors="replace")

    def _index(self, opcode: pickletools.OpcodeInfo) -> int:
        argument = opcode.arg
        assert argument is not None
        if argument.n == pickletools.UP_TO_NEWLINE:
            try:
                return int(self._line())
            except ValueError:
                raise _Failed("a memo index is no number", "mistaken") from None
        data = self._span.read(argument.n)
        if len(data) < argument.n:
            raise _Failed("a memo index is cut", "cut")
        return int.from_bytes(data, "little")

    # ----------------------------------------------------------------------------------------------------- stack

    def _pop_and_push(self, opcode: pickletools.OpcodeInfo) -> None:
        before = opcode.stack_before
        if pickletools.markobject in before:
            self._pop_to_mark()
            for _ in range(before.index(pickletools.markobject)):
                self._pop()
        else:
            for _ in before:
                self._pop()
        self._stack.extend([_OTHER] * len(opcode.stack_after))

    def _pop(self) -> _Value:
        if not self._stack or self._stack[-1] is _MARK:
            raise _Failed("its stack is empty", "mistaken")
        return self._stack.pop()

    def _top(self) -> _Value:
        if not self._stack or self._stack[-1] is _MARK:
            raise _Failed("its stack is empty", "mistaken")
        return self._stack[-1]

    def _pop_to_mark(self) -> None:
        while self._stack:
            if self._stack.pop() is _MARK:
                return
        raise _Failed("a mark is missing", "mistaken")

    # ------------------------------------------------------------------------------------------ opcodes, by name

    def _stop(self, opcode: pickletools.OpcodeInfo) -> bool:
        self._pop()
        return True

    def _mark(self, opcode: pickletools.OpcodeInfo) -> None:
        self._stack.append(_MARK)

    def _discard(self, opcode: pickletools.OpcodeInfo) -> None:
        if not self._stack:
            raise _Failed("its stack is empty", "mistaken")
        self._stack.pop()

    def _discard_to_mark(self, opcode: pickletools.OpcodeInfo) -> None:
        self._pop_to_mark()

    def _duplicate(self, opcode: pickletools.OpcodeInfo) -> None:
        self._stack.append(self._top())

    def _push_text(self, opcode: pickletools.OpcodeInfo) -> None:
        argument = opcode.arg
        assert argument is not None
        if argument.n == pickletools.UP_TO_NEWLINE:
            data = self._line()
            encoding = "raw-unicode-escape"
        else:
            size = self._length(argument)
            if size > _LONGEST_NAME:
                if not self._span.skip(size):
                    raise _Failed(f"the argument of {opcode.name} is cut", "cut")
                self._stack.append(_OTHER)  # too long for a name: as one it is refused
                return
            data = self._span.read(size)
            encoding = "utf-8"
            if len(data) < size:
                raise _Failed(f"the argument of {opcode.name} is cut", "cut")
        self._stack.append(_Text(data.decode(encoding, errors="replace")))

    def _put(self, opcode: pickletools.OpcodeInfo) -> None:
        index = self._index(opcode)
        if index > _LARGEST_MEMO and not self._must_call:
            # The machine in C keeps its memo as one list: the number alone would take gigabytes.
            raise Refused(f"{opcode.name} fills place {index} of the memo, further than any pickle needs")
        self._memo[index] = self._top()

    def _memoize(self, opcode: pickletools.OpcodeInfo) -> None:
        self._memo[len(self._memo)] = self._top()

    def _get(self, opcode: pickletools.OpcodeInfo) -> None:
        index = self._index(opcode)
        if index not in self._memo:
            raise _Failed(f"its memo has no {index}", "mistaken")
        self._stack.append(self._memo[index])

    def _global(self, opcode: pickletools.OpcodeInfo) -> None:
        self._import("GLOBAL", *self._names())

    def _stack_global(self, opcode: pickletools.OpcodeInfo) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, _Text) or not isinstance(module, _Text):
            self._note("STACK_GLOBAL imports what is not written out in it")
            self._stack.append(_Global("?"))
            return
        self._import("STACK_GLOBAL", module.text, name.text)

    def _import(self, opcode: str, module: str, name: str) -> None:
        if self._must_call and not (_PLAUSIBLE.match(module) and _PLAUSIBLE.match(name)):
            raise _Failed("a global's name is none", "mistaken")
        # Names of Python 2 mean what the unpickler, and torch's, make of them.
        if (module, name) in NAME_MAPPING:
            module, name = NAME_MAPPING[(module, name)]
        else:
            module = IMPORT_MAPPING.get(module, module)
        full = f"{module}.{name}"
        if not self._allows(full):
            self._note(f"{opcode} names {full[:200]}, which is not allowed in it")
        self._stack.append(_Global(full))

    def _call(self, opcode: pickletools.OpcodeInfo) -> None:
        for _ in range(len(opcode.stack_before) - 1):  # arguments, and keywords of NEWOBJ_EX
            self._pop()
        callee = self._pop()
        self._refuse_noted()
        if not isinstance(callee, _Global):
            if self._must_call:
                raise _Failed(f"{opcode.name} calls what is no global", "mistaken")
            raise Refused(f"{opcode.name} calls what is no global")
        self._stack.append(_OTHER)

    def _build(self, opcode: pickletools.OpcodeInfo) -> None:
        self._pop()
        self._refuse_change(opcode, self._top())

    def _add_one(self, opcode: pickletools.OpcodeInfo) -> None:
        for _ in range(len(opcode.stack_before) - 1):
            self._pop()
        self._refuse_change(opcode, self._top())

    def _add_many(self, opcode: pickletools.OpcodeInfo) -> None:
        self._pop_to_mark()
        self._refuse_change(opcode, self._top())

    def _refuse_change(self, opcode: pickletools.OpcodeInfo, target: _Value) -> None:
        if isinstance(target, _Global):
            self._refuse_noted()
            raise Refused(f"{opcode.name} changes {target.name}")

    def _instance(self, opcode: pickletools.OpcodeInfo) -> None:
        full = ".".join(self._names())
        if self._must_call:
            self._pop_to_mark()
            if not _PLAUSIBLE.match(full):
                raise _Failed("a global's name is none", "mistaken")
        raise Refused(f"INST calls {full[:200]}")

    def _object(self, opcode: pickletools.OpcodeInfo) -> None:
        self._pop_to_mark()
        self._refuse_noted()
        if self._must_call:
            raise _Failed("OBJ calls what is no global", "mistaken")
        raise Refused("OBJ is an opcode that no model needs")

    def _extension(self, opcode: pickletools.OpcodeInfo) -> None:
        if self._must_call:
            raise _Failed("an extension is not registered", "mistaken")
        raise Refused(f"{opcode.name} names a global by a number of the extension registry")

    def _note(self, reason: str) -> None:
        """Refuse, or with `must_call` remember to at the next call."""
        if not self._must_call:
            raise Refused(reason)
        self._noted = self._noted or reason

    def _refuse_noted(self) -> None:
        if self._noted is not None:
            raise Refused(self._noted)


_OPCODES = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}
_WIDTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_SPECIAL: dict[str, Callable[[_Machine, pickletools.OpcodeInfo], bool | None]] = {
    "FRAME": _Machine._frame,
    "STOP": _Machine._stop,
    "MARK": _Machine._mark,
    "POP": _Machine._discard,
    "POP_MARK": _Machine._discard_to_mark,
    "DUP": _Machine._duplicate,
    "UNICODE": _Machine._push_text,
    "SHORT_BINUNICODE": _Machine._push_text,
    "BINUNICODE": _Machine._push_text,
    "BINUNICODE8": _Machine._push_text,
    "PUT": _Machine._put,
    "BINPUT": _Machine._put,
    "LONG_BINPUT": _Machine._put,
    "MEMOIZE": _Machine._memoize,
    "GET": _Machine._get,
    "BINGET": _Machine._get,
    "LONG_BINGET": _Machine._get,
    "GLOBAL": _Machine._global,
    "STACK_GLOBAL": _Machine._stack_global,
    "REDUCE": _Machine._call,
    "NEWOBJ": _Machine._call,
    "NEWOBJ_EX": _Machine._call,
    "BUILD": _Machine._build,
    "APPEND": _Machine._add_one,
    "SETITEM": _Machine._add_one,
    "APPENDS": _Machine._add_many,
    "SETITEMS": _Machine._add_many,
    "ADDITEMS": _Machine._add_many,
    "INST": _Machine._instance,
    "OBJ": _Machine._object,
    "EXT1": _Machine._extension,
    "EXT2": _Machine._extension,
    "EXT4": _Machine._extension,
}
