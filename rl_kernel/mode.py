"""The process-wide switch: it sets which operators may run their fast implementation, and the behaviour if one cannot.

`rl_kernel.dispatch` reads the switch and chooses the implementation of a call.
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
    """The mode, and the operators that may run their fast implementation.

    off: the reference runs. auto: the fast implementation runs where it can; otherwise the reference runs, and
    telemetry counts the reason. strict: a call fails where the fast implementation cannot run; checks also read the
    values of tensors.
    """

    mode: str = "auto"
    operators: frozenset[str] = frozenset(CONTRACTS)


_settings = Settings()


def settings() -> Settings:
    """Returns the settings of this process."""
    return _settings


def configure(mode: str = "auto", operators: Iterable[str] | None = None) -> None:
    """Sets the mode (off, auto or strict) and the operators that may run fast (default: all). The other operators run
    the reference.

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
    """Applies `configure` inside a `with` block and restores the earlier settings afterwards."""
    global _settings
    before = _settings
    configure(mode, operators)
    try:
        yield
    finally:
        _settings = before


def check_operator(name: str) -> None:
    """Raises ValueError unless `name` is an operator in `capabilities()`."""
    if name not in CONTRACTS:
        raise invalid("operator", f"be one of {', '.join(CONTRACTS)}", repr(name), "check the spelling")


def reads_values(tensor: Tensor) -> bool:
    """Returns whether a check may read the values of `tensor`. On the host, reading costs nothing. On a device, the
    host would wait for the stream, so that only strict mode reads values."""
    return not tensor.is_cuda or _settings.mode == "strict"
