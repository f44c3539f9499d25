"""Muon for the matrices of a model, and AdamW for its other weights (--optimizer muon).

    m = b m + (1 - b) g;  u = scale * orthogonalize(m);  w = w - lr wd w - lr u

(Jordan, https://kellerjordan.github.io/posts/muon; Liu et al., https://arxiv.org/abs/2502.16982). The settings are
megatron-core's --muon-*, with its defaults. megatron-core's own class is not used: it needs emerging-optimizers, which
needs Python 3.12, and whose published version takes other arguments than the class passes.

Matrices are all weights with two dimensions except embeddings, output layers and single rows, as in megatron-core. Each
expert has its own matrices. Each data-parallel rank has the whole state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig
from torch import Tensor

from slime.bridges.megatron_versions import muon_settings
from slime.megatron_backend.model.gpt import HiddenGPTModel
from slime.megatron_backend.model.remainders import Group

COEFFICIENTS = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    # https://github.com/KellerJordan/modded-nanogpt, train_gpt_medium.py
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
"""Name -> (a, b, c) of each Newton-Schulz step; steps repeat them from the start."""
SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda outputs, inputs: max(outputs, inputs) ** 0.5,
    "shape_scaling": lambda outputs, inputs: max(1.0, outputs / inputs) ** 0.5,
    "unit_rms_norm": lambda outputs, inputs: (outputs / inputs) ** 0.5,
}
"""Name -> the factor of the update of a matrix [outputs, inputs]."""
_SETTINGS = ("lr", "weight_decay", "betas", "eps")


@dataclass(frozen=True)
class MuonSettings:
    """megatron-core's --muon-* settings."""

    momentum: float
    nesterov: bool
    steps: int
    scale: str
    factor: float
    precision: str
    coefficients: str
    split_qkv: bool
    whole: bool
    """True if tensor-parallel ranks gather a matrix. Otherwise each rank updates its part as a separate matrix."""

    @classmethod
    def of(cls, core: OptimizerConfig) -> MuonSettings:
        """Returns the settings in megatron-core's record, whose names depend on its version."""
        nesterov, coefficients = muon_settings(core)
        return cls(
            momentum=core.muon_momentum,
            nesterov=nesterov,
            steps=core.muon_num_ns_steps,
            scale=core.muon_scale_mode,
            factor=core.muon_extra_scale_factor,
            precision=core.muon_fp32_matmul_prec,
            coefficients=coefficients,
            split_qkv=core.muon_split_qkv,
            whole=core.muon_tp_mode != "blockwise",
        )


@dataclass(frozen=True)
class Matrix:
    """Properties of a matrix that decide its update by Muon."""

    parts: tuple[int, ...] = ()
    """Rows of q, k and v per group of heads, for a product that has all three."""
    axis: int | None = None
    """The dimension that tensor-parallel ranks split."""
    group: dist.ProcessGroup | None = None


def orthogonalize(x: Tensor, settings: MuonSettings) -> Tensor:
    """Returns U S' V^T for x = U S V^T [m, n] in float32, with S' near 1: some steps of a quintic Newton-Schulz
    iteration a X + (b A + c A A) X with A = X X^T."""
    tall = x.size(0) > x.size(1)
    made: Tensor = (x.mT if tall else x) / x.norm().clamp_min(1e-7)
    if settings.precision == "medium":
        made = made.bfloat16()
    table = COEFFICIENTS[settings.coefficients]
    with _precision(settings.precision):
        for step in range(settings.steps):
            a, b, c = table[step % len(table)]
            square = made @ made.mT
            made = torch.addmm(made, torch.addmm(square, square, square, beta=b, alpha=c), made, beta=a)
    made = made.float()
    return made.mT if tall else made


