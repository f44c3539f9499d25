"""Import path of slime plug-ins: see slime.hooks and slime.singleton."""

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from slime.hooks import load_function
from slime.singleton import SingletonMeta

__all__ = ["SingletonMeta", "group_by", "load_function"]
T = TypeVar("T")


def group_by(iterable: Iterable[T], key: Callable[[T], Hashable] | None = None) -> dict[Hashable, list[T]]:
    """`key(item)` (without a key, the item itself) -> its items, in the order of their first appearance."""
    groups: dict[Hashable, list[T]] = {}
    for item in iterable:
        groups.setdefault(item if key is None else key(item), []).append(item)
    return groups
