"""Adam whose main weights and moments are on the host, where it also computes (--optimizer-cpu-offload), or in files
(--stream-optimizer-state-to-disk).

    gradients -> host (pinned) -> torch's fused AdamW on the CPU -> weights of the model's dtype -> GPU

Each thread updates one slice of a weight at a time. torch's own threads would each take an equal share of a weight, and
every thread would wait for a thread whose core another process uses: on an H200's host with 16 cores, two busy
processes made such a step 3.6 times as long.

megatron-core's HybridDeviceOptimizer is not used for three reasons. Without Transformer Engine it fails when it is
built. Its memory for bf16 weights is not pinned. A resumed run moves the states of its GPU part to the host.

megatron-core's distributed optimizer treats this class as Transformer Engine's FusedAdam with decoupled gradients: the
groups hold the rank's part of the model's own weights, and main weights are a state ("master_param"). With
`fraction=0`, all weights are updated on the device, which --use-precision-aware-optimizer needs for remainders.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from slime.megatron_backend.host_memory import computing, pinned, unpin
from slime.megatron_backend.model.remainders import (
    MOMENTS,
    Group,
    RemainderPart,
    apply_adamw,
    group_by_size,
    join_weights,
    split_weights,
)
from slime.megatron_backend.model.state_files import StateFile

_SETTINGS = ("lr", "weight_decay", "betas", "eps")

PART_BYTES = 2**28
"""Bytes of a part's fp32 gradients, for a state in memory. A part has at least one weight of any size."""
BUFFERS = 3
SLICE = 2**21
"""Elements that one thread updates at a time, a multiple of the elements of torch's vectors."""


@dataclass(frozen=True)
class OptimizerFiles:
    """Settings of the files that hold the state of the host's weights."""

    directory: str
    part_bytes: int
    dtype: torch.dtype
    """The dtype of moments in the files. Adam computes in float32."""


def choose_host_weights(weights: list[Tensor], fraction: float) -> set[Tensor]:
    """Returns the weights whose Adam is on the host: about `fraction` of the elements.

    The largest weights come first, so that small ones fill the rest: an embedding can have 4 GB of state. A weight is
    left out if it would exceed the fraction by more than the elements that are missing without it.
    """
    left = fraction * sum(weight.numel() for weight in weights)
    host = set[Tensor]()
    for weight in sorted(weights, key=Tensor.numel, reverse=True):
        if weight.numel() < 2 * left:
            host.add(weight)
            left -= weight.numel()
    return host


class HostAdam(torch.optim.Optimizer):
    """AdamW over `groups` of a distributed optimizer, with fp32 main weights and moments of the weights on the host.

    `fraction` of the elements are updated on the host (`choose_host_weights`). The others stay on the device, with
    12 bytes per element, or 10 for bfloat16 weights with `remainders` (`slime.megatron_backend.model.remainders`).
    Weights are copied in parts of about `PART_BYTES`, or of `files.part_bytes`: the host updates two parts while the
    gradients of the next part arrive. `threads` compute on the host. The host needs 12 bytes per element, or a file
    with them, and `BUFFERS` pinned buffers with the size of the largest part.

    m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; w = w - lr (m' / (sqrt(v') + eps) + wd w), with m' and v' corrected
    for their start at zero (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101).
    """

    def __init__(
        self,
        groups: list[Group],
        *,
        fraction: float,
        threads: int,
        files: OptimizerFiles | None = None,
        remainders: bool = False,
    ) -> None:
        super().__init__([{**group, "params": []} for group in groups], {})
        for own, group in zip(self.param_groups, groups, strict=True):
            own["params"] = group["params"]  # parts of weights: torch would refuse these, they are not leaves
        weights = [weight for group in groups for weight in group["params"]]
        self._device = weights[0].device if weights else torch.device("cpu")
        self._threads = threads
        host = choose_host_weights(weights, fraction)
        parts = [
            (group, part)
            for group in self.param_groups
            for part in group_by_size(
                [weight for weight in group["params"] if weight in host],
                Tensor.numel,
                (PART_BYTES if files is None else files.part_bytes) // 4,
            )
        ]
        most = max((sum(map(Tensor.numel, part)) for _, part in parts), default=0)
        count = min(BUFFERS, len(parts))
        self._pinned = pinned(4 * count * most, self._device, "the optimizer's gradients", threads)
        buffers = self._pinned.view(torch.float32).split(most) if parts else []
        # The system zeroes memory when it is first written. One thread writes about 1 GB/s, and a rank can have 80 GB.
        with computing(threads):
            self._on_host = [
                _HostPart(self, group, part, buffers[i % count], files)
                for i, (group, part) in enumerate(parts)
            ]
        self._on_device: list[_DevicePart | RemainderPart] = []
        for group in self.param_groups:
            kept = [weight for weight in group["params"] if weight not in host]
            divided = [weight for weight in kept if remainders and weight.dtype == torch.bfloat16]
            whole = [weight for weight in kept if not remainders or weight.dtype != torch.bfloat16]
            self._on_device += [_DevicePart(self, group, whole)] if whole else []
            self._on_device += [RemainderPart(self, group, divided)] if divided else []
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
        # Threads that start here compute with one thread each.
        with computing(1), ThreadPoolExecutor(self._threads) as threads, torch.cuda.stream(self._copies):
            for number in range(len(parts) + 1):
                if number < len(parts):
                    parts[number].update(threads)
                if number > 0:
                    parts[number - 1].send()
                    # The stream's order puts this copy after the copy that reads the same buffer.
                    for following in parts[number - 1 + BUFFERS :][:1]:
                        following.fetch()
        if self._copies is not None:
            torch.cuda.current_stream().wait_stream(self._copies)

    def get_unscaled_state(self, weight: Tensor, name: str) -> Tensor:
        """Returns a state of a weight. megatron-core calls this when it saves. For a main weight that the device stores
        as a remainder, returns a new tensor on the host."""
        value: Tensor = self.state[weight][name]
        if value.dtype != torch.int16:
            return value.float()  # the same tensor, or the copy of a moment in a file of another dtype
        return join_weights(weight.detach(), value)

    @torch.no_grad()
    def set_scaled_state(self, weight: Tensor, name: str, value: Tensor) -> None:
        """Loads a state of a weight. If the device has the remainders of main weights, this also loads the weight."""
        own: Tensor = self.state[weight][name]
        if own.dtype == torch.int16:
            split_weights(value, weight.detach(), own)
        else:
            own.copy_(value)

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


