"""Reading a pickle's opcodes before Python's unpickler does, to find what would exhaust it.

The unpickler trusts a pickle in ways that cost more than the pickle's bytes: it makes room for a memo of any size, and
it hashes keys, which takes time and stack for tuples of tuples, the more so if these share their parts. Here the
opcodes are followed with a size for each value instead of the value, so that such a pickle is refused.

    memo        a place beyond the number of bytes is asked for by no pickle that was written
    size        of a value, if all that it shares were copied; of keys and arguments it is bounded in all
    depth       of tuples within each other
"""

from __future__ import annotations

import struct
from typing import IO, Any, Final

from terrazzo.errors import CheckpointCorruptError

_CHUNK: Final = 64 << 10
_AHEAD: Final = 9  # bytes of an opcode and its argument or length
_DEEPEST: Final = 1000
_COSTS: Final = 64  # of hashing, in elements for each byte of the pickle

# What an opcode does to the stack; and the bytes of its argument, or minus the bytes that hold its length.
(
    _PUSH,
    _MARK,
    _POP,
    _POP_MARK,
    _DUP,
    _STOP,
    _NEW,
    _FROM_MARK,
    _TUPLE,
    _APPEND,
    _APPENDS,
    _SET,
    _SETS,
    _PUT,
    _GET,
    _CALL,
) = range(16)
_NOTHING, _LINES, _MEMOIZE, _PUT_LINE, _GET_LINE, _ADD_ITEMS, _PERSISTENT, _INSTANCE = range(16, 24)

_OPCODES: Final[dict[int, tuple[int, int]]] = {
    **{ord(c): (_PUSH, n) for c, n in zip("NKMJG", (0, 1, 2, 4, 8), strict=True)},
    **dict.fromkeys((136, 137, 151), (_PUSH, 0)),
    **{c: (_PUSH, n) for c, n in ((0x82, 1), (0x83, 2), (0x84, 4))},
    **dict.fromkeys((ord("U"), ord("C"), 140, 138), (_PUSH, -1)),
    **dict.fromkeys((ord("T"), ord("B"), ord("X"), 139), (_PUSH, -4)),
    **dict.fromkeys((141, 142, 150), (_PUSH, -8)),
    **{ord(c): (_LINES, 1) for c in "ILFSVP"},
    ord("c"): (_LINES, 2),
    ord("i"): (_INSTANCE, 2),
    ord("o"): (_FROM_MARK, 0),
    ord("("): (_MARK, 0),
    ord("0"): (_POP, 0),
    ord("1"): (_POP_MARK, 0),
    ord("2"): (_DUP, 0),
    ord("."): (_STOP, 0),
    **dict.fromkeys((ord("]"), ord("}"), ord(")"), 143), (_NEW, 0)),
    **dict.fromkeys((ord("l"), ord("d"), ord("t"), 145), (_FROM_MARK, 0)),
    **{0x84 + n: (_TUPLE, 0) for n in (1, 2, 3)},
    ord("a"): (_APPEND, 0),
    ord("e"): (_APPENDS, 0),
    0x90: (_ADD_ITEMS, 0),
    ord("s"): (_SET, 0),
    ord("u"): (_SETS, 0),
    ord("q"): (_PUT, 1),
    ord("r"): (_PUT, 4),
    0x94: (_MEMOIZE, 0),
    ord("p"): (_PUT_LINE, 0),
    ord("h"): (_GET, 1),
    ord("j"): (_GET, 4),
    ord("g"): (_GET_LINE, 0),
    ord("R"): (_CALL, 2),
    ord("b"): (_CALL, 2),
    0x81: (_CALL, 2),
    0x92: (_CALL, 3),
    0x93: (_CALL, 2),
    ord("Q"): (_PERSISTENT, 0),
    0x98: (_NOTHING, 0),
    0x80: (_NOTHING, 1),
    0x95: (_NOTHING, 8),
}

_LENGTHS: Final = {1: struct.Struct("<B"), 4: struct.Struct("<I"), 8: struct.Struct("<Q")}


