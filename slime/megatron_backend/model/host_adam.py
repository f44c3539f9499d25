"""Adam whose main weights and moments are on the host, where it also computes (--optimizer-cpu-offload), or in files
(--stream-optimizer-state-to-disk).

    gradients -> host (pinned) -> torch's fused AdamW on the CPU -> weights of the model's dtype -> GPU

megatron-core's HybridDeviceOptimizer is not used for three reasons. Without Transformer Engine it fails when it is
built. Its memory for bf16 weights is not pinned. A resumed run moves the states of its GPU part to the host.

megatron-core's distributed optimizer treats this class as Transformer Engine's FusedAdam with decoupled gradients: the
groups hold the rank's part of the model's own weights, and main weights are a state ("master_param").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from slime.megatron_backend.host_memory import computing, pinned, unpin
from slime.megatron_backend.model.state_files import StateFile

Group: TypeAlias = dict[str, Any]
"""The settings of some weights, and the weights as `params`."""
_SETTINGS = ("lr", "weight_decay", "betas", "eps")
_MOMENTS = ("exp_avg", "exp_avg_sq")


PART_BYTES = 2**28
"""Bytes of a part's fp32 gradients, for a state in memory. A part has at least one weight of any size."""
BUFFERS = 3


@dataclass(frozen=True)
class OptimizerFiles:
    """Settings of the files that hold the state of the host's weights."""

    directory: str
    part_bytes: int
    dtype: torch.dtype
    """The dtype of moments in the files. Adam computes in float32."""


class HostAdam(torch.optim.Optimizer):
    """AdamW over `groups` of a distributed optimizer, with fp32 main weights and moments of the weights on the host.

    `fraction` of the elements, those of the first weights, are updated on the host. The others stay on the device.
    Weights are copied in parts of about `PART_BYTES`, or of `files.part_bytes`: the host updates one part while the
    gradients of the next parts arrive. `threads` compute on the host. The host needs 12 bytes per element, or a file
    with them, and `BUFFERS` pinned buffers with the size of the largest part.

    m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; w = w - lr (m' / (sqrt(v') + eps) + wd w), with m' and v' corrected
    for their start at zero (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101).
    """

    def __init__(
        self, groups: list[Group], *, fraction: float, threads: int, files: OptimizerFiles | None = None
    ) -> None:
        super().__init__([{**group, "params": []} for group in groups], {})
        for own, group in zip(self.param_groups, groups, strict=True):
            own["params"] = group["params"]  # parts of weights: torch would refuse these, they are not leaves
        weights = [weight for group in groups for weight in group["params"]]
        self._device = weights[0].device if weights else torch.device("cpu")
        self._threads = threads
        left = fraction * sum(weight.numel() for weight in weights)
        host: set[Tensor] = set()
        for weight in weights:
            if left > 0:
                host.add(weight)
                left -= weight.numel()
        parts = [
            (group, part)
            for group in self.param_groups
            for part in _parts(
                [weight for weight in group["params"] if weight in host],
                PART_BYTES if files is None else files.part_bytes,
            )
        ]
        most = max((_elements(part) for _, part in parts), default=0)
        count = min(BUFFERS, len(parts))
        self._pinned = pinned(4 * count * most, self._device, "the optimizer's gradients", threads)
        buffers = self._pinned.view(torch.float32).split(most) if parts else []
        # The system zeroes memory when it is first written. One thread writes about 1 GB/s, and a rank can have 80 GB.
        with computing(threads):
            self._on_host = [
                _HostPart(self, group, part, buffers[i % count], files)
                for i, (group, part) in enumerate(parts)
            ]
        self._on_device = [
            _DevicePart(self, group, kept)
            for group in self.param_groups
            if (kept := [weight for weight in group["params"] if weight not in host])
        ]
        self._copies = torch.cuda.Stream() if self._on_host else None
        self.take_weights()

    @torch.no_grad()
    def take_weights(self) -> None:
        """Copies the model's weights to the main weights, after they were loaded or changed outside of the
        optimizer."""
        with computing(self._threads):
            for part in self._on_host:
                part.take()
        for device_part in self._on_device:
            device_part.take()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates the model's weights from each weight's `decoupled_grad`."""
        assert closure is None
        parts = self._on_host
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            for part in parts[:BUFFERS]:
                part.fetch()
        for device_part in self._on_device:
            device_part.update()
        with computing(self._threads):
            for number, part in enumerate(parts):
                part.update()
                with torch.cuda.stream(self._copies):
                    part.send()
                    # The stream's order puts this copy after the copy that reads the same buffer.
                    for following in parts[number + BUFFERS : number + BUFFERS + 1]:
                        following.fetch()
        if self._copies is not None:
            torch.cuda.current_stream().wait_stream(self._copies)

    def get_unscaled_state(self, weight: Tensor, name: str) -> Tensor:
        """Returns a state of a weight. megatron-core calls this when it saves."""
        value: Tensor = self.state[weight][name]
        return value.float()  # the same tensor, or the copy of a moment in a file of another dtype

    @torch.no_grad()
    def set_scaled_state(self, weight: Tensor, name: str, value: Tensor) -> None:
        """Loads a state of a weight."""
        self.state[weight][name].copy_(value)

    def state_dict(self) -> Group:
        """Returns settings and step counts. megatron-core reads the other states one by one."""
        steps = {i: {"step": state["step"]} for i, state in enumerate(self.state.values())}
        step = next((int(state["step"]) for state in steps.values()), 0)
        groups = [
            {**group, "params": len(group["params"]) * [0], "step": step} for group in self.param_groups
        ]
        return {"state": steps, "param_groups": groups}

    def load_state_dict(self, state_dict: Group) -> None:
        """Loads the step count of `state_dict`."""
        for state in self.state.values():
            state["step"].fill_(float(state_dict["param_groups"][0]["step"]))

    def close(self) -> None:
        """Unpins the gradients' memory. No step may follow."""
        unpin(self._pinned, self._device)
        self._on_host.clear()
        self._on_device.clear()