def _add_state(
    owner: HostAdam, weight: Tensor, master: Tensor, moments: tuple[Tensor, Tensor] | None = None
) -> Group:
    """Adds the state of `weight` to `owner`, with zero moments unless `moments` of a file are passed. Returns it."""
    first, second = (torch.zeros_like(master), torch.zeros_like(master)) if moments is None else moments
    state: Group = owner.state[weight]
    state.update(
        step=torch.zeros((), device=master.device), exp_avg=first, exp_avg_sq=second, master_param=master
    )
    return state


class _HostPart:
    """Weights of a group that are updated on the host. `buffer`: pinned memory for the gradients."""

    def __init__(
        self,
        owner: HostAdam,
        group: Group,
        weights: list[Tensor],
        buffer: Tensor,
        files: OptimizerFiles | None,
    ) -> None:
        self._group, self._weights = group, weights
        sizes = [weight.numel() for weight in weights]
        self._grads = list(buffer[: sum(sizes)].split(sizes))
        self._file = None if files is None else StateFile(files.directory, sizes, files.dtype)
        self._masters = (
            [torch.empty_like(grad) for grad in self._grads] if self._file is None else self._file.main
        )
        self._states = [
            _add_state(owner, weight, master, None if self._file is None else self._file.moments(i))
            for i, (weight, master) in enumerate(zip(weights, self._masters, strict=True))
        ]
        self._updates: list[list[Future[None]]] = []
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

    def update(self, threads: ThreadPoolExecutor) -> None:
        """Waits for the gradients and lets `threads` update the main weights."""
        self._arrived.synchronize()
        self._updates = []
        for state, grad, weight in zip(self._states, self._grads, self._weights, strict=True):
            tensors = (state["master_param"], grad, *(state[name] for name in MOMENTS))
            slices = zip(*(tensor.split(SLICE) for tensor in tensors), strict=True)
            updates = [
                threads.submit(_update, self._group, state["step"], values, out)
                for values, out in zip(slices, self._outputs(grad, weight), strict=True)
            ]
            self._updates.append(updates)

    @staticmethod
    def _outputs(grad: Tensor, weight: Tensor) -> list[Tensor]:
        """Returns the memory that holds each updated slice of `weight`, in the model's dtype, until it is copied to the
        device. It is the memory of the slice's gradients, which are not needed after the update."""
        return [each.view(weight.dtype)[: each.numel()] for each in grad.split(SLICE)]

    def send(self) -> None:
        """Copies each slice to the device when it is updated."""
        columns = (self._weights, self._grads, self._states, self._updates)
        for weight, grad, state, updates in zip(*columns, strict=True):
            targets = weight.detach().split(SLICE)
            for target, out, update in zip(targets, self._outputs(grad, weight), updates, strict=True):
                update.result()
                target.copy_(out, non_blocking=True)
            state["step"] += 1
        if self._file is not None:
            self._file.release()


def _update(group: Group, step: Tensor, values: tuple[Tensor, ...], out: Tensor) -> None:
    """Updates a slice of main weights and moments, and stores the weights in `out`.

    `values` are the slice's main weights, gradients and moments, and `step` is the number of earlier updates. `out` may
    overlap the gradients. Adam computes in float32.
    """
    main, grad, *stored = values
    moments = [each.float() for each in stored]  # copies only if a file has them in another dtype
    apply_adamw(group, [main], [grad], moments[:1], moments[1:], [step.clone()])
    for moment, computed in zip(stored, moments, strict=True):
        if moment is not computed:
            moment.copy_(computed)
    out.copy_(main)


class _DevicePart:
    """Weights of a group that are updated on the device."""

    def __init__(self, owner: HostAdam, group: Group, weights: list[Tensor]) -> None:
        self._group, self._weights = group, weights
        self._masters = [weight.detach().float() for weight in weights]  # an fp32 weight is not copied
        self._adam = torch.optim.AdamW([{"params": self._masters}], fused=True)
        for weight, master in zip(weights, self._masters, strict=True):
            self._adam.state[master] = _add_state(owner, weight, master)

    def take(self) -> None:
        """Copies the weights to the main weights."""
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.copy_(weight)

    def update(self) -> None:
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = weight.decoupled_grad.float()  # type: ignore[attr-defined]
        self._adam.param_groups[0].update({name: self._group[name] for name in _SETTINGS})
        self._adam.step()
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = None
            if weight.dtype != master.dtype:
                weight.detach().copy_(master)