class _Bytes:
    """A file's bytes from its position on, read as far as they are needed."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.data = bytearray()

    def need(self, end: int) -> None:
        """Have the first `end` bytes."""
        if self.ahead(end) < end:
            raise ValueError("it ends too early")

    def ahead(self, end: int) -> int:
        """Read on to `end`, if there is so much; returns how many bytes there are."""
        while len(self.data) < end:
            more = self._file.read(min(max(_CHUNK, end - len(self.data)), 16 << 20))
            if not more:
                break
            self.data += more
        return len(self.data)

    def line(self, start: int) -> int:
        """The end of the line that begins at `start`, newline included."""
        searched = start
        while (found := self.data.find(b"\n", searched)) < 0:
            searched = len(self.data)
            self.need(searched + 1)
        return found + 1


def checked_pickle(file: IO[bytes], where: str) -> bytes:
    """The bytes of the pickle at a file's position, which is moved behind it, if it is one that may be loaded.

    >>> import io, pickle
    >>> checked_pickle(io.BytesIO(pickle.dumps([1, 2]) + b"more"), "an example") == pickle.dumps([1, 2])
    True
    """
    start = file.tell()
    source = _Bytes(file)
    try:
        end = _follow(source)
    except (ValueError, IndexError, KeyError, struct.error) as error:
        raise CheckpointCorruptError(f"{where}: not a valid pickle ({error})") from error
    file.seek(start + end)
    return bytes(memoryview(source.data)[:end])


def _follow(source: _Bytes) -> int:
    """Go through the opcodes up to the end; returns where that is."""
    # Of each value (size, depth of tuples); what grows is a list [size, depth], so that all who have it see it grow.
    atom = (1, 0)
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    position = cost = 0
    data = source.data
    available = 0
    while True:
        if position + _AHEAD > available:
            available = source.ahead(position + _AHEAD)
        opcode = data[position]
        # The most common ones first, without the table.
        if opcode == 0x71:  # BINPUT
            memo[data[position + 1]] = stack[-1]
            position += 2
            continue
        if opcode == 0x68:  # BINGET
            stack.append(memo[data[position + 1]])
            position += 2
            continue
        if opcode == 0x6A:  # LONG_BINGET
            stack.append(memo[int.from_bytes(data[position + 1 : position + 5], "little")])
            position += 5
            continue
        if opcode == 0x4B:  # BININT1
            stack.append(atom)
            position += 2
            continue
        found = _OPCODES.get(opcode)
        if found is None:
            raise ValueError(f"an unknown opcode {opcode:#x}")
        what, argument = found
        position += 1
        if argument and what is not _LINES and what is not _CALL and what is not _INSTANCE:
            size = argument
            if size < 0:
                source.need(position - size)
                (length,) = _LENGTHS[-size].unpack_from(data, position)
                size = length - size
            end = position + size
            if end > len(data):
                source.need(end)
        else:
            end = position
        if what is _PUSH:
            stack.append(atom)
        elif what is _PUT:
            place = data[position] if argument == 1 else int.from_bytes(data[position:end], "little")
            if place > position:
                raise ValueError("it asks for more memory than there can be values")
            memo[place] = stack[-1]
        elif what is _MEMOIZE:
            memo[len(memo)] = stack[-1]
        elif what is _GET:
            stack.append(memo[int.from_bytes(data[position:end], "little")])
        elif what is _MARK:
            marks.append(len(stack))
        elif what is _TUPLE:
            count = opcode - 0x84
            stack[-count:] = [_joined(stack[-count:])]
        elif what is _FROM_MARK or what is _INSTANCE:
            if what is _INSTANCE:
                end = source.line(source.line(position))
            mark = marks.pop()
            made = _joined(stack[mark:])
            cost += made[0]
            stack[mark:] = [list(made)]
        elif what is _CALL:
            parts = stack[-argument:]
            made = _joined(parts)
            cost += made[0]
            stack[-argument:] = [list(made)]
        elif what is _NEW:
            stack.append([1, 0])
        elif what is _SETS or what is _APPENDS or what is _ADD_ITEMS:
            mark = marks.pop()
            items = stack[mark:]
            del stack[mark:]
            _grow(stack[-1], items)
            if what is not _APPENDS:
                cost += sum(item[0] for item in (items[::2] if what is _SETS else items))
        elif what is _SET:
            cost += stack[-2][0]
            _grow(stack[-3], stack[-2:])
            del stack[-2:]
        elif what is _APPEND:
            _grow(stack[-2], stack[-1:])
            del stack[-1:]
        elif what is _LINES:
            for _ in range(argument):
                end = source.line(end)
            stack.append(atom)
        elif what is _PUT_LINE or what is _GET_LINE:
            end = source.line(position)
            place = int(data[position:end])
            if what is _GET_LINE:
                stack.append(memo[place])
            elif place > position:
                raise ValueError("it asks for more memory than there can be values")
            else:
                memo[place] = stack[-1]
        elif what is _POP:
            if marks and marks[-1] == len(stack):
                marks.pop()
            else:
                stack.pop()
        elif what is _POP_MARK:
            del stack[marks.pop() :]
        elif what is _DUP:
            stack.append(stack[-1])
        elif what is _PERSISTENT:
            stack[-1] = atom
        elif what is _STOP:
            return end
        if cost > _COSTS * (position + 1000):
            raise ValueError("its keys share their parts, and hashing them would take too long")
        position = end


def _joined(parts: list[Any]) -> tuple[int, int]:
    """A tuple of these values."""
    size, depth = 1, 0
    for part in parts:
        size += part[0]
        if part[1] > depth:
            depth = part[1]
    if depth >= _DEEPEST:
        raise ValueError(f"it has tuples in each other deeper than {_DEEPEST}")
    return size, depth + 1


def _grow(value: Any, items: list[Any]) -> None:
    if type(value) is list:
        value[0] += sum(item[0] for item in items if item is not value)
