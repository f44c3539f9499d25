"""The public names of the package. `rl_kernel.X` is `rl_kernel.public.X`."""

from rl_kernel.dispatch import capabilities
from rl_kernel.mode import configure
from rl_kernel.ops.expert_rows import expert_combine, expert_dispatch
from rl_kernel.ops.group_advantage import group_advantage
from rl_kernel.ops.grpo_loss import grpo_loss
from rl_kernel.ops.linear_logp import linear_logp, linear_top
from rl_kernel.ops.linear_token_loss import linear_token_loss
from rl_kernel.ops.logp import logp
from rl_kernel.ops.masked import masked_mean, masked_sum, masked_whiten
from rl_kernel.ops.ratio_kl import ratio_kl
from rl_kernel.ops.rotary import rotary
from rl_kernel.ops.swiglu import swiglu
from rl_kernel.telemetry import telemetry

__all__ = [
    "capabilities",
    "configure",
    "expert_combine",
    "expert_dispatch",
    "group_advantage",
    "grpo_loss",
    "linear_logp",
    "linear_token_loss",
    "linear_top",
    "logp",
    "masked_mean",
    "masked_sum",
    "masked_whiten",
    "ratio_kl",
    "rotary",
    "swiglu",
    "telemetry",
]
