"""Defines the names of sampling parameters. slime and SGLang use the same names, and vLLM uses other names."""

from __future__ import annotations

NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "skip_special_tokens": "skip_special_tokens",
    "spaces_between_special_tokens": "spaces_between_special_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "ignore_eos": "ignore_eos",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
}
"""Maps slime's and SGLang's names of sampling parameters to vLLM's names.

Other names are errors, because a dropped parameter would change the sampling. vLLM's defaults are SGLang's, except for
max_new_tokens.
"""