class Muon(torch.optim.Optimizer):
    """Muon over `matrices`, and AdamW over the other weights of `groups`, which are those of megatron-core's Adam.

    A matrix has the state momentum_buffer; another weight has those of torch's AdamW.
    """

    def __init__(self, groups: list[Group], matrices: dict[Tensor, Matrix], settings: MuonSettings) -> None:
        super().__init__(groups, {})
        self._matrices, self._settings = matrices, settings
        for group in self.param_groups:
            for weight in group["params"]:
                if weight in matrices:
                    self.state[weight] = {"momentum_buffer": torch.zeros_like(weight)}
                else:
                    moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
                    step = torch.zeros((), device=weight.device)
                    self.state[weight] = {"step": step, **moments}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates the weights from their gradients."""
        assert closure is None
        for group in self.param_groups:
            others = []
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                if weight in self._matrices:
                    self._update(weight, group["lr"], group["weight_decay"])
                else:
                    others.append(weight)
            self._step_adam(group, others)

    def _update(self, weight: Tensor, lr: float, weight_decay: float) -> None:
        settings, moving = self._settings, self.state[weight]["momentum_buffer"]
        grad = weight.grad
        assert grad is not None
        moving.lerp_(grad, 1 - settings.momentum)
        mean = grad.lerp(moving, settings.momentum) if settings.nesterov else moving
        weight.mul_(1 - lr * weight_decay)
        weight.add_(self._scaled(mean, self._matrices[weight]), alpha=-lr)

    def _scaled(self, mean: Tensor, matrix: Matrix) -> Tensor:
        """Returns the update of a matrix. q, k and v are separate matrices."""
        if not matrix.parts:
            return self._find_whole(mean, matrix)
        width = mean.size(1)
        of_groups = mean.view(-1, sum(matrix.parts), width).split(matrix.parts, dim=1)
        made = [self._find_whole(part.reshape(-1, width), matrix) for part in of_groups]
        groups = of_groups[0].size(0)
        return torch.cat([part.reshape(groups, -1, width) for part in made], dim=1).view_as(mean)

    def _find_whole(self, mean: Tensor, matrix: Matrix) -> Tensor:
        """Orthogonalizes a matrix. With `MuonSettings.whole`, ranks that have parts of the matrix gather it first."""
        settings, group = self._settings, matrix.group
        if not settings.whole or matrix.axis is None or group is None or group.size() == 1:
            made = orthogonalize(mean, settings)
            return made * (settings.factor * SCALES[settings.scale](*made.shape))
        mean = mean.contiguous()
        shards = [torch.empty_like(mean) for _ in range(group.size())]
        dist.all_gather(shards, mean, group=group)
        made = orthogonalize(torch.cat(shards, dim=matrix.axis), settings)
        mine = made.chunk(group.size(), dim=matrix.axis)[group.rank()]
        return mine * (settings.factor * SCALES[settings.scale](*made.shape))

    def _step_adam(self, group: Group, weights: list[Tensor]) -> None:
        if weights:
            adam = torch.optim.AdamW(
                [{"params": weights, **{name: group[name] for name in _SETTINGS}}], fused=True
            )
            for weight in weights:
                adam.state[weight] = self.state[weight]
            adam.step()

    def load_state_dict(self, state_dict: Group) -> None:
        """Loads the state. Removes the step count of matrices, which megatron-core sets for all weights. torch leaves
        the other counts on the host, and the fused AdamW needs them on the device of the weights."""
        super().load_state_dict(state_dict)
        for weight, state in self.state.items():
            if weight in self._matrices:
                state.pop("step", None)
            else:
                state["step"] = state["step"].to(weight.device)


def find_matrices(parts: Sequence[HiddenGPTModel], settings: MuonSettings) -> dict[Tensor, Matrix]:
    """Returns the matrices of a model by the weights that the optimizer updates: the model's, or their float32
    copies."""
    found = {}
    for inner in parts:
        qkv = _parts_of_qkv(inner) if settings.split_qkv else ()
        for name, weight in inner.named_parameters():
            if weight.requires_grad and _is_matrix(weight):
                axis = getattr(weight, "partition_dim", -1)
                of_expert = ".experts." in name and ".shared_experts." not in name
                group = (
                    parallel_state.get_expert_tensor_parallel_group()
                    if of_expert
                    else parallel_state.get_tensor_model_parallel_group()
                )
                split = name.endswith("linear_qkv.weight") and qkv and weight.size(0) % sum(qkv) == 0
                found[getattr(weight, "main_param", weight)] = Matrix(
                    qkv if split else (), axis if axis in (0, 1) else None, group
                )
    return found


def _is_matrix(weight: Tensor) -> bool:
    outside = getattr(weight, "is_embedding_or_output_parameter", False)
    return weight.dim() == 2 and min(weight.shape) > 1 and not outside


def _parts_of_qkv(inner: HiddenGPTModel) -> tuple[int, ...]:
    """Returns the rows of q (with its gate, if attention has one), k and v per group of heads. Empty where a rank has
    only a part of a group."""
    config, ranks = inner.config, parallel_state.get_tensor_model_parallel_world_size()
    if config.num_query_groups % ranks:
        return ()
    heads = config.num_attention_heads // config.num_query_groups
    gated = 2 if getattr(config, "attention_output_gate", False) else 1
    return (gated * heads * config.kv_channels, config.kv_channels, config.kv_channels)


@contextmanager
def _precision(name: str) -> Iterator[None]:
    """Sets the precision of torch's float32 products: medium, high or highest."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
