"""Adam whose main weights and moments lie on the host, where it also computes (--optimizer-cpu-offload).

    gradients -> host (pinned) -> torch's fused AdamW on the CPU -> weights of the model's dtype -> GPU

megatron-core's HybridDeviceOptimizer is not used: without Transformer Engine it fails when it is built, its memory for
bf16 weights is not pinned, and a resumed run moves the states of its GPU part to the host.

megatron-core's distributed optimizer treats this class as Transformer Engine's FusedAdam with decoupled gradients: the
groups hold the rank's part of the model's own weights, and main weights are a state ("master_param").
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from slime.megatron_backend.host_memory import pinned, unpin

_SETTINGS = ("lr", "weight_decay", "betas", "eps")


class HostAdam(torch.optim.Optimizer):
    """AdamW over `groups` of a distributed optimizer: fp32 main weights and moments of each weight on the host.

    `fraction` of the elements are updated on the host, those of the first weights. The others stay on the device.
    `overlap`: each weight is updated as soon as its gradient has arrived, while other weights travel; otherwise one
    direction after the other. The result is the same. Host memory: 16 bytes per element, of which the 4 of the
    gradients are pinned.

    m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; w = w - lr (m' / (sqrt(v') + eps) + wd w), with m' and v' corrected
    for their start at zero (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101).
    """

    def __init__(self, groups: list[dict[str, Any]], *, fraction: float, overlap: bool) -> None:
        super().__init__([{**group, "params": []} for group in groups], {})
        for own, group in zip(self.param_groups, groups, strict=True):
            own["params"] = group["params"]  # parts of weights, which torch would refuse as no leaves
        weights = [weight for group in groups for weight in group["params"]]
        self._device = weights[0].device if weights else torch.device("cpu")
        left = fraction * sum(weight.numel() for weight in weights)
        host: set[Tensor] = set()
        for weight in weights:
            if left > 0:
                host.add(weight)
                left -= weight.numel()
        size = 4 * sum(weight.numel() for weight in host)
        self._pinned = pinned(size, self._device, "the optimizer's gradients")
        self._copies = torch.cuda.Stream() if overlap else None
        self._parts: list[_HostPart | _DevicePart] = []
        slab = self._pinned.view(torch.float32)
        for group in self.param_groups:
            moved = [weight for weight in group["params"] if weight in host]
            kept = [weight for weight in group["params"] if weight not in host]
            for of_part in [[weight] for weight in moved] if overlap else [moved]:
                count = sum(weight.numel() for weight in of_part)
                if of_part:
                    self._parts.append(_HostPart(self, group, of_part, slab[:count]))
                slab = slab[count:]
            if kept:
                self._parts.append(_DevicePart(self, group, kept))
        self.take_weights()

    @torch.no_grad()
    def take_weights(self) -> None:
        """Set the main weights to the model's, which were loaded or changed outside of the optimizer."""
        for weight, state in self.state.items():
            state["master_param"].copy_(weight)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the model's weights from `decoupled_grad` of each."""
        assert closure is None
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream())
        for part in self._parts:
            with self._copying():
                part.fetch()
        for part in self._parts:
            part.update()

    def _copying(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._copies or torch.cuda.current_stream())

    def get_unscaled_state(self, weight: Tensor, name: str) -> Tensor:
        """A state of a weight, as megatron-core asks for it when it saves."""
        value: Tensor = self.state[weight][name]
        return value

    @torch.no_grad()
    def set_scaled_state(self, weight: Tensor, name: str, value: Tensor) -> None:
        """Load a state of a weight."""
        self.state[weight][name].copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Settings and step counts. megatron-core takes the other states one by one."""
        steps = {i: {"step": state["step"]} for i, state in enumerate(self.state.values())}
        step = next((int(state["step"]) for state in steps.values()), 0)
        groups = [
            {**group, "params": len(group["params"]) * [0], "step": step} for group in self.param_groups
        ]
        return {"state": steps, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the step count of `state_dict`."""
        for state in self.state.values():
            state["step"].fill_(float(state_dict["param_groups"][0]["step"]))

    def close(self) -> None:
        """Unpin the gradients' memory. No step may follow."""
        unpin(self._pinned, self._device)
        self._parts.clear()


def _adam(owner: HostAdam, weights: list[Tensor], masters: list[Tensor]) -> torch.optim.AdamW:
    """torch's AdamW over `masters`, whose states are those of `weights` in `owner`."""
    adam = torch.optim.AdamW([{"params": masters}], fused=True)
    for weight, master in zip(weights, masters, strict=True):
        state = owner.state[weight]
        state.update(
            step=torch.zeros((), device=master.device),
            exp_avg=torch.zeros_like(master),
            exp_avg_sq=torch.zeros_like(master),
            master_param=master,
        )
        adam.state[master] = state
    return adam


def _advance(adam: torch.optim.AdamW, group: dict[str, Any]) -> None:
    adam.param_groups[0].update({name: group[name] for name in _SETTINGS})
    adam.step()


class _HostPart:
    """Weights of a group that are updated on the host, in one call."""

    def __init__(self, owner: HostAdam, group: dict[str, Any], weights: list[Tensor], grads: Tensor) -> None:
        self._group, self._weights = group, weights
        self._grads = list(grads.split([weight.numel() for weight in weights]))
        self._masters = [torch.empty_like(grad) for grad in self._grads]
        self._adam = _adam(owner, weights, self._masters)
        for master, grad in zip(self._masters, self._grads, strict=True):
            master.grad = grad
        self._arrived = torch.cuda.Event()

    def fetch(self) -> None:
        for weight, grad in zip(self._weights, self._grads, strict=True):
            grad.copy_(weight.decoupled_grad.float(), non_blocking=True)  # type: ignore[attr-defined]
        self._arrived.record()

    def update(self) -> None:
        self._arrived.synchronize()
        _advance(self._adam, self._group)
        for weight, master, grad in zip(self._weights, self._masters, self._grads, strict=True):
            # The gradient's pinned memory is free now. Half of it holds the weight in bf16 on its way.
            out = grad.view(weight.dtype)[: weight.numel()]
            out.copy_(master)
            weight.detach().copy_(out, non_blocking=True)


class _DevicePart:
    """Weights of a group that are updated where they lie."""

    def __init__(self, owner: HostAdam, group: dict[str, Any], weights: list[Tensor]) -> None:
        self._group, self._weights = group, weights
        self._masters = [weight.detach().float() for weight in weights]  # itself, if it is fp32
        self._adam = _adam(owner, weights, self._masters)

    def fetch(self) -> None:
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = weight.decoupled_grad.float()  # type: ignore[attr-defined]

    def update(self) -> None:
        _advance(self._adam, self._group)
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = None
            if weight.dtype != master.dtype:
                weight.detach().copy_(master)
