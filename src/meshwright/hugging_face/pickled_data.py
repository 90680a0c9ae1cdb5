"""Pickles read as data: an interpreter of the format that imports nothing and calls nothing.

A pickle is a program for a stack machine: most of its instructions push numbers, texts and
containers; GLOBAL names an object of Python, and REDUCE, NEWOBJ and BUILD call it. Here a name
stays a name (`Named`), and a call is the record of one (`Call`), where the name is one of those
that the reader expects. Everything else is refused.
"""

import dataclasses
import pickletools
from collections.abc import Callable, Container
from typing import Any

_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = (
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES"),
)
_EMPTY: dict[str, Callable[[], Any]] = {
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
ORDERED = "collections OrderedDict"
"""Name of the one object that is made: an empty dictionary."""


@dataclasses.dataclass(frozen=True)
class Named:
    """Name of an object of Python, such as `torch float32`; nothing is imported."""

    name: str


@dataclasses.dataclass(eq=False)
class Call:
    """Record of a call that a pickle asks for,
    and of the state that it gives to the result; nothing is called."""

    name: str
    # Not in the text of an error: a tuple that has another twice, and so on, writes without end.
    arguments: tuple[Any, ...] = dataclasses.field(repr=False)
    state: Any = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(eq=False)
class Persistent:
    """Reference of a pickle to something outside of it, such as a tensor's bytes."""

    value: Any = dataclasses.field(repr=False)


def read_pickled(content: bytes, names: Container[str]) -> Any:
    """Returns what a pickle describes.

    names: objects that it may name, each "MODULE NAME". Raises ValueError for any other, for an
    instruction that is not about data, and for what is no pickle.
    """
    machine = _Machine(names)
    try:
        for opcode, argument, _ in pickletools.genops(content):
            machine.run(opcode.name, argument)
        return machine.result()
    except (IndexError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is no pickle that holds together: {type(error).__name__}") from error


def _is_key(value: Any) -> bool:
    """Whether a dictionary may have a key.
    A tuple of tuples takes time and text without end to hash and to write."""
    if isinstance(value, tuple):
        return not any(isinstance(item, tuple) or not _is_key(item) for item in value)
    return value is None or isinstance(value, str | bytes | int | float | Named | Call)


class _Machine:
    """Stack machine of the format."""

    def __init__(self, names: Container[str]):
        self._names = names
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        """Stacks below each mark."""
        self._memo: dict[int, Any] = {}
        self._stopped = False

    def run(self, opcode: str, argument: Any) -> None:
        """Runs one instruction."""
        stack = self._stack
        if opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
        elif opcode in _LITERALS:
            stack.append(argument)
        elif opcode in _EMPTY:
            stack.append(_EMPTY[opcode]())
        elif opcode in _TUPLES:
            self._make_tuple(_TUPLES[opcode])
        elif opcode == "MARK":
            self._marked.append(stack)
            self._stack = []
        elif opcode == "TUPLE":
            items = self._items()
            self._stack.append(tuple(items))
        elif opcode in ("APPENDS", "SETITEMS", "APPEND", "SETITEM"):
            self._fill(opcode)
        elif opcode == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif opcode in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif opcode in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif opcode == "GLOBAL":
            stack.append(self._named(argument))
        elif opcode == "STACK_GLOBAL":
            name = stack.pop()
            module = stack.pop()
            if not isinstance(name, str) or not isinstance(module, str):
                raise TypeError
            stack.append(self._named(f"{module} {name}"))
        elif opcode in ("REDUCE", "NEWOBJ"):
            self._record_call()
        elif opcode == "BUILD":
            state = stack.pop()
            self._called(stack[-1]).state = state
        elif opcode == "BINPERSID":
            stack.append(Persistent(stack.pop()))
        elif opcode == "STOP":
            self._stopped = True
        elif opcode not in ("PROTO", "FRAME"):
            raise ValueError(f"it has the instruction {opcode}, which a checkpoint has no use for")

    def result(self) -> Any:
        """Returns the one value that is left."""
        if not self._stopped or len(self._stack) != 1 or self._marked:
            raise ValueError("it is no pickle that holds together: it does not end with one value")
        return self._stack[0]

    def _items(self) -> list[Any]:
        """Returns what was pushed since the last mark, and goes on with the stack below it."""
        items = self._stack
        self._stack = self._marked.pop()
        return items

    def _make_tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise IndexError
        items = tuple(self._stack[-count:])
        del self._stack[-count:]
        self._stack.append(items)

    def _fill(self, opcode: str) -> None:
        """Adds items to a list or a dictionary."""
        if opcode in ("APPENDS", "SETITEMS"):
            items = self._items()
        else:
            count = 2 if opcode == "SETITEM" else 1
            items = self._stack[-count:]
            del self._stack[-count:]
        target = self._stack[-1]
        if opcode.startswith("APPEND") and isinstance(target, list):
            target.extend(items)
        elif opcode.startswith("SETITEM") and isinstance(target, dict):
            keys = items[::2]
            if not all(map(_is_key, keys)):
                raise ValueError("it has a dictionary whose keys are no texts, numbers or objects")
            target.update(zip(keys, items[1::2], strict=True))
        else:
            raise TypeError

    def _named(self, name: str) -> Named:
        if name not in self._names:
            raise ValueError(
                f"it names {name[:80].replace(' ', '.')!r}, which a checkpoint of tensors has no "
                "use for; nothing of it was imported or called"
            )
        return Named(name)

    def _record_call(self) -> None:
        """Replaces a name and arguments by the record of a call."""
        arguments = self._stack.pop()
        function = self._stack.pop()
        if not isinstance(function, Named) or not isinstance(arguments, tuple):
            raise TypeError
        if function.name == ORDERED:
            self._stack.append({})
        else:
            self._stack.append(Call(function.name, arguments))

    @staticmethod
    def _called(value: Any) -> Call:
        if not isinstance(value, Call):
            raise TypeError
        return value
