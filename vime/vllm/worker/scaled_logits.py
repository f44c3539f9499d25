"""A model whose logits are divided by a temperature, in all that is computed from them.

vLLM computes log-probs of a prompt from unscaled logits, whatever the request's temperature. A teacher scores at the
temperature of the policy's samples, so its server scales the logits themselves.
"""

from __future__ import annotations

import functools
from typing import Any

VARIABLE = "VIME_LOGITS_TEMPERATURE"
"""Of the server's environment: the temperature."""


def install(temperature: float) -> None:
    """Divide the logits of all models of this process. May run more than once."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    init = LogitsProcessor.__init__
    if hasattr(init, "wraps"):
        return

    @functools.wraps(init)
    def scaled(self: LogitsProcessor, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.scale /= temperature  # vLLM multiplies by it after the soft cap

    scaled.wraps = init  # type: ignore[attr-defined]
    LogitsProcessor.__init__ = scaled  # type: ignore[method-assign]
