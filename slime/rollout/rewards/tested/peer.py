"""This module calls functions between two processes over a socket. A process that waits for a reply serves calls."""

from __future__ import annotations

import asyncio
import builtins
import inspect
import json
import math
import operator
import socket
from collections.abc import Callable

from .wire import Json, Reader, Table, Value, Writer, builtin_class

_MOST_BYTES = 64 << 20
_PLAIN: tuple[Callable[[Value], Value], ...] = (
    int,
    float,
    str,
    bytes,
    tuple,
    list,
    set,
    frozenset,
    dict,
    complex,
    bytearray,
)
_BINARY = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
)
BINARY = {name: getattr(operator, f"__{name}__") for name in _BINARY}
BINARY["divmod"] = divmod
COMPARED = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
CONVERTED: dict[str, Callable[..., Value]] = {
    **{"bool": bool, "int": int, "float": float, "complex": complex, "index": operator.index},
    **{"abs": abs, "round": round, "trunc": math.trunc, "floor": math.floor, "ceil": math.ceil},
}
UNARY: dict[str, Callable[..., Value]] = {
    **{"len": len, "str": str, "repr": repr, "hash": hash, "iter": iter, "next": next, "reversed": reversed},
    **{"neg": operator.neg, "pos": operator.pos, "invert": operator.invert, "format": format},
    **{"getitem": operator.getitem, "setitem": operator.setitem, "delitem": operator.delitem},
    **{"instancecheck": lambda kind, one: isinstance(one, kind)},
    **{"subclasscheck": lambda kind, one: issubclass(one, kind)},
    **{"enter": lambda one: one.__enter__(), "exit": lambda one, *words: one.__exit__(*words)},
}


def make_plain(value: object) -> object:
    """Returns the plain value of an object whose class extends a plain class, such as IntEnum; else NotImplemented."""
    for kind in _PLAIN:
        if isinstance(value, kind):  # type: ignore[arg-type]
            return kind(value)
    return NotImplemented


OPERATIONS: dict[str, Callable[..., Value]] = {
    **BINARY,
    **COMPARED,
    **CONVERTED,
    **UNARY,
    **{"contains": operator.contains, "getattr": getattr, "setattr": setattr, "delattr": delattr},
    **{"plain": make_plain, "await": lambda coroutine: asyncio.run(coroutine)},
}


class Remote:
    """A proxy for an object of the other process."""

    def __init__(self, peer: Peer, number: int) -> None:
        self.__dict__["_vime_peer"], self.__dict__["_vime_number"] = peer, number

    def _vime_ask(self, operation: str, *words: object) -> Value:
        return self._vime_peer.request(Operation(operation), (self, *words))

    def __call__(self, *words: object, **named: object) -> Value:
        return self._vime_peer.request(self, words, named)

    def __getattr__(self, name: str) -> Value:
        return self._vime_ask("getattr", name)

    def __setattr__(self, name: str, value: object) -> None:
        self._vime_ask("setattr", name, value)

    def __delattr__(self, name: str) -> None:
        self._vime_ask("delattr", name)

    def __contains__(self, item: object) -> bool:
        return bool(self._vime_ask("contains", item))


class Operation:
    """An entry of OPERATIONS that is the function of a call."""

    def __init__(self, name: str) -> None:
        self.name = name


def _forward(name: str) -> Callable[..., Value]:
    return lambda self, *words: self._vime_ask(name, *words)


def _reflected(name: str) -> Callable[..., Value]:
    return lambda self, other: self._vime_peer.request(Operation(name), (other, self))


for _name in (*BINARY, *COMPARED, *CONVERTED, *UNARY):
    setattr(Remote, f"__{_name}__", _forward(_name))
for _name in BINARY:
    setattr(Remote, f"__r{_name}__", _reflected(_name))


