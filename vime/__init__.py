"""The distribution: command line, vLLM engines, plan, audit, benchmarks. `vime.train` is its Python API.

The import installs `vime.alias`. It imports the API only when `vime.train` or `vime.Run` is first read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vime.alias import install

if TYPE_CHECKING:
    from vime.api import Run as Run
    from vime.api import train as train

install()

__all__ = ["Run", "train"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from vime import api

        return getattr(api, name)
    raise AttributeError(f"module 'vime' has no attribute {name!r}", name=name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
