"""Orders the GPUs of a run so that NVLink connects the GPUs that communicate most. Contains pure functions only.

A domain is a set of GPUs that NVLink connects: a node, or a rack of nodes (GB200 NVL72). GPUs are assigned in blocks. A
block is a tensor-parallel group of the trainer, or the GPUs of an engine. A block goes to one node if a node has room,
else to one domain. If no domain has room, the block is cut into two halves, which are assigned separately.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence


def split_domains(domains: Sequence[str], nodes: Sequence[str], size: int | None) -> list[Hashable]:
    """Returns each GPU's domain, for GPUs that are sorted by domain and node.

    `domains` holds the domain that the GPU driver reports, or "" if it reports none. With `size`
    (--nvlink-domain-size), each domain is cut into pieces of `size` GPUs, and GPUs with unknown domain are cut in the
    order of their nodes. Without `size`, a GPU with unknown domain has its node as its domain.
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
    """Returns positions of GPUs in the order in which blocks with these sizes take them: first fit, nodes before
    domains."""
    free = list(range(len(nodes)))
    order: list[int] = []
    waiting = list(reversed(blocks))
    while waiting:
        size = waiting.pop()
        taken = _first_fit(free, nodes, size) or _first_fit(free, domains, size)
        if not taken:
            assert size > 1, (free, blocks)  # the number of GPUs equals the sum of the blocks
            waiting += [size - size // 2, size // 2]
        order += taken
        free = [position for position in free if position not in set(taken)]
    return order + free


def compute_blocks(
    trainers: int, tensor_parallel: int, engines: int, per_engine: int, *, colocate: bool
) -> list[int]:
    """Returns sizes of the blocks of a run in rank order, the trainer's first. Colocated blocks start at the same
    GPUs."""
    if not colocate:
        return [*_cut(trainers, tensor_parallel), *[per_engine] * engines]
    return _cut(max(trainers, engines * per_engine), math.lcm(tensor_parallel, per_engine))


def _cut(total: int, size: int) -> list[int]:
    """Cuts `total` into pieces of `size`. The last piece may be smaller."""
    return [min(size, total - start) for start in range(0, total, size)]


def first_straddling(domains: Sequence[Hashable], size: int) -> int | None:
    """Returns the index of the first group of `size` neighbours that spans several nodes or domains, or None."""
    starts = range(0, len(domains), size)
    return next((i for i, start in enumerate(starts) if len(set(domains[start : start + size])) > 1), None)


def _first_fit(free: Sequence[int], domains: Sequence[Hashable], size: int) -> list[int]:
    """Returns the first `size` free positions in the first node or domain with enough free positions, or an empty
    list."""
    by_domain: dict[Hashable, list[int]] = {}
    for position in free:
        by_domain.setdefault(domains[position], []).append(position)
    return next((found[:size] for found in by_domain.values() if len(found) >= size), [])
