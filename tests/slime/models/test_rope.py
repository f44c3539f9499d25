"""Compares rotary frequencies with those of transformers, and tests settings without support.
test_megatron_model_config.py has the settings that are errors."""

from __future__ import annotations

import sys
from subprocess import run

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from slime.models.rope import KINDS, read_rope

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 8192},
    "llama3-short": {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 64},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    "yarn-factor-given": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.3,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "yarn-not-truncated": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "yarn-step": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4},
}


def config(settings, **changes):
    return LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=16384,
        rope_parameters={"rope_theta": 5e5, **settings},
        **changes,
    )


@pytest.mark.parametrize("name", CASES)
def test_frequencies_and_amplitude_are_those_of_transformers(name):
    settings = config(CASES[name])
    theirs = LlamaRotaryEmbedding(settings)
    ours = read_rope(settings.to_dict(), 64)
    assert ours.kind == CASES[name]["rope_type"] and ours.amplitude == pytest.approx(theirs.attention_scaling)
    torch.testing.assert_close(ours.frequencies(), theirs.inv_freq, rtol=1e-6, atol=0)
    positions = torch.tensor([0, 1, 17, 900])
    cos, sin = theirs(torch.zeros(1), positions[None])
    for got, want in zip(ours.angles(positions), (cos, sin), strict=True):
        torch.testing.assert_close(got[:, 0], want[0, :, :32], rtol=0, atol=1e-6)


def test_every_kind_is_compared():
    assert (
        {case["rope_type"] for case in CASES.values()}
        == KINDS.keys()
        == {"default"} | (ROPE_INIT_FUNCTIONS.keys() & KINDS.keys())
    )


def test_scaling_of_older_files():
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert read_rope(old, 64) == read_rope(
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}}, 64
    )


def test_settings_are_read_without_torch():
    code = (
        "import sys; from slime.models import family_for, read_decoder; from slime.plan.flops import ForwardFlops;"
        "import vime.commands.models; assert not {'torch', 'megatron', 'transformers'} & set(sys.modules)"
    )
    assert run([sys.executable, "-c", code]).returncode == 0