def _elements(weights: list[Tensor]) -> int:
    return sum(weight.numel() for weight in weights)


def _parts(weights: list[Tensor], size: int) -> list[list[Tensor]]:
    """Returns lists of consecutive weights whose gradients together have `size` bytes."""
    parts: list[list[Tensor]] = []
    for weight in weights:
        if parts and 4 * (_elements(parts[-1]) + weight.numel()) <= size:
            parts[-1].append(weight)
        else:
            parts.append([weight])
    return parts


def _adam(
    owner: HostAdam, weights: list[Tensor], masters: list[Tensor], file: StateFile | None = None
) -> torch.optim.AdamW:
    """Returns torch's AdamW over `masters`, which shares its states with those of `weights` in `owner`. The moments are
    those of `file`, if it is given."""
    adam = torch.optim.AdamW([{"params": masters}], fused=True)
    for i, (weight, master) in enumerate(zip(weights, masters, strict=True)):
        state = owner.state[weight]
        state.update(
            step=torch.zeros((), device=master.device),
            exp_avg=torch.zeros_like(master) if file is None else file.first[i],
            exp_avg_sq=torch.zeros_like(master) if file is None else file.second[i],
            master_param=master,
        )
        adam.state[master] = state
    return adam


def _advance(adam: torch.optim.AdamW, group: Group) -> None:
    adam.param_groups[0].update({name: group[name] for name in _SETTINGS})
    adam.step()


class _HostPart:
    """Weights of a group that are updated on the host, in one call. `buffer`: pinned memory for the gradients."""

    def __init__(
        self,
        owner: HostAdam,
        group: Group,
        weights: list[Tensor],
        buffer: Tensor,
        files: OptimizerFiles | None,
    ) -> None:
        self._group, self._weights = group, weights
        self._grads = list(buffer[: _elements(weights)].split([weight.numel() for weight in weights]))
        sizes = [weight.numel() for weight in weights]
        self._file = None if files is None else StateFile(files.directory, sizes, files.dtype)
        self._masters = (
            [torch.empty_like(grad) for grad in self._grads] if self._file is None else self._file.main
        )
        self._adam = _adam(owner, weights, self._masters, self._file)
        self._owner = owner
        for master, grad in zip(self._masters, self._grads, strict=True):
            master.grad = grad
        self._arrived = torch.cuda.Event()

    def take(self) -> None:
        """Copies the weights to the main weights, through the pinned memory of the gradients."""
        for weight, master, grad in zip(self._weights, self._masters, self._grads, strict=True):
            grad.copy_(weight.detach().float())
            master.copy_(grad)
        if self._file is not None:
            self._file.release()

    def fetch(self) -> None:
        """Copies the gradients to the host, and lets the kernel read the state from its file."""
        if self._file is not None:
            self._file.fetch()
        for weight, grad in zip(self._weights, self._grads, strict=True):
            grad.copy_(weight.decoupled_grad.float(), non_blocking=True)  # type: ignore[attr-defined]
        self._arrived.record()

    def update(self) -> None:
        """Waits for the gradients and updates the main weights."""
        self._arrived.synchronize()
        if self._file is None or self._file.first[0].dtype == torch.float32:
            _advance(self._adam, self._group)
        else:
            self._advance_in_float32()

    def _advance_in_float32(self) -> None:
        """Updates the main weights, with float32 copies of the moments in the file."""
        for weight, master in zip(self._weights, self._masters, strict=True):
            state = self._owner.state[weight]
            self._adam.state[master] = state | {name: state[name].float() for name in _MOMENTS}
        _advance(self._adam, self._group)
        for weight, master in zip(self._weights, self._masters, strict=True):
            for name in _MOMENTS:
                self._owner.state[weight][name].copy_(self._adam.state[master][name])
            self._adam.state[master] = self._owner.state[weight]

    def send(self) -> None:
        """Copies the weights to the device."""
        for weight, master, grad in zip(self._weights, self._masters, self._grads, strict=True):
            # The gradient's pinned memory is free now. Half of the memory holds the weight in bf16 during the copy.
            out = grad.view(weight.dtype)[: weight.numel()]
            out.copy_(master)
            weight.detach().copy_(out, non_blocking=True)
        if self._file is not None:
            self._file.release()


class _DevicePart:
    """Weights of a group that are updated on the device."""

    def __init__(self, owner: HostAdam, group: Group, weights: list[Tensor]) -> None:
        self._group, self._weights = group, weights
        self._masters = [weight.detach().float() for weight in weights]  # an fp32 weight is not copied
        self._adam = _adam(owner, weights, self._masters)

    def take(self) -> None:
        """Copies the weights to the main weights."""
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.copy_(weight)

    def update(self) -> None:
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = weight.decoupled_grad.float()  # type: ignore[attr-defined]
        _advance(self._adam, self._group)
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = None
            if weight.dtype != master.dtype:
                weight.detach().copy_(master)
