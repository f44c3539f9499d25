"""Operators for RL post-training: log-probs without logits, ratio and KL, policy loss, group advantage.

Needs torch, uses Triton where it is there, and knows nothing of the packages that call it. Every operator states its
contract in its docstring; `configure` is the switch, `capabilities` and `telemetry` say what can run and what did.
"""

from rl_kernel.dispatch import capabilities
from rl_kernel.mode import configure
from rl_kernel.ops.group_advantage import group_advantage
from rl_kernel.ops.grpo_loss import grpo_loss
from rl_kernel.ops.linear_logp import linear_logp
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
    "group_advantage",
    "grpo_loss",
    "linear_logp",
    "linear_token_loss",
    "logp",
    "masked_mean",
    "masked_sum",
    "masked_whiten",
    "ratio_kl",
    "rotary",
    "swiglu",
    "telemetry",
]
