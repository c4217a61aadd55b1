"""Reading a pickle's opcodes before Python's unpickler does, to find what would exhaust it.

The unpickler trusts a pickle in ways that cost more than the pickle's bytes: it makes room for a memo of any size, and
it hashes keys, which takes time and stack for tuples of tuples, the more so if these share their parts. Here the
opcodes are followed with a size for each value instead of the value, so that such a pickle is refused.

    memo        a place beyond the number of bytes is asked for by no pickle that was written
    size        of a value, if all that it shares were copied; of keys and arguments it is bounded in all
    depth       of tuples within each other
"""

from __future__ import annotations

import pickletools
from typing import IO, Any, Final

from terrazzo.errors import CheckpointCorruptError

_CHUNK: Final = 64 << 10
_AHEAD: Final = 9  # bytes of an opcode and its argument or length
_DEEPEST: Final = 1000
_COSTS: Final = 64  # of hashing, in elements for each byte of the pickle

# What opcodes do to the stack, by their names; all others push a value.
_DOES: Final = {
    name: what
    for what, names in {
        "nothing": "PROTO FRAME READONLY_BUFFER",
        "mark": "MARK",
        "pop": "POP",
        "pop to mark": "POP_MARK",
        "repeat": "DUP",
        "stop": "STOP",
        "new": "EMPTY_LIST EMPTY_DICT EMPTY_TUPLE EMPTY_SET",
        "tuple": "TUPLE1 TUPLE2 TUPLE3",
        "make": "LIST DICT TUPLE FROZENSET OBJ INST REDUCE BUILD NEWOBJ NEWOBJ_EX STACK_GLOBAL",
        "append": "APPEND APPENDS",
        "add": "ADDITEMS",
        "set": "SETITEM SETITEMS",
        "put": "PUT BINPUT LONG_BINPUT",
        "memoize": "MEMOIZE",
        "get": "GET BINGET LONG_BINGET",
        "persistent": "BINPERSID",
    }.items()
    for name in names.split()
}
# The bytes of an argument, or minus the bytes that hold its length.
_SIZES: Final = {
    pickletools.TAKEN_FROM_ARGUMENT1: -1,
    pickletools.TAKEN_FROM_ARGUMENT4: -4,
    pickletools.TAKEN_FROM_ARGUMENT4U: -4,
    pickletools.TAKEN_FROM_ARGUMENT8U: -8,
    pickletools.UP_TO_NEWLINE: 0,
}


def _about(op: pickletools.OpcodeInfo) -> tuple[str, int, int, int]:
    """What an opcode does, the size and the lines of its argument, and how many values it takes; 0: those at a mark."""
    size = 0 if op.arg is None else _SIZES.get(op.arg.n, op.arg.n)
    lines = 0 if op.arg is None or op.arg.n != pickletools.UP_TO_NEWLINE else 1 + op.arg.name.endswith("_pair")
    takes = 0 if pickletools.markobject in op.stack_before else len(op.stack_before)
    return _DOES.get(op.name, "push"), size, lines, takes


_OPCODES: Final = {ord(op.code): _about(op) for op in pickletools.opcodes if op.proto <= 5}


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
    except (ValueError, IndexError, KeyError) as error:
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
        what, size, lines, takes = found
        position += 1
        if size < 0:
            source.need(position - size)
            size = int.from_bytes(data[position : position - size], "little") - size
        end = position + size
        if end > available:
            source.need(end)
        while lines:
            end = source.line(end)
            lines -= 1
        if what == "push":
            stack.append(atom)
        elif what == "put" or what == "get":
            place = int.from_bytes(data[position:end], "little") if size else int(data[position:end])
            if what == "get":
                stack.append(memo[place])
            elif place > position:
                raise ValueError("it asks for more memory than there can be values")
            else:
                memo[place] = stack[-1]
        elif what == "memoize":
            memo[len(memo)] = stack[-1]
        elif what == "mark":
            marks.append(len(stack))
        elif what == "tuple":
            stack[-takes:] = [_joined(stack[-takes:])]
        elif what == "make":
            mark = -takes if takes else marks.pop()
            made = _joined(stack[mark:])
            cost += made[0]
            stack[mark:] = [list(made)]
        elif what == "new":
            stack.append([1, 0])
        elif what == "set" or what == "append" or what == "add":
            mark = 1 - takes if takes else marks.pop()
            items = stack[mark:]
            del stack[mark:]
            _grow(stack[-1], items)
            if what != "append":
                cost += sum(item[0] for item in (items[::2] if what == "set" else items))
        elif what == "pop":
            if marks and marks[-1] == len(stack):
                marks.pop()
            else:
                stack.pop()
        elif what == "pop to mark":
            del stack[marks.pop() :]
        elif what == "repeat":
            stack.append(stack[-1])
        elif what == "persistent":
            stack[-1] = atom
        elif what == "stop":
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
