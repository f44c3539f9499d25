"""Rotary position embeddings: settings of config.json, their checks, frequencies. The module imports torch only to
compute.

The kinds and their formulas are those of transformers' ROPE_INIT_FUNCTIONS, against which the tests compare: `default`,
`linear` (Chen et al. 2306.15595), `llama3`, `yarn` (Peng et al. 2309.00071) and `proportional`, which turns the first
pairs of a head with the frequencies of the whole head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

Hf: TypeAlias = Mapping[str, Any]
"""A parsed config.json, or a table in it."""

KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "proportional": ((), ("factor", "partial_rotary_factor")),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"),
    ),
}
"""Kind -> (required settings, optional settings)."""

_COMMON = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "max_position_embeddings",
    "mrope_section",
}


@dataclass(frozen=True)
class Rope:
    """One rotary embedding. It rotates the first `size` dimensions of a head by `position * frequency`. cos and sin are
    multiplied by `amplitude`."""

    theta: float
    size: int
    kind: str = "default"
    settings: Hf = field(default_factory=dict)
    """Settings of this kind."""
    interleaved: bool = False
    """Dimension 2 k is paired with dimension 2 k + 1. Otherwise k is paired with k + size / 2."""
    sections: tuple[int, ...] = ()
    """Number of frequencies that turn with each axis of the position: time, height, width. Empty for one axis."""
    sections_alternate: bool = False
    """The axes alternate from frequency to frequency. Otherwise the frequencies of an axis follow each other."""

    @property
    def amplitude(self) -> float:
        """Returns the factor of cos and sin: 1, except for YaRN (its "attention factor")."""
        if self.kind != "yarn":
            return 1.0
        if (fixed := self.settings.get("attention_factor")) is not None:
            return float(fixed)
        factor = self.settings["factor"]
        upper, lower = self.settings.get("mscale"), self.settings.get("mscale_all_dim")
        if upper and lower:
            return mscale(factor, upper) / mscale(factor, lower)
        return mscale(factor, 1.0)

    def frequencies(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Returns the angle per position: fp32 [size / 2]."""
        import torch

        steps = torch.arange(0, self.size, 2, dtype=torch.float32, device=device) / self.size
        plain: torch.Tensor = 1.0 / self.theta**steps
        if self.kind == "proportional":
            turning = int(self.settings.get("partial_rotary_factor", 1.0) * self.size // 2)
            return torch.where(steps * self.size < 2 * turning, plain / self.settings.get("factor", 1.0), 0.0)
        if self.kind == "linear":
            plain = plain / self.settings["factor"]
        if self.kind == "llama3":
            return self._llama3(plain)
        if self.kind == "yarn":
            return self._yarn(plain)
        return plain

    def _llama3(self, plain: torch.Tensor) -> torch.Tensor:
        """Divides the frequencies of long waves by the factor, keeps those of short waves, and interpolates between the
        two."""
        import torch

        factor, low, high, context = (self.settings[key] for key in KINDS["llama3"][0])
        waves = 2 * math.pi / plain
        share = (context / waves - low) / (high - low)
        between = (1 - share) * plain / factor + share * plain
        return torch.where(
            waves > context / low, plain / factor, torch.where(waves < context / high, plain, between)
        )

    def _yarn(self, plain: torch.Tensor) -> torch.Tensor:
        """Ramps over the dimensions from the plain frequencies to the frequencies divided by the factor."""
        import torch

        context = self.settings["original_max_position_embeddings"]
        first, last = (
            self.size * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(self.theta))
            for turns in (self.settings.get("beta_fast") or 32, self.settings.get("beta_slow") or 1)
        )
        if self.settings.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.size - 1)
        if first == last:
            last += 0.001  # a step instead of a ramp
        index = torch.arange(self.size // 2, dtype=torch.float32, device=plain.device)
        ramp = ((index - first) / (last - first)).clamp(0, 1)
        ramped: torch.Tensor = plain / self.settings["factor"] * ramp + plain * (1 - ramp)
        return ramped

    @property
    def axes(self) -> tuple[int, ...]:
        """Returns the axis of the position for each frequency: 0 time, 1 height, 2 width."""
        half = self.size // 2
        if not self.sections_alternate:
            return tuple(axis for axis, count in enumerate(self.sections) for _ in range(count))
        ends = [3 * count for count in self.sections]
        return tuple(k % 3 if k < ends[k % 3] else 0 for k in range(half))

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps positions to (cos, sin), each fp32 [P, 1, size / 2]. The positions are [P] int64, or [3, P] for an
        embedding with `sections`."""
        turns = positions[list(self.axes)].t() if positions.dim() == 2 else positions[:, None]
        turned = turns.float()[:, None] * self.frequencies(positions.device)
        return turned.cos() * self.amplitude, turned.sin() * self.amplitude


def mscale(factor: float, weight: float) -> float:
    """Returns YaRN's factor for a context that is `factor` times longer."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_record(hf: Hf) -> Hf:
    """Returns the rotary settings. Older files have them at the top level and in `rope_scaling`, newer files in
    `rope_parameters`."""
    top = {key: hf[key] for key in ("rope_theta", "partial_rotary_factor") if key in hf}
    context = {"max_position_embeddings": hf.get("max_position_embeddings")}
    return {**context, **top, **(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}


def read_rope(
    hf: Hf,
    head_dim: int,
    *,
    fraction: float = 1.0,
    whole: bool = False,
    interleaved: bool = False,
    record: Hf | None = None,
    alternating: tuple[int, ...] = (),
) -> Rope:
    """Returns the rotary embedding in config.json (or in `record`, for a model with several).

    `fraction` is the rotated part of a head if config.json does not have it. `whole` means that the family rotates
    whole heads only. `alternating` means that the axes of image positions alternate, with these `sections` by
    default. Raises ValueError for an unknown kind or setting, a missing setting, or an odd part of a head.
    """
    settings = dict(rope_record(hf) if record is None else record)
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in KINDS:
        why = (
            "its frequencies change with the length" if kind in ("dynamic", "longrope") else "it is not known"
        )
        raise ValueError(
            f"rope_type in config.json must be one of {', '.join(KINDS)}, got {kind!r}; {why}, so trainer and engine "
            "would not compute one policy"
        )
    if "rope_theta" not in settings:
        raise ValueError("config.json must give rope_theta, got none; the checkpoint is incomplete")
    needed, optional = KINDS[kind]
    for key in needed:
        if settings.get(key) is None:
            raise ValueError(
                f"config.json must give {key} for rope_type {kind}, got none; the checkpoint is incomplete"
            )
    known = {*_COMMON, *needed, *optional}
    if unknown := sorted(key for key in settings if key not in known and settings[key] is not None):
        raise ValueError(
            f"rotary settings in config.json must be among {', '.join(sorted(known))} for rope_type {kind}, got "
            f"{', '.join(unknown)}; what they change is not known"
        )
    part = 1.0 if kind == "proportional" else settings.get("partial_rotary_factor", fraction)
    size = _rotated(part, head_dim, whole)
    kept = {key: settings[key] for key in (*needed, *optional) if settings.get(key) is not None}
    return Rope(
        *(float(settings["rope_theta"]), size, kind, kept, interleaved),
        sections=_sections(settings.get("mrope_section"), size) or alternating,
        sections_alternate=bool(alternating),
    )


def _sections(sections: Sequence[int] | None, size: int) -> tuple[int, ...]:
    """Returns the number of frequencies per axis of image positions. Raises ValueError unless they add up."""
    if sections is None:
        return ()
    if len(sections) != 3 or sum(sections) != size // 2:
        raise ValueError(
            f"mrope_section in config.json must have three numbers with the sum {size // 2}, got {sections}; the "
            "checkpoint is incomplete"
        )
    return tuple(sections)


def _rotated(fraction: float, head_dim: int, whole: bool) -> int:
    if whole and fraction != 1.0:
        raise ValueError(
            f"partial_rotary_factor in config.json must be 1, got {fraction}; it is not supported"
        )
    rotated = int(head_dim * fraction)
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise ValueError(
            "partial_rotary_factor in config.json must leave an even part of a head to rotate, got "
            f"{fraction} of head_dim {head_dim}"
        )
    return rotated
