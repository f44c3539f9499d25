"""The process-wide switch: which operators may run their fast implementation, and what happens if one cannot.

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
    """`mode` and the operators that may run fast.

    off: the reference. auto: the fast implementation where it can run, otherwise the reference, and telemetry counts
    the reason. strict: an error where the fast implementation cannot run; checks also read the values of tensors.
    """

    mode: str = "auto"
    operators: frozenset[str] = frozenset(CONTRACTS)


_settings = Settings()


def settings() -> Settings:
    """The settings of this process."""
    return _settings


def configure(mode: str = "auto", operators: Iterable[str] | None = None) -> None:
    """Set `mode` (off, auto or strict) and the operators that may run fast (default: all). The others run the
    reference.

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
    """`configure` inside a `with` block; restores the earlier settings afterwards."""
    global _settings
    before = _settings
    configure(mode, operators)
    try:
        yield
    finally:
        _settings = before


def check_operator(name: str) -> None:
    """ValueError unless `name` is one of `capabilities()`."""
    if name not in CONTRACTS:
        raise invalid("operator", f"be one of {', '.join(CONTRACTS)}", repr(name), "check the spelling")


def reads_values(tensor: Tensor) -> bool:
    """Whether a check may read the values of `tensor`. On the host this costs nothing. On a device the host would wait
    for the stream, so that only strict mode reads values."""
    return not tensor.is_cuda or _settings.mode == "strict"
