"""Megatron's optimizer and learning-rate schedule for a model, and the gradient reduction before a step.

One step: `model.zero_grad_buffer(); optimizer.zero_grad()`, forward and backward of every micro-batch,
`finish_grads(model)`, `updated, grad_norm, _ = optimizer.step()`, `scheduler.step(increment=global_batch_size)`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import local_multi_tensor_l2_norm
from torch import Tensor, nn

from slime import bridges
from slime.bridges.megatron import GRADIENT_NORM
from slime.config import Config
from slime.config.fields import spelled
from slime.config.sections.megatron import MegatronConfig
from slime.megatron_backend.host_memory import host_threads
from slime.megatron_backend.model.gpt import HiddenGPTModel, get_parts
from slime.megatron_backend.model.host_adam import HostAdam, OptimizerFiles
from slime.megatron_backend.model.model_config import params_dtype
from slime.megatron_backend.model.muon import Muon, MuonSettings, find_matrices
from slime.roles import POLICY, Role
from slime.rules.megatron import weight_decays

logger = logging.getLogger(__name__)


def norm_at_once(original: Callable[..., object]) -> Callable[..., object]:
    """Replaces Megatron's function in plain PyTorch for the norm of many tensors, and keeps a function of Transformer
    Engine or Apex."""

    def norm(
        chunk: object, flag: Tensor, tensors: list[list[Tensor]], *unused: object
    ) -> tuple[Tensor, None]:
        norms = torch._foreach_norm(tensors[0], 2, dtype=torch.float32)
        return torch.stack([each.to(flag.device) for each in norms]).norm()[None], None

    return norm if original is local_multi_tensor_l2_norm else original


def build_optimizer(
    model: nn.Module, config: Config, *, total_steps: int, role: Role = POLICY
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Returns the optimizer of the data-parallel-wrapped `model`, and its schedule. Load the model's weights first.

    `role` names the flags of the learning rate and its warm-up, called --lr and --lr-warmup-iters below.

    The state is sharded over data-parallel ranks unless --no-use-distributed-optimizer. Main weights and moments are
    fp32, and on the host with --optimizer-cpu-offload. With --use-precision-aware-optimizer, main weights on the device
    are remainders of 16 bits.

    Gradients are clipped to --clip-grad by their global norm. The schedule counts samples. It covers
    --lr-decay-iters (default: `total_steps`) steps with their samples: --lr-warmup-iters steps, or
    --lr-warmup-fraction of the steps, of linear warm-up from --lr-warmup-init, then --lr-decay-style down to --min-lr.
    The weight decay goes from --start-weight-decay to --end-weight-decay over the same steps.

    Raises ValueError for a warm-up that is not shorter than the schedule,
    --lr-wsd-decay-iters that start in the warm-up, --lr-warmup-init or --min-lr above --lr.
    """
    dtype = params_dtype(config)
    fields: dict[str, Any] = {
        "optimizer": "adam",  # Muon takes the groups of megatron-core's Adam
        "lr": config.get_value(role.lr),
        "min_lr": config.megatron.min_lr,
        "weight_decay": config.megatron.weight_decay,
        "adam_beta1": config.megatron.adam_beta1,
        "adam_beta2": config.megatron.adam_beta2,
        "adam_eps": config.megatron.adam_eps,
        "clip_grad": config.megatron.clip_grad,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": config.megatron.use_distributed_optimizer,
    }
    fields |= config.megatron.core_overrides(OptimizerConfig)
    core = OptimizerConfig(**fields)
    own_adam = config.megatron.optimizer_cpu_offload or config.megatron.stores_remainders
    # The groups hold parts of the weights, main weights are a state, and gradients are `decoupled_grad`.
    core.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = own_adam
    bridges.apply(GRADIENT_NORM)
    optimizer = get_megatron_optimizer(core, get_parts(model), use_gloo_process_groups=False)
    _number_weights(optimizer)
    if own_adam:
        _use_own_adam(optimizer, config)
    if config.megatron.optimizer == "muon":
        _use_muon(optimizer, cast("list[HiddenGPTModel]", get_parts(model)), core)
    _start_adam(optimizer)
    fuse_adam(optimizer)
    return optimizer, _schedule(optimizer, config, total_steps, role)


