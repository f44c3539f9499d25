"""Operators for RL post-training: log-probs without logits, ratio and KL, policy loss, group advantage.

The package needs torch and uses Triton where Triton is installed. It imports no package that calls it. Each
operator's docstring states its contract. `configure` switches the fast implementations on and off, `capabilities` lists
the implementations that can run here, and `telemetry` counts the calls. `rl_kernel.public` lists the public names.

The first use of a name imports the operators and torch. A module that needs neither, such as rl_kernel.host, imports
without them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from rl_kernel.telemetry import telemetry as telemetry  # at once, because its module has the same name

if TYPE_CHECKING:
    from rl_kernel.public import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        public = import_module("rl_kernel.public")
        if name != "__all__" and name not in public.__all__:
            raise AttributeError(f"module 'rl_kernel' has no attribute {name!r}")
        return getattr(public, name)

    def __dir__() -> list[str]:
        return list(import_module("rl_kernel.public").__all__)
