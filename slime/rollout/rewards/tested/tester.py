"""This script runs the statements that test a program. It prints only PASSED, after the last statement.

The program's process never decides a comparison with a value of the tests: the tester compares plain values itself, and
an object of the program equals no plain value. The program sees only the arguments of its calls.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import socket
import sys
import types
from collections.abc import Callable
from pathlib import Path

from .peer import BINARY, COMPARED, CONVERTED, OPERATIONS, Operation, Peer, Remote
from .wire import Value

TESTS, PASSED = "tests.json", "all tests passed"
_MODULE = "tests"
_ALIASES = {"np": "numpy", "pd": "pandas", "plt": "matplotlib.pyplot"}
_ENDING = ("__next__", "send", "throw")
_CATCHING = AssertionError.__mro__[:-1]
_FOR_CONTAINERS = ("iter", "next", "len", "getitem", "contains")
_FOR_OBJECTS = (*_FOR_CONTAINERS, *COMPARED, "getattr", "setattr", "bool", "hash", "str", "repr")


class Judged(Remote):
    """A proxy for an object of the program. A comparison with a value of the tests never calls the program, because the
    program could return the result that the test wants, or read the value."""

    def _vime_plain(self) -> Value:
        return NotImplemented if "_vime_mixed" in self.__dict__ else self._vime_ask("plain")

    def __contains__(self, item: object) -> bool:
        if isinstance(item, Remote):
            return bool(self._vime_ask("contains", item))
        try:
            items = iter(self)
        except TypeError:
            return self._vime_ask("contains", item) is True
        return any(one == item for one in items)

    def __getattr__(self, name: str) -> Value:
        found = super().__getattr__(name)
        if name in _ENDING and isinstance(found, Judged):
            found.__dict__["_vime_ends"] = True
        return found

    def __exit__(self, kind: Value, error: Value, trace: Value) -> bool:
        """Lets the program suppress an error of the tests or of its functions, but not a failed comparison."""
        ended = self._vime_ask("exit", kind, error, trace) is True
        return ended and not isinstance(error, AssertionError) and "_vime_judged" not in vars(error or self)


def _compared(name: str) -> Callable[..., Value]:
    def compare(self: Judged, other: object) -> Value:
        if isinstance(other, Remote):
            return self._vime_ask(name, other) is True
        value = self._vime_plain()
        if value is not NotImplemented:
            return COMPARED[name](value, other)
        if name in ("eq", "ne"):
            return NotImplemented
        raise TypeError(
            "an object of the program has no order with a value of the tests; compare an attribute"
        )

    return compare


def _combined(name: str, reflected: bool) -> Callable[..., Value]:
    def combine(self: Judged, other: object) -> Value:
        value = NotImplemented if isinstance(other, Remote) else self._vime_plain()
        if value is not NotImplemented:
            return BINARY[name](other, value) if reflected else BINARY[name](value, other)
        words = (other, self) if reflected else (self, other)
        result = self._vime_peer.request(Operation(name), words)
        if not isinstance(other, Remote):
            if not isinstance(result, Judged):
                raise TypeError(
                    "an object of the program gives no value with a value of the tests; compare an attribute"
                )
            result.__dict__["_vime_mixed"] = True
        return result

    return combine


def _converted(name: str) -> Callable[..., Value]:
    def convert(self: Judged, *words: object) -> Value:
        if "_vime_mixed" in self.__dict__:
            raise TypeError("an object that met a value of the tests gives no value; compare an attribute")
        return self._vime_ask(name, *words)

    return convert


for _name in COMPARED:
    setattr(Judged, f"__{_name}__", _compared(_name))
for _name in BINARY:
    setattr(Judged, f"__{_name}__", _combined(_name, False))
    setattr(Judged, f"__r{_name}__", _combined(_name, True))
for _name in CONVERTED:
    setattr(Judged, f"__{_name}__", _converted(_name))


class Tester(Peer):
    """The tester's side of the connection. The program may call functions that the tests passed to it, and use public
    attributes of objects whose classes the tests define."""

    remote = Judged

    def request(
        self, function: object, words: tuple[object, ...], named: dict[str, Value] | None = None
    ) -> Value:
        """Calls the program. A StopIteration of the program becomes RuntimeError, because it would silently end a loop
        of the tests over `map` (PEP 479)."""
        operation = function.name if isinstance(function, Operation) else ""
        try:
            return super().request(function, words, named)
        except StopIteration as error:
            if operation == "next" or (isinstance(function, Judged) and "_vime_ends" in vars(function)):
                raise
            raise RuntimeError(
                "a call must end no loop of the tests, got StopIteration; raise another error"
            ) from error
        except Exception as error:
            if operation:
                vars(error)["_vime_judged"] = True
            raise

    def builtin_class(self, name: str) -> type:
        """Returns a builtin class. Raises TypeError for a class that would catch the tests' failed assertions."""
        found = super().builtin_class(name)
        if found in _CATCHING:
            raise TypeError(f"a program must raise its own errors, got {name}; extend the class")
        return found

    def _receive(self) -> Value:
        """Receives a message. Ends this process if the program has ended or breaks the protocol, so that no statement
        can catch this as an error of a call."""
        try:
            return super()._receive()
        except (EOFError, OSError, ValueError, RecursionError):
            os._exit(1)

    def allowed(self, function: Value, words: list[Value]) -> Callable[..., Value]:
        if not isinstance(function, Operation):
            return super().allowed(function, words)
        target, name = words[0], function.name
        own = type(target).__module__ == _MODULE and name in _FOR_OBJECTS
        private = name in ("getattr", "setattr") and str(words[1]).startswith("_")
        if isinstance(target, Remote) or not (own or name in _FOR_CONTAINERS) or private:
            raise TypeError("the program may not do this with an object of the tests; pass a function to it")
        return OPERATIONS[name]


