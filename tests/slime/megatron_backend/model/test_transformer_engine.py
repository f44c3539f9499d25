"""The parts of --transformer-impl transformer_engine that need no such package: errors and notes, and packed rows
that reach a kernel with the documented contract."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from config_cases import HF_CONFIG, good_argv
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron_cases import make_config, packed_logits, sequences, tiny_checkpoint
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slime.data.token_slice import token_slice
from slime.megatron_backend.checkpoint.weights import load_hf
from slime.megatron_backend.model import transformer_engine
from slime.megatron_backend.model.attention import PackedAttention, RotaryAngles, packed_layout
from slime.megatron_backend.model.gpt import build_model
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.model.norms import RMSNorm
from slime.megatron_backend.model.transformer_engine import block_spec, packed_attention
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.models import read_decoder
from slime.rules import parse_args

FLAG = ("--transformer-impl", "transformer_engine")


def thd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    attn_mask_type: AttnMaskType,
    packed_seq_params: PackedSeqParams,
) -> Tensor:
    """Checks Transformer Engine's documented contract for qkv_format "thd" and a causal mask: `cu_seqlens` bound the
    sequences and cover all rows; the output is [rows, A * D]."""
    given = packed_seq_params
    assert (given.qkv_format, attn_mask_type, attention_mask) == ("thd", AttnMaskType.causal, None)
    bounds = given.cu_seqlens_q.tolist()
    assert bounds == given.cu_seqlens_kv.tolist() and bounds[-1] == len(query) == len(key) == len(value)
    assert given.max_seqlen_q == given.max_seqlen_kv == max(b - a for a, b in pairwise(bounds))
    assert query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
    outputs = []
    for first, last in pairwise(bounds):
        q, k, v = (x[first:last].transpose(0, 1) for x in (query, key, value))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[0] != k.shape[0])
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs).flatten(1)


def test_rows_get_what_our_own_attention_gives_them():
    torch.manual_seed(0)
    layout = packed_layout(token_slice([5, 1, 9, 3], multiple=8), "cpu")
    rows = layout.positions.numel()
    assert (layout.own, rows) == (18, 24)
    mixed = torch.randn(rows, 8, 8, requires_grad=True)  # views of a common tensor, as after the projection
    q, k, v = mixed.split([4, 2, 2], dim=1)
    angles = torch.randn(rows, 1, 4)
    layout.rotary = [RotaryAngles(angles.cos(), angles.sin())]
    ours = PackedAttention(SimpleNamespace(kv_channels=8))(q, k, v, None, packed_seq_params=layout)
    theirs = packed_attention(thd, q, k, v, layout, AttnMaskType.causal)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6)
    assert theirs.shape == (rows, 32) and not theirs[18:].any()
    upstream = torch.randn(rows, 32)
    (want,), (got,) = (torch.autograd.grad(out, mixed, upstream) for out in (ours, theirs))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_its_layers_stand_where_local_layers_stand(kind, tmp_path, monkeypatch):
    """If local modules replace Transformer Engine's, the model has the same parameters and the same bits."""
    theirs = transformer_engine.te
    monkeypatch.setattr(theirs, "HAVE_TE", True)
    local = {"TENorm": RMSNorm, "TEColumnParallelLinear": ColumnParallelLinear}
    for name, module in {**local, "TERowParallelLinear": RowParallelLinear}.items():
        monkeypatch.setattr(theirs, name, module)
    monkeypatch.setattr(transformer_engine, "attention_class", lambda: PackedAttention)
    tiny_checkpoint(tmp_path / kind, kind)
    init_parallel(0, 1, make_config(), init_method=f"file://{tmp_path}/store", local_rank=0)
    try:
        made = []
        for overrides in ({}, {"transformer_impl": "transformer_engine"}):
            model = build_model(load_hf_config(tmp_path / kind), make_config(overrides=overrides), ddp=False)
            load_hf(model, tmp_path / kind)
            made.append(model)
        assert torch.equal(*(packed_logits(model, sequences(0)) for model in made))
        assert made[0].state_dict().keys() == made[1].state_dict().keys()
    finally:
        destroy_parallel()


@pytest.mark.skipif(HAVE_TE, reason="Transformer Engine is installed")
def test_without_the_package_the_trainer_says_so():
    with pytest.raises(ValueError, match=r"install transformer-engine\[pytorch\] for this torch, or leave"):
        block_spec(SimpleNamespace(qk_layernorm=True, normalization="RMSNorm"), read_decoder(HF_CONFIG))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--device cpu", "--device must be cuda with --transformer-impl transformer_engine, got cpu"),
        (
            "--device cuda --fp32",
            "(--bf16, --fp32) must be bfloat16 with --transformer-impl transformer_engine",
        ),
        (
            "--device cuda --context-parallel-size 2",
            "--context-parallel-size must be 1 with --transformer-impl",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(tmp_path, flags, message):
    with pytest.raises(ValueError) as error:
        parse_args([*good_argv(tmp_path), *FLAG, *flags.split()])
    assert message in str(error.value)


def test_it_is_noted_and_reaches_the_model(tmp_path):
    config = parse_args([*good_argv(tmp_path), *FLAG, "--device", "cuda"])
    assert "have never been run" in config.notes[-1]
    assert config.megatron.overrides["transformer_impl"] == "transformer_engine"
    plain = parse_args([*good_argv(tmp_path), "--transformer-impl", "local", "--device", "cuda"])
    assert not [note for note in plain.notes if "transformer" in note]
    with pytest.raises(ValueError, match="must be one of local, transformer_engine"):
        parse_args([*good_argv(tmp_path), "--transformer-impl", "inference_optimized"])
