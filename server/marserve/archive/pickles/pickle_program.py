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
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO, Literal

from marserve.archive.pickles.check_budget import CheckBudget

_BUFFER_BYTES = 1 << 16
_LONGEST_LINE = 1 << 16
_LONGEST_NAME = 512
# Values of 8 bytes each. Pickles of the bound of operations need fewer.
_LARGEST_MEMO = 4_000_000
_LARGEST_STACK = 4_000_000
_LARGEST_GAP = 1024
_MOST_FAR_PLACES = 10_000
_MOST_NAMES = 10_000
_SPENT_TOGETHER = 64
_CROSSES = "an opcode crosses the end of its FRAME"
_WORDS = re.compile(r"[\w.]+")
_LONGEST_WORD = 255  # no file, and so no module, has a longer name
_TOO_LONG = ".…"
_INDEX = re.compile(rb"[\s\d+_-]*")


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
        """Go to `offset` bytes from the start of the span. What is in the buffer is not read again."""
        in_buffer = self.start + offset - (self._at - len(self._buffer))
        if 0 <= in_buffer <= len(self._buffer):
            self._used = in_buffer
        else:
            self._at, self._buffer, self._used = self.start + offset, b"", 0

    def look(self, offset: int, size: int) -> bytes:
        """Give up to `size` bytes from `offset` on; the position stays."""
        self.file.seek(self.start + offset)
        return self.file.read(max(0, min(size, len(self) - offset)))

    def read(self, size: int) -> bytes:
        """Give `size` bytes, fewer at the end of the span."""
        if len(self._buffer) - self._used < size:
            self._fill(size)
        data = self._buffer[self._used : self._used + size]
        self._used += len(data)
        return data

    def next_byte(self) -> int:
        """The next byte, -1 at the end of the span."""
        if self._used == len(self._buffer):
            self._fill(1)
            if not self._buffer:
                return -1
        self._used += 1
        return self._buffer[self._used - 1]

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

    def readline(self, longest: int = _LONGEST_LINE) -> tuple[bytes, bool] | None:
        """A line without its end, and whether that is all of it: of one that is longer than `longest`, its beginning.

        None, and the position stays, where the data ends before the line does.
        """
        at = self._buffer.find(b"\n", self._used, self._used + longest + 1)
        if at < 0 and len(self._buffer) - self._used <= longest:
            self._fill(longest + 1)
            at = self._buffer.find(b"\n", self._used, self._used + longest + 1)
        if at >= 0:
            line = self._buffer[self._used : at]
            self._used = at + 1
            return line, True
        line, begin = self._buffer[self._used : self._used + longest], self.tell()
        if self.skip_line():
            return line, False
        self.seek(begin)
        return None

    def skip_line(self) -> bool:
        """Go on behind the next end of line, however far; False without a further one."""
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
        more = self.file.read(min(max(size - len(kept), _BUFFER_BYTES), self.end - self._at))
        self._at += len(more)
        self._buffer, self._used = kept + more, 0


# Values are numbers, so that a million of them take 8 MB: a kind, and above it where a text stands in the file, or
# which name a global has.
_OTHER, _MARK, _TEXT, _GLOBAL = range(4)
_KIND_BITS = 2
_KIND = (1 << _KIND_BITS) - 1
_ABSENT = -1


class _Failed(Exception):
    def __init__(self, text: str, kind: Literal["cut", "mistaken"]) -> None:
        self.kind = kind
        super().__init__(text)


def run(
    span: Span,
    allows: Callable[[str], bool],
    *,
    must_call: bool = False,
    max_operations: int | None = None,
    budget: CheckBudget | None = None,
) -> Outcome:
    """Follow the program at the span's position up to its STOP, or to where it fails.

    `allows` is asked for each global, as `module.name`. Raises Refused for a global it does not allow, for INST, OBJ
    and EXT opcodes, and for calling or changing what is no known global. With `must_call`, for data that may be no
    pickle at all, a global is refused only when the program goes on to call something, and its name must be one.
    Each opcode is counted in the `budget`, which may end it with Overspent or CheckStopped.
    """
    budget = budget or CheckBudget()
    machine = _Machine(span, allows, must_call, budget)
    spent = 0
    while max_operations is None or machine.steps < max_operations:
        if machine.steps >= spent + _SPENT_TOGETHER:
            budget.spend(machine.steps - spent)
            spent = machine.steps
        try:
            if machine.step():
                budget.spend(machine.steps - spent)
                return Outcome(None, machine.operations, has_noted=machine.has_noted)
        except _Failed as failed:
            budget.spend(machine.steps - spent)
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


