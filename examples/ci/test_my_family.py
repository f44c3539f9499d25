"""Compares a small ERNIE 4.5 with transformers and vLLM: a right family, and one with a fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from my_family import ERNIE
from transformers import AutoConfig, AutoModelForCausalLM

from slime.models.reading import read_decoder
from vime.testing import check_family

SMALL = {
    **{"vocab_size": 99, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
}

WITHOUT_PAIRS = replace(ERNIE, read=read_decoder)
"""The family with the rotary embeddings of Llama."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ernie")
    AutoModelForCausalLM.from_config(AutoConfig.for_model("ernie4_5", **SMALL)).save_pretrained(folder)
    return folder


def test_the_family_is_right(folder: Path) -> None:
    report = check_family(folder, family="my_family.ERNIE")
    assert report.engine is not None and max(report.engine.values()) < 1e-5


def test_a_family_with_other_rotary_embeddings_is_found(folder: Path) -> None:
    with pytest.raises(
        AssertionError, match="rotary embedding|the output of layer 0 is the first that differs"
    ):
        check_family(folder, family="test_my_family.WITHOUT_PAIRS", engine=None)
