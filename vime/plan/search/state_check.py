"""Finds layouts whose trainer's state does not fit on a GPU, without a plan of each layout."""

from __future__ import annotations

import dataclasses

from slime.config import Config
from slime.hardware import Hardware
from slime.plan.fit import MachineSizes
from slime.plan.memory_estimate import list_role_states
from slime.roles.groups import build_groups
from vime.plan.search.layouts import with_layout
from vime.plan.search.step_time import GpuLayout, Model


class StateCheck:
    """Compares the state of a layout's trainer ranks, and the engine's share if both share a GPU, with the GPU.

    The state is weights, gradients and optimizer. An impossible layout would not fit: its plan has more parts. `count`
    is the number of layouts, and `closest` is the impossible layout that misses the fewest bytes.
    """

    def __init__(self, c: Config, model: Model, gpu: Hardware, machine: MachineSizes) -> None:
        assert machine.device is not None
        self._c, self._model, self._gpu, self._device = c, model, gpu, machine.device
        self._states: dict[GpuLayout, list[float]] = {}
        self._least = float("inf")
        self.count = 0
        self.closest: GpuLayout | None = None

    def is_possible(self, layout: GpuLayout) -> bool:
        """Returns False if the GPUs of a layout cannot hold the state."""
        self.count += 1
        share = layout.share if layout.colocated and layout.offload is False else 0.0
        first, *others = self._state_bytes(layout)
        missing = max(first + share * self._device, *others, 0.0) - self._device
        if missing > 0 and missing < self._least:
            self._least, self.closest = missing, layout
        return missing <= 0

    def _state_bytes(self, layout: GpuLayout) -> list[float]:
        """Returns the bytes of a rank's state: the policy's group, then each group of roles with separate GPUs. Layouts
        with the same ranks and the same Adam share a result."""
        if self._c.debug.debug_rollout_only:
            return [0.0]
        key = dataclasses.replace(
            GpuLayout(
                layout.trainer_gpus, 1, 1, layout.colocated, layout.tp, layout.pp, layout.cp, layout.ep
            ),
            host_adam=layout.host_adam,
            remainders=layout.remainders,
        )
        if key not in self._states:
            groups = build_groups(with_layout(self._c, self._gpu, layout))
            self._states[key] = [
                sum(item.bytes for item in list_role_states(group.config, self._model.shape))
                for group in groups
            ]
        return self._states[key]
