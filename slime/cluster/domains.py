"""In which order a run takes its GPUs, so that those that talk most are connected by NVLink. Pure functions.

A domain is a set of GPUs that NVLink connects: a node, or a rack of nodes (GB200 NVL72). GPUs are taken in blocks. A
block is a tensor-parallel group of the trainer, or the GPUs of an engine. It goes to one node where one has room, else
to one domain. A block that no domain has room for is cut in two halves, and each half looks for room of its own.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence


def split_domains(domains: Sequence[str], nodes: Sequence[str], size: int | None) -> list[Hashable]:
    """The domain of each GPU, for GPUs that are sorted by domain and node.

    `domains` is what the driver says, "" where it does not. With `size` (--nvlink-domain-size) each of them is cut
    into pieces of that many GPUs, and GPUs of unknown domain are cut in the order of their nodes. Without `size` the
    domain of a GPU is its node where the driver does not say.
    """
    if size is None:
        return [domain or ("node", node) for domain, node in zip(domains, nodes, strict=True)]
    seen: dict[str, int] = {}
    found: list[Hashable] = []
    for domain in domains:
        seen[domain] = seen.get(domain, -1) + 1
        found.append((domain, seen[domain] // size))
    return found


def arrange(nodes: Sequence[str], domains: Sequence[Hashable], blocks: Sequence[int]) -> list[int]:
    """Positions of GPUs in the order in which blocks of these sizes take them; first fit, nodes before domains."""
    free = list(range(len(nodes)))
    order: list[int] = []
    waiting = list(reversed(blocks))
    while waiting:
        size = waiting.pop()
        taken = _first_fit(free, nodes, size) or _first_fit(free, domains, size)
        if not taken:
            assert size > 1, (free, blocks)  # there are as many GPUs as the blocks ask for
            waiting += [size - size // 2, size // 2]
        order += taken
        free = [position for position in free if position not in set(taken)]
    return order + free


def blocks_of(
    trainers: int, tensor_parallel: int, engines: int, per_engine: int, *, colocate: bool
) -> list[int]:
    """Sizes of the blocks of a run in rank order, the trainer's first. Colocated, the blocks of both begin together."""
    if not colocate:
        return [*_cut(trainers, tensor_parallel), *[per_engine] * engines]
    return _cut(max(trainers, engines * per_engine), math.lcm(tensor_parallel, per_engine))


def _cut(total: int, size: int) -> list[int]:
    """`total` in pieces of `size`; the last one may be smaller."""
    return [min(size, total - start) for start in range(0, total, size)]


def first_straddling(places: Sequence[Hashable], size: int) -> int | None:
    """Index of the first group of `size` neighbours that lies on several places; None when there is none."""
    starts = range(0, len(places), size)
    return next((i for i, start in enumerate(starts) if len(set(places[start : start + size])) > 1), None)


def _first_fit(free: Sequence[int], places: Sequence[Hashable], size: int) -> list[int]:
    """The first `size` free positions of the first place that has as many; empty when none has."""
    by_place: dict[Hashable, list[int]] = {}
    for position in free:
        by_place.setdefault(places[position], []).append(position)
    return next((found[:size] for found in by_place.values() if len(found) >= size), [])
