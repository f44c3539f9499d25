"""Sums a sample's counts over its requests. Owns `Sample.SpecInfo` and `Sample.PrefixCacheInfo`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass
class _Tally:
    def to_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, int]) -> Self:
        """Returns the counts that `to_dict` has written. A count that `data` lacks is 0, and keys that are not counts
        are left out."""
        return cls(**{f.name: data[f.name] for f in dataclasses.fields(cls) if f.name in data})


@dataclass
class SpeculationCounts(_Tally):
    """Counts of speculative decoding, summed over the requests of a sample: `Sample.SpecInfo`."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Adds the counts in an answer's `meta_info`. Missing counts are 0."""
        self.spec_accept_token_num += meta_info.get("spec_accept_token_num", 0)
        self.spec_draft_token_num += meta_info.get("spec_draft_token_num", 0)
        self.spec_verify_ct += meta_info.get("spec_verify_ct", 0)
        self.completion_token_num += meta_info.get("completion_tokens", 0)

    @property
    def spec_accept_rate(self) -> float:
        """Returns accepted tokens divided by drafted tokens, or 0 without a draft."""
        return self.spec_accept_token_num / max(self.spec_draft_token_num, 1)

    @property
    def spec_accept_length(self) -> float:
        """Returns generated tokens divided by passes of the large model, or 0 without a pass."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0


@dataclass
class CacheCounts(_Tally):
    """Number of prompt tokens, and number of prompt tokens that the engine had in its cache: `Sample.PrefixCacheInfo`.
    Sums over requests. The ages of the cached tokens count weight updates (--flush-cache-interval): their sum, and the
    largest age of all requests."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0
    age_total: int = 0
    age_largest: int = 0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Adds the counts in an answer's `meta_info` (cached_tokens, prompt_tokens)."""
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)

    def add_ages(self, total: int, largest: int) -> None:
        """Adds the ages of a request's cached tokens."""
        self.age_total += total
        self.age_largest = max(self.age_largest, largest)

    def to_dict(self) -> dict[str, int]:
        """Returns slime's two counts, and the ages if the engine keeps its cache over updates."""
        ages = {"age_total", "age_largest"}
        return {name: count for name, count in super().to_dict().items() if count or name not in ages}

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Returns cached tokens divided by prompt tokens, or 0 without a request."""
        return self.cached_tokens / max(self.total_prompt_tokens, 1)
