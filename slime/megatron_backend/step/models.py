"""The models of a rank, one per role, and the parts of their state that are on the device. Owns no step."""

from __future__ import annotations

from typing import Any

from torch import nn

from slime.config import Config
from slime.config.sections.cluster import PARTS
from slime.megatron_backend.bitwise.install import adaptation
from slime.megatron_backend.checkpoint.weights import load_weights
from slime.megatron_backend.model.gpt import build_model, unwrapped
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.parallel import ParallelInfo
from slime.megatron_backend.step.learner import Learner
from slime.megatron_backend.step.residence import moving_speed
from slime.plan.card_phases import besides_tensors
from slime.plan.memory_decision import decide_residence
from slime.plan.memory_estimate import estimate
from slime.roles import POLICY, REFERENCE, Role, get_roles
from slime.tracking.memory import device_memory, leave_free
from slime.tracking.timers import Timers


class Models(dict[str, nn.Module]):
    """The models by the names of their roles. `learners` are the trained roles. `main` is the first learner: the
    policy, if these ranks have it.

    `memory` lists the parts of the state that leave the device between two trainings, decided from `estimate`.
    """

    def __init__(self, config: Config, hf_config: dict[str, Any], info: ParallelInfo, timers: Timers) -> None:
        leave_free(info.device, besides_tensors(config))
        roles = sorted(get_roles(config), key=lambda role: role is not POLICY)
        self.learners = {
            role.name: Learner(role, config, hf_config, info, timers) for role in roles if role.trained
        }
        self.main = next(iter(self.learners.values()))
        separate = [role for role in roles if not role.trained and not role.of_base(config)]
        frozen = {role.name: build_frozen(role, config) for role in separate}
        of_base = {role.name: self.main.model for role in roles if role.of_base(config)}
        super().__init__({name: learner.model for name, learner in self.learners.items()} | frozen | of_base)
        self.estimate = estimate(config, hf_config)
        self.memory = decide_residence(config, self.estimate, device_memory(info.device))
        for learner in self.learners.values():
            learner.reside(self.memory.leaving, frozen.values() if learner is self.main else ())
        self._interval, self._timers = config.algorithm.ref_update_interval, timers

    def bring(self) -> None:
        """Loads the state that the passes of a step need to the device: all weights. If only one role is trained, its
        gradients and optimizer are loaded too. With several roles, each role's training loads and offloads them."""
        for learner in self.learners.values():
            learner.residence.bring(*(PARTS if len(self.learners) == 1 else ("parameters",)))

    def metrics(self, perf: dict[str, float]) -> dict[str, float]:
        """Returns the speed of moving the state, and the peak of a step next to its estimate. `perf` gets the times of
        the step."""
        residences = [learner.residence for learner in self.learners.values()]
        return moving_speed(residences, perf) | self.estimate.compared(perf, self.memory.leaving)

    def update_reference(self, rollout_id: int) -> None:
        """Copies the policy's weights to the reference model after every --ref-update-interval rollouts."""
        reference = self.get(REFERENCE.name)
        if reference is not None and self._interval and (rollout_id + 1) % self._interval == 0:
            with self._timers.measure("ref_model_update"):
                for kept, trained in zip(unwrapped(reference), unwrapped(self.main.model), strict=True):
                    kept.load_state_dict(trained.state_dict())

    def close(self) -> None:
        """Drops the models and their optimizers, which hold process groups."""
        for learner in self.learners.values():
            learner.close()
        self.clear()
        vars(self).clear()


def build_frozen(role: Role, config: Config) -> nn.Module:
    """Returns the model of a role that is not trained, with its weights and without gradients."""
    model = build_model(load_hf_config(role.shape(config)), config, ddp=False, adapt=adaptation(config))
    source = role.source(config)
    # A reference starts with the policy's dithered values. A teacher with other weights is not dithered.
    dithers = config.train.dither_weights and source.shares_weights(POLICY.source(config))
    load_weights(model, source.directory, source.iteration, dithers=dithers)
    return model
