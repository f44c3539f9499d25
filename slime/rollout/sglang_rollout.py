"""slime's plug-ins import this module, see slime.rollout.vllm_rollout. The run's engines generate, whatever their kind.

A plug-in, or its test, may assign to a name of this module, as in slime. The assignment also replaces the name in the
module where the rollout looks it up.
"""

import sys
from types import ModuleType

import slime.rollout.generate as _generate
import slime.rollout.vllm_rollout as _rollout
from slime.hooks import load_function
from slime.rollout.rewards import async_rm, batched_async_rm
from slime.rollout.sampling import _build_inference_sampling_params, _coerce_flat_int_token_ids
from slime.rollout.vllm_rollout import (
    GenerateState,
    abort,
    eval_rollout,
    generate,
    generate_and_rm,
    generate_and_rm_group,
    generate_rollout,
    generate_rollout_async,
    get_model_url,
)
from slime.system.upstream import refused_names
from slime.vision.rendered import (
    _align_mm_feature_placeholders_to_tokens,
    _mm_render_response_to_generate_body,
)

__all__ = [
    "GenerateState",
    "_align_mm_feature_placeholders_to_tokens",
    "_build_inference_sampling_params",
    "_coerce_flat_int_token_ids",
    "_mm_render_response_to_generate_body",
    "abort",
    "async_rm",
    "batched_async_rm",
    "eval_rollout",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_rollout_async",
    "get_model_url",
    "load_function",
]
__getattr__ = refused_names("slime.rollout.sglang_rollout")


class _Replaceable(ModuleType):
    """Forwards assignments to the modules that the rollout uses. Otherwise they would silently have no effect."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        for module in (_generate, _rollout) if name in __all__ else ():
            if name in vars(module):
                setattr(module, name, value)


sys.modules[__name__].__class__ = _Replaceable
