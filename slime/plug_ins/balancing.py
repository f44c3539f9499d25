"""Splits samples into parts of near-equal length. slime's seqlen_balancing has this name."""

from __future__ import annotations

from collections.abc import Sequence

from slime.data.packing import karmarkar_karp


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[float], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Returns the positions of `seqlen_list` in `k_partitions` parts, see `slime.data.packing.karmarkar_karp`.

    Raises ValueError if there are fewer positions than parts.
    """
    if not 1 <= k_partitions <= len(seqlen_list):
        raise ValueError(
            f"k_partitions must be between 1 and the number of lengths, got {k_partitions} for {len(seqlen_list)}; "
            "use fewer parts"
        )
    return karmarkar_karp(seqlen_list, k_partitions, equal_size=equal_size)