class ProgramNames(dict[str, Value]):
    """The names that the tests can use. A name that the tests do not define has its current value in the program."""

    def __init__(self, tester: Tester, tests: list[str]) -> None:
        super().__init__(__name__=_MODULE)
        self._tester, self._asked = tester, {*_used_names(tests)}
        self.update(_modules(tests))
        # Python looks up a name in a class body of the tests without __missing__.
        wanted = [name for name in self._asked if name not in self and not self._is_builtin(name)]
        found = tester.request(Operation("names"), (wanted,))
        self.update({name: value for name, value in found.items() if isinstance(value, Remote | type)})

    def __missing__(self, name: str) -> Value:
        if name.startswith("__") or self._is_builtin(name):
            raise KeyError(name)
        found = self._tester.request(Operation("names"), ([name],))
        if type(found) is not dict or name not in found:
            raise KeyError(name)
        return found[name]

    def _is_builtin(self, name: str) -> bool:
        """Returns True if `name` means Python's builtin. If the tests use only builtin names, the program may replace
        them."""
        return hasattr(builtins, name) and any(not hasattr(builtins, other) for other in self._asked)


def _used_names(tests: list[str]) -> set[str]:
    """Returns the names that the tests use and do not define."""
    used: set[str] = set()
    defined: set[str] = set()
    for node in (node for test in tests for node in ast.walk(ast.parse(test))):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
    return used - defined


def _modules(tests: list[str]) -> dict[str, Value]:
    """Imports modules that the tests use but do not import, such as math in `math.isclose`. Programs often import them.

    The tests may not use the program's object of the same name, because it could decide a test.
    """
    attributes: dict[str, set[str]] = {}
    other: set[str] = set()
    for tree in map(ast.parse, tests):
        bases = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                attributes.setdefault(node.value.id, set()).add(node.attr)
                bases.add(node.value)
        other |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and n not in bases}
    found = {}
    for name in (_used_names(tests) & attributes.keys()) - other:
        module = _ALIASES.get(name, name)
        if module in sys.stdlib_module_names or module in _ALIASES.values():
            try:
                loaded = importlib.import_module(module)
            except ImportError:
                continue
            if all(hasattr(loaded, attribute) for attribute in attributes[name]):
                found[name] = loaded
    return found


def run_tests(connection: socket.socket, tests: list[str]) -> None:
    """Raises the error of the first statement that fails."""
    # A dataclass looks up the module of its class.
    sys.modules[_MODULE] = types.ModuleType(_MODULE)
    names = ProgramNames(Tester(connection), tests)
    for test in tests:
        exec(compile(test, "test.py", "exec"), names)


def main() -> None:
    """Runs the tests. stdin is the socket to the program's process."""
    connection = socket.socket(fileno=os.dup(0))
    verdict = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    run_tests(connection, json.loads(Path(TESTS).read_text(encoding="utf-8")))
    os.write(verdict, PASSED.encode())
    os._exit(0)