class _Memo:
    """The memo: places that follow each other in an array, the few that lie far out beside it."""

    def __init__(self) -> None:
        self._near = array("q")
        self._far: dict[int, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def get(self, index: int) -> int:
        """The value there, `_ABSENT` where none was put."""
        if 0 <= index < len(self._near):
            return self._near[index]
        return self._far.get(index, _ABSENT)

    def put(self, index: int, value: int) -> bool:
        """Whether there is room for it."""
        near = self._near
        if index == len(near) < _LARGEST_MEMO and not self._far:
            near.append(value)
            self._count += 1
            return True
        if index < len(near):
            self._count += near[index] == _ABSENT
            near[index] = value
            return True
        is_known = index in self._far
        if not is_known and len(near) <= index < min(_LARGEST_MEMO, 2 * len(near) + _LARGEST_GAP):
            self._reach(index)
            self._count += near[index] == _ABSENT
            near[index] = value
            return True
        self._count += not is_known
        self._far[index] = value
        return len(self._far) <= _MOST_FAR_PLACES

    def _reach(self, index: int) -> None:
        """Make the array as long as it must be, with what lay far out until now."""
        near, first = self._near, len(self._near)
        if index == first:
            near.append(_ABSENT)
        else:
            near.extend(array("q", [_ABSENT]) * (index + 1 - first))
        if self._far:
            for each in [each for each in self._far if each < len(near)]:
                near[each] = self._far.pop(each)


class _Machine:
    def __init__(self, span: Span, allows: Callable[[str], bool], must_call: bool, budget: CheckBudget) -> None:
        self._span, self._allows, self._must_call, self._budget = span, allows, must_call, budget
        self._stack = array("q")
        self._memo = _Memo()
        self._names_of_globals: list[str] = []
        self._numbers_of_globals: dict[str, int] = {}
        self._noted: str | None = None
        self._frame_end: int | None = None
        self.operations = 0
        self.steps = 0

    @property
    def has_noted(self) -> bool:
        """Whether something is imported that is not allowed."""
        return self._noted is not None

    def step(self) -> bool:
        """Follow one opcode; True at STOP."""
        code = self._span.next_byte()
        if code < 0:
            raise _Failed("it ends before its STOP", "cut")
        known = _TABLE[code]
        if known is None:
            raise _Failed(f"the byte {code:#04x} is no opcode", "mistaken")
        opcode, special, pushes = known
        self.steps += 1
        if code not in (0x80, 0x95):  # PROTO and FRAME do nothing
            self.operations += 1
        is_end = False
        try:
            if special is not None:
                is_end = special(self, opcode) or False
            elif pushes:
                self._skip_argument(opcode)
                self._stack.append(_OTHER)
            else:
                self._skip_argument(opcode)
                self._pop_and_push(opcode)
        except _Failed as failed:
            if self._frame_end is not None and (failed.kind == "cut" or self._span.tell() > self._frame_end):
                raise Refused(_CROSSES) from None  # it fails here, but the real machine reads other bytes
            raise
        if self._frame_end is not None:
            self._leave_frame(is_end)
        if len(self._stack) > _LARGEST_STACK:
            raise Refused(f"it holds more than {_LARGEST_STACK} values at once, which cannot be followed")
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

    def _line(self, longest: int = _LONGEST_LINE) -> tuple[bytes, bool]:
        """A line, and whether that is all of it."""
        line = self._span.readline(longest)
        if line is None:
            raise _Failed("a line is cut", "cut")
        return line

    def _names(self) -> tuple[str, str]:
        """The two lines of GLOBAL and INST. Python's own machine takes a last line that is cut."""
        try:
            module, is_whole_module = self._line()
            name, is_whole_name = self._line()
        except _Failed as failed:
            if self._must_call:
                raise
            raise Refused(f"a global's name cannot be read to its end: {failed}") from None
        if is_whole_module and is_whole_name:
            return module.decode(errors="replace"), name.decode(errors="replace")
        # Judged by its beginning, and refused by its end as a name that is too long.
        return module.decode(errors="ignore"), name.decode(errors="ignore") + _TOO_LONG

    def _index(self, opcode: pickletools.OpcodeInfo) -> int:
        argument = opcode.arg
        assert argument is not None
        if argument.n == pickletools.UP_TO_NEWLINE:
            return self._written_index(opcode)
        data = self._span.read(argument.n)
        if len(data) < argument.n:
            raise _Failed("a memo index is cut", "cut")
        return int.from_bytes(data, "little")

    def _written_index(self, opcode: pickletools.OpcodeInfo) -> int:
        """An index in digits. The machine in C reads up to a zero byte, and steps over blanks, however many."""
        line, is_whole = self._line()
        line, zero, _ = line.partition(b"\0")
        if not is_whole and not zero and _INDEX.fullmatch(line):
            raise Refused(f"the memo index of {opcode.name} is too long to be followed")
        try:
            return int(line)
        except ValueError:
            raise _Failed("a memo index is no number", "mistaken") from None

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

    def _pop(self) -> int:
        if not self._stack or self._stack[-1] == _MARK:
            raise _Failed("its stack is empty", "mistaken")
        return self._stack.pop()

    def _top(self) -> int:
        if not self._stack or self._stack[-1] == _MARK:
            raise _Failed("its stack is empty", "mistaken")
        return self._stack[-1]

    def _pop_to_mark(self) -> None:
        while self._stack:
            if self._stack.pop() == _MARK:
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
        start = self._span.tell()
        if argument.n == pickletools.UP_TO_NEWLINE:
            _, is_whole = self._line(_LONGEST_NAME)
            value = start << _KIND_BITS | _TEXT if is_whole else _OTHER
        else:
            size = self._length(argument)
            if not self._span.skip(size):
                raise _Failed(f"the argument of {opcode.name} is cut", "cut")
            value = start << _KIND_BITS | _TEXT if size <= _LONGEST_NAME else _OTHER
        self._stack.append(value)  # what is too long for a name is refused as one

    def _text(self, value: int) -> str:
        """The text of a value that is one. Texts are not kept: they are read again where they become names."""
        start = value >> _KIND_BITS
        self._budget.spend(8)
        data = self._span.look(start - 1, 1 + 8 + _LONGEST_NAME)
        argument = _OPCODES[data[:1]].arg
        assert argument is not None
        if argument.n == pickletools.UP_TO_NEWLINE:
            return data[1 : data.index(b"\n")].decode("raw-unicode-escape", errors="replace")
        begin = 1 + _WIDTHS[argument.n]
        length = int.from_bytes(data[1:begin], "little")
        return data[begin : begin + length].decode(errors="replace")

    def _put(self, opcode: pickletools.OpcodeInfo) -> None:
        index = self._index(opcode)
        value = self._top()
        if index < 0:
            raise _Failed("a memo index is below 0", "mistaken")
        if index > _LARGEST_MEMO and not self._must_call:
            # The machine in C keeps its memo as one list: the number alone would take gigabytes.
            raise Refused(f"{opcode.name} fills place {index} of the memo, further than any pickle needs")
        self._memoize_at(opcode, index, value)

    def _memoize(self, opcode: pickletools.OpcodeInfo) -> None:
        self._memoize_at(opcode, len(self._memo), self._top())

    def _memoize_at(self, opcode: pickletools.OpcodeInfo, index: int, value: int) -> None:
        if not self._memo.put(index, value):
            raise Refused(f"{opcode.name} fills place {index} of the memo, and too many others to be followed")

    def _get(self, opcode: pickletools.OpcodeInfo) -> None:
        index = self._index(opcode)
        value = self._memo.get(index)
        if value == _ABSENT:
            raise _Failed(f"its memo has no {index}", "mistaken")
        self._stack.append(value)

    def _global(self, opcode: pickletools.OpcodeInfo) -> None:
        self._import("GLOBAL", *self._names())

    def _stack_global(self, opcode: pickletools.OpcodeInfo) -> None:
        name, module = self._pop(), self._pop()
        if name & _KIND != _TEXT or module & _KIND != _TEXT:
            self._note("STACK_GLOBAL imports what is not written out in it")
            self._push_global("?")
            return
        self._import("STACK_GLOBAL", self._text(module), self._text(name))

    def _import(self, opcode: str, module: str, name: str) -> None:
        if self._must_call and not (_is_plausible(module) and _is_plausible(name.removesuffix(_TOO_LONG))):
            raise _Failed("a global's name is no name", "mistaken")
        # Names of Python 2 mean what the unpickler, and torch's, make of them.
        if (module, name) in NAME_MAPPING:
            module, name = NAME_MAPPING[(module, name)]
        else:
            module = IMPORT_MAPPING.get(module, module)
        full = f"{module}.{name}"
        if not self._allows(full):
            self._note(f"{opcode} names {full[:200]}, which is not allowed in it")
        self._push_global(full)

    def _push_global(self, name: str) -> None:
        """Of very many names only the first are kept for the messages."""
        number = self._numbers_of_globals.get(name)
        if number is None:
            number = len(self._names_of_globals) if len(self._names_of_globals) < _MOST_NAMES else 0
            if number == len(self._names_of_globals):
                name = name[:200]
                self._names_of_globals.append(name)
                self._numbers_of_globals[name] = number
        self._stack.append(number << _KIND_BITS | _GLOBAL)

    def _call(self, opcode: pickletools.OpcodeInfo) -> None:
        for _ in range(len(opcode.stack_before) - 1):  # arguments, and keywords of NEWOBJ_EX
            self._pop()
        callee = self._pop()
        self._refuse_noted()
        if callee & _KIND != _GLOBAL:
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

    def _refuse_change(self, opcode: pickletools.OpcodeInfo, target: int) -> None:
        if target & _KIND == _GLOBAL:
            self._refuse_noted()
            raise Refused(f"{opcode.name} changes {self._names_of_globals[target >> _KIND_BITS]}")

    def _instance(self, opcode: pickletools.OpcodeInfo) -> None:
        full = ".".join(self._names())
        if self._must_call:
            self._pop_to_mark()
            if not _is_plausible(full.removesuffix(_TOO_LONG)):
                raise _Failed("a global's name is no name", "mistaken")
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


def _is_plausible(name: str) -> bool:
    """Whether it can be a module's or a global's: words with dots between them, however many."""
    return _WORDS.fullmatch(name) is not None and max(map(len, name.split("."))) <= _LONGEST_WORD


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
# By byte: the opcode, how it is followed where its stack does not say it, and whether it only pushes a value.
_TABLE = [
    (each, _SPECIAL.get(each.name), not each.stack_before and len(each.stack_after) == 1) if each is not None else None
    for each in (_OPCODES.get(bytes([code])) for code in range(256))
]