class Peer:
    """A side of the connection. `remote` is the class of its proxies. A subclass limits the calls of the other side."""

    remote: Callable[[Peer, int], Value] = Remote

    def __init__(self, connection: socket.socket) -> None:
        self._stream = connection.makefile("rwb")
        self._own: list[Value] = []
        self._numbers: dict[int, int] = {}
        self._stand_ins: dict[int, Value] = {}

    def request(
        self, function: object, words: tuple[object, ...], named: dict[str, Value] | None = None
    ) -> Value:
        """Calls a function in the other process. Returns its result or raises its error."""
        table = Table([])
        writer = Writer(table, self._reference)
        message = {
            "call": writer.value(function),
            "words": [writer.value(word) for word in words],
            "named": {name: writer.value(value) for name, value in (named or {}).items()},
        }
        self._send({**message, "table": writer.contents()})
        while "call" in (reply := self._receive()):
            self._serve(reply)
        reader = Reader(Table(table.objects), reply["table"], self._referenced, self.builtin_class)
        if "error" in reply:
            raise self._error(reader, *reply["error"])
        return reader.value(reply["value"])

    def serve(self) -> None:
        """Serves calls of the other side until the other side ends."""
        while True:
            try:
                message = self._receive()
            except EOFError:
                return
            self._serve(message)

    def allowed(self, function: Value, words: list[Value]) -> Callable[..., Value]:
        """Returns the function for a call of the other side. Raises TypeError if the other side may not call it."""
        found: Callable[..., Value] = (
            OPERATIONS[function.name] if isinstance(function, Operation) else function
        )
        return found

    def builtin_class(self, name: str) -> type:
        """Returns the builtin class that the other side has named. Raises TypeError for a class that is not allowed."""
        return builtin_class(name)

    def _serve(self, message: Json) -> None:
        table = Table([])
        reader = Reader(table, message["table"], self._referenced, self.builtin_class)
        pinned = Table(table.objects)
        writer = Writer(pinned, self._reference)
        try:
            words = [reader.value(word) for word in message["words"]]
            named = {name: reader.value(value) for name, value in message["named"].items()}
            function = self.allowed(reader.value(message["call"]), words)
            reply = {"value": writer.value(function(*words, **named))}
        except BaseException as error:  # The border between two processes: the caller gets every error.
            names = [kind.__name__ for kind in type(error).__mro__]
            reply = {"error": [names, *self._describe_error(writer, error)]}
        contents = writer.contents()
        for number in range(pinned.pinned):
            if contents[number] == message["table"][number]:
                contents[number] = None
        self._send({**reply, "table": contents})

    def _describe_error(self, writer: Writer, error: BaseException) -> list[Json]:
        kind = None if type(error).__module__ == "builtins" else self._reference(type(error))
        return [[writer.value(word) for word in error.args], kind, self._reference(error)]

    def _error(
        self, reader: Reader, names: list[str], words: list[Json], written: Json, itself: Json
    ) -> BaseException:
        remote = self._referenced(itself)
        if isinstance(remote, BaseException):
            return remote
        kind = self._referenced(written) if written else None
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            kind = exception_class(names)
        error = kind.__new__(kind)
        error.args = tuple(reader.value(word) for word in words)
        error.__dict__["_vime_remote"] = remote
        return error

    def _reference(self, value: object) -> Json:
        if isinstance(value, Operation):
            return ["operation", value.name]
        stand_in = value.__dict__.get("_vime_remote", value) if isinstance(value, BaseException) else value
        if isinstance(stand_in, Remote):
            return ["yours", stand_in._vime_number]
        if isinstance(value, type) and "_vime_number" in vars(value):
            return ["yours", vars(value)["_vime_number"]]
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._own)
            self._own.append(value)
        number = self._numbers[id(value)]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["raised", [number, [kind.__name__ for kind in value.__mro__]]]
        return ["coroutine" if inspect.iscoroutine(value) else "mine", number]

    def _referenced(self, written: Json) -> Value:
        kind, content = written
        if kind == "operation":
            return Operation(content)
        if kind == "yours":
            return self._own[content]
        number = content[0] if kind == "raised" else content
        if number not in self._stand_ins:
            self._stand_ins[number] = self._stand_in(kind, content)
        return self._stand_ins[number]

    def _stand_in(self, kind: str, content: Json) -> Value:
        if kind == "raised":
            number, names = content
            base = exception_class(names[1:])
            return type(names[0], (base,), {"_vime_number": number, "__getattr__": _read_error_attribute})
        remote = self.remote(self, content)
        return _awaited(remote) if kind == "coroutine" else remote

    def _send(self, message: Json) -> None:
        data = json.dumps(message).encode()
        self._stream.write(len(data).to_bytes(8, "big") + data)
        self._stream.flush()

    def _receive(self) -> Json:
        size = int.from_bytes(self._read(8), "big")
        if size > _MOST_BYTES:
            raise ValueError(
                f"a message must have at most {_MOST_BYTES} bytes, got {size}; pass smaller values"
            )
        return json.loads(self._read(size))

    def _read(self, size: int) -> bytes:
        data = self._stream.read(size)
        if len(data) < size:
            raise EOFError
        return data


def exception_class(names: list[str]) -> type[BaseException]:
    """Returns the builtin exception class of the first name that is builtin, or Exception."""
    for name in names:
        found = getattr(builtins, name, None)
        if isinstance(found, type) and issubclass(found, BaseException):
            return found
    return Exception


def _read_error_attribute(self: BaseException, name: str) -> Value:
    if name.startswith("__") or "_vime_remote" not in self.__dict__:
        raise AttributeError(name)
    return getattr(self.__dict__["_vime_remote"], name)


async def _awaited(coroutine: Remote) -> Value:
    return coroutine._vime_ask("await")
