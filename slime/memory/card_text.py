"""Describes the memory on a card: the share of every process, and the bytes that no visible process owns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from slime.memory.cards import CardMemory
from slime.plan.units import GIB, amount


def card_lines(cards: Sequence[CardMemory], roles: Mapping[int, str]) -> Iterator[str]:
    """Yields one line per card: its processes by size, each with its role and process id."""
    for card in cards:
        by_size = sorted(card.by_process.items(), key=lambda pair: -pair[1])
        shown = [f"{roles.get(pid, 'another program')} (pid {pid}) {amount(size)}" for pid, size in by_size]
        if (hidden := card.used - sum(card.by_process.values())) > 0.05 * GIB:
            shown.append(f"processes that the driver does not show here {amount(hidden)}")
        yield f"card {card.index}: {amount(card.used)} of {amount(card.total)} in use: {', '.join(shown)}"