def _number_weights(optimizer: MegatronOptimizer) -> None:
    """Corrects each weight's index in its group. megatron-core saves a weight's optimizer state by this index.

    megatron-core counts in the order of the gradient buffers, but a group has its fp32 weights first. The two orders
    differ for a bf16 model with fp32 weights, such as `A_log` of linear attention.
    """
    for chained in optimizer.chained_optimizers:
        if isinstance(chained, DistributedOptimizer) and chained.optimizer is not None:
            groups = zip(chained.model_fp32_groups, chained.model_float16_groups, strict=True)
            chained.model_param_group_index_map = {
                weight: (number, order)
                for number, (exact, rounded) in enumerate(groups)
                for order, weight in enumerate([*exact, *rounded])
            }


def _use_own_adam(optimizer: MegatronOptimizer, config: Config) -> None:
    """Replaces each optimizer's Adam, which has no state yet."""
    flags = config.megatron
    for chained in optimizer.chained_optimizers:
        if chained.optimizer is not None:
            chained.optimizer = HostAdam(
                chained.optimizer.param_groups,
                fraction=flags.optimizer_offload_fraction if flags.optimizer_cpu_offload else 0.0,
                threads=host_threads(config),
                files=_state_files(flags),
                remainders=flags.stores_remainders,
            )


def _state_files(flags: MegatronConfig) -> OptimizerFiles | None:
    """Returns where the state of Adam is, if it is in files."""
    if not flags.stream_optimizer_state_to_disk:
        return None
    assert flags.offload_train_disk_dir is not None, "the rules require it"
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[flags.stream_optimizer_state_moment_dtype]
    return OptimizerFiles(flags.offload_train_disk_dir, flags.offload_train_disk_chunk_mb * 2**20, dtype)


def _use_muon(optimizer: MegatronOptimizer, parts: list[HiddenGPTModel], core: OptimizerConfig) -> None:
    """Replaces each optimizer's Adam, which has no state yet."""
    settings = MuonSettings.of(core)
    matrices = find_matrices(parts, settings)
    for chained in optimizer.chained_optimizers:
        if chained.optimizer is not None:
            chained.optimizer = Muon(chained.optimizer.param_groups, matrices, settings)


def reload_weights(optimizer: MegatronOptimizer) -> None:
    """Copies the model's weights, which were loaded after the optimizer was built, to the main weights."""
    optimizer.reload_model_params()
    for chained in optimizer.chained_optimizers:
        if isinstance(chained.optimizer, HostAdam):
            chained.optimizer.take_weights()


@torch.no_grad()
def reset_states(optimizer: MegatronOptimizer) -> None:
    """Sets moments and step counts to zero, in place."""
    for chained in optimizer.chained_optimizers:
        inner = chained.optimizer
        for group in [] if inner is None else inner.param_groups:
            if "step" in group:  # other libraries' fused Adams
                group["step"] = 0
            for p in group["params"]:
                for name, value in inner.state[p].items():
                    if name in ("step", "exp_avg", "exp_avg_sq", "momentum_buffer"):
                        value.zero_()


def close_optimizer(optimizer: MegatronOptimizer) -> None:
    """Unpins the optimizer's host memory."""
    for chained in optimizer.chained_optimizers:
        if isinstance(chained.optimizer, HostAdam):
            chained.optimizer.close()


def _start_adam(optimizer: MegatronOptimizer) -> None:
    """Creates torch's Adam state (zero moments, step 0) before the first step.

    megatron-core reads the step count when it saves or loads a distributed optimizer, even a new one.
    """
    for chained in optimizer.chained_optimizers:
        inner = chained.optimizer
        if isinstance(inner, torch.optim.Adam):  # AdamW too; other libraries' fused Adams need no change
            for group in inner.param_groups:
                for p in group["params"]:
                    moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                    inner.state[p] = {"step": torch.tensor(0.0), **moments}


def fuse_adam(optimizer: MegatronOptimizer) -> None:
    """Makes torch's Adam update in one kernel, which allocates nothing. Call it after the state was created or loaded.

    megatron-core leaves the choice to torch. torch then uses many kernels and allocates the square root of the second
    moments: 4 bytes per parameter, at the peak of a step. The single kernel needs the step counts on the parameters'
    device.
    """
    for chained in optimizer.chained_optimizers:
        inner = chained.optimizer
        if isinstance(inner, torch.optim.Adam):
            for group in inner.param_groups:
                group["fused"] = True
                for p in group["params"]:
                    inner.state[p]["step"] = inner.state[p]["step"].to(p.device)


