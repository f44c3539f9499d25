"""Rounded weights that are kept while no weight changes: during the micro-batches of one optimizer step.

Without a block of `keep_rounded`, each product rounds its weight, and no rounded weight outlives the product. Nothing
is kept from one block to the next, so an optimizer step, a load or a weight update needs no notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_kept: dict[int, tuple[Tensor, Any]] | None = None
"""Maps the id of a parameter to the parameter and its rounded forms, inside a block of `keep_rounded`."""
_turned = False
"""True if the block also keeps the transposed form."""


@contextmanager
def keep_rounded(*, gradients: bool) -> Iterator[None]:
    """Keeps each rounded parameter until the end of the block: 2 bytes per element on a GPU if the block computes
    `gradients`, and 1 byte otherwise. The caller changes no parameter inside the block."""
    global _kept, _turned
    outer = _kept, _turned
    _kept, _turned = {}, gradients
    try:
        yield
    finally:
        _kept, _turned = outer


def rounded_for(weight: Tensor, make: Callable[[bool], Any]) -> tuple[Any, bool]:
    """Returns the rounded forms of a weight, and whether they are kept. `make` rounds the weight, with the transposed
    form if its argument is True. Only parameters are kept: the memory of other tensors may get other values."""
    if _kept is None:
        return make(False), False
    found = _kept.get(id(weight))  # before the check of the type, which takes longer
    if found is None:
        if not isinstance(weight, nn.Parameter):
            return make(False), False
        found = _kept[id(weight)] = weight, make(_turned)
    return found[1], True
