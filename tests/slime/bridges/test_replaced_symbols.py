"""Tests replaced symbols: a record is applied and undone, and every record has a symbol that exists."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from slime import bridges
from slime.bridges import Patch

FOREIGN = "a_foreign_program"


class Program:
    """A foreign class with every kind of method."""

    def plain(self, x: int) -> int:
        return x

    @staticmethod
    def static(x: int) -> int:
        return x

    @classmethod
    def of_class(cls, x: int) -> int:
        return x


def doubled(original: Callable[..., int]) -> Callable[..., int]:
    return lambda *args: 2 * original(*args)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    module = ModuleType(FOREIGN)
    vars(module)["Program"] = type("Program", (Program,), dict(vars(Program)))
    vars(module)["function"] = lambda x: x
    monkeypatch.setitem(sys.modules, FOREIGN, module)
    yield module


def patch(name: str) -> Patch:
    text = {"condition": "always", "why": "a test", "removed_when": "never"}
    return Patch(symbol=f"{FOREIGN}:{name}", replacement=f"{__name__}:doubled", **text)


NAMES = ["function", "Program.plain", "Program.static", "Program.of_class"]


def result(program: ModuleType, name: str) -> int:
    owner, _, method = name.rpartition(".")
    found: int = getattr(program.Program() if owner else program, method)(3)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_symbol_is_replaced_once(program: ModuleType, name: str) -> None:
    for _ in range(2):
        bridges.apply(patch(name))
    assert result(program, name) == 6 and bridges.is_applied(patch(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_block_puts_the_original_back(program: ModuleType, name: str) -> None:
    with pytest.raises(KeyError), bridges.applied(patch(name)):
        assert result(program, name) == 6
        raise KeyError
    assert result(program, name) == 3 and not bridges.is_applied(patch(name))


def test_an_original_that_another_put_back_is_replaced_again(program: ModuleType) -> None:
    original = program.function
    bridges.apply(patch("function"))
    vars(program)["function"] = original
    assert not bridges.is_applied(patch("function"))
    bridges.apply(patch("function"))
    assert result(program, "function") == 6


@pytest.mark.parametrize("name", ["nothing", "Program.nothing", "Nothing.plain"])
def test_a_symbol_that_does_not_exist_is_an_error(program: ModuleType, name: str) -> None:
    assert not bridges.exists(patch(name))
    with pytest.raises(RuntimeError, match=f"{FOREIGN}:{name} must exist to be replaced, got"):
        bridges.apply(patch(name))