class LrSchedule(OptimizerParamScheduler):  # type: ignore[misc]  # megatron-core has no types
    """Megatron's schedule, whose position counts samples, for flags that count optimizer steps of `step_samples`
    samples on average. A checkpoint holds both numbers, so that a run with another step size resumes at its optimizer
    step."""

    def __init__(self, optimizer: MegatronOptimizer, *, step_samples: float, **settings: object) -> None:
        self.step_samples = step_samples
        super().__init__(optimizer, **settings)

    def state_dict(self) -> dict[str, object]:
        state: dict[str, object] = super().state_dict()
        return state | {"step_samples": self.step_samples}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Loads the position. Without `step_samples`, as in checkpoints of Megatron and of older versions, steps had
        the present size."""
        before = state_dict.get("step_samples", self.step_samples)
        if before != self.step_samples:
            done = state_dict["num_steps"] / before
            state_dict = state_dict | {"num_steps": round(done * self.step_samples)}
            if dist.get_rank() == 0:
                logger.warning(
                    "the schedule of the learning rate resumes after its optimizer step %g: steps had %g samples "
                    "and have %g now",
                    *(done, before, self.step_samples),
                )
        super().load_state_dict(state_dict)


def _schedule(optimizer: MegatronOptimizer, config: Config, total_steps: int, role: Role) -> LrSchedule:
    lr, iters = config.get_value(role.lr), config.get_value(role.lr_warmup_iters)
    # --num-rollout 0 takes no step, so any schedule fits.
    steps = config.megatron.lr_decay_iters or total_steps or iters + 1
    if config.megatron.lr_warmup_init > lr:
        raise ValueError(
            f"--lr-warmup-init must be at most {spelled(role.lr)} {lr}, got {config.megatron.lr_warmup_init}"
        )
    if not 0 <= iters < steps:
        raise ValueError(
            f"{spelled(role.lr_warmup_iters)} must lie in [0, {steps}), the optimizer steps of the schedule, "
            f"got {iters}; raise --lr-decay-iters or --num-rollout"
        )
    if not 0 <= config.megatron.min_lr <= lr:
        raise ValueError(f"--min-lr must lie in [0, {spelled(role.lr)} {lr}], got {config.megatron.min_lr}")
    samples_until, fraction = config.data.samples_until, config.megatron.lr_warmup_fraction
    of_rollout = config.data.num_steps_per_rollout or 1
    warm_up = iters if fraction is None else fraction * steps
    start_decay, end_decay = weight_decays(config)
    last = config.megatron.lr_wsd_decay_iters
    if last is not None and warm_up + last > steps:
        raise ValueError(
            f"--lr-wsd-decay-iters must be at most {steps - int(warm_up)}, the steps of the schedule after the "
            f"warm-up, got {last}; raise --lr-decay-iters or --num-rollout"
        )
    return LrSchedule(
        optimizer,
        step_samples=samples_until(of_rollout) / of_rollout,
        init_lr=config.megatron.lr_warmup_init,
        max_lr=lr,
        min_lr=config.megatron.min_lr,
        lr_warmup_steps=int(samples_until(warm_up)),
        lr_decay_steps=int(samples_until(steps)),
        lr_decay_style=config.megatron.lr_decay_style,
        wsd_decay_steps=None if last is None else int(samples_until(steps) - samples_until(steps - last)),
        lr_wsd_decay_style=config.megatron.lr_wsd_decay_style,
        start_wd=start_decay,
        end_wd=end_decay,
        wd_incr_steps=int(samples_until(steps)),
        wd_incr_style=config.megatron.weight_decay_incr_style,
        # a resumed run uses its current flags; the checkpoint supplies the position in the schedule
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def finish_grads(model: nn.Module) -> None:
    """Completes the gradients of a step: sums over data-parallel ranks, and over tensor-parallel ranks for parameters
    whose ranks had only a part of the tokens or heads. Collective. Call it once, after the last micro-batch's
    backward."""
    finalize_model_grads(get_parts(model))
