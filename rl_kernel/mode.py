"""The switch of the package: which operators may run fast, and what happens when one cannot.

Owns the process-wide setting. It decides nothing about a call: that is `dispatch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from rl_kernel.checks import invalid
from rl_kernel.contract import CONTRACTS

MODES = ("off", "auto", "strict")


@dataclass(frozen=True)
class Settings:
    """off: always the reference; auto: the fast implementation where its contract holds, else the reference, with
    the reason recorded; strict: an error instead of the reference, and the values of tensors are checked too."""

    mode: str = "auto"
    operators: frozenset[str] = frozenset(CONTRACTS)


_settings = Settings()


def settings() -> Settings:
    """What is in force in this process."""
    return _settings


def configure(mode: str = "auto", operators: Iterable[str] | None = None) -> None:
    """Set `mode` (off, auto or strict) and which operators may run fast (default: all); the others run as if off.

    Raises:
        ValueError: unknown mode or operator name.
    """
    global _settings
    if mode not in MODES:
        raise invalid("mode", f"be one of {', '.join(MODES)}", repr(mode), "pick one of them")
    names = frozenset(CONTRACTS if operators is None else operators)
    for name in sorted(names):
        check_operator(name)
    _settings = Settings(mode, names)


@contextmanager
def using(mode: str = "auto", operators: Iterable[str] | None = None) -> Iterator[None]:
    """`configure` for the length of a `with` block."""
    global _settings
    before = _settings
    configure(mode, operators)
    try:
        yield
    finally:
        _settings = before


def check_operator(name: str) -> None:
    """A name of `capabilities()`."""
    if name not in CONTRACTS:
        raise invalid("operator", f"be one of {', '.join(CONTRACTS)}", repr(name), "check the spelling")


def reads_values(tensor: Tensor) -> bool:
    """Whether a check may look at the values of `tensor`: free on the host; on a device it would stop the stream,
    so only strict mode pays for it."""
    return not tensor.is_cuda or _settings.mode == "strict"
