"""Tests Megatron's flags: generated flags, historical names, and flags that only describe the checkpoint."""

import dataclasses
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from config_cases import HF_CONFIG, good_argv

from slime.bridges.megatron_versions import RUN
from slime.config.core_table import TABLE, core_flags, make_row
from slime.config.megatron_flags import (
    HISTORICAL,
    MANAGED,
    MODEL_ARGS,
    core_config_classes,
    imported_core_flags,
)
from slime.config.unsupported import NO_EFFECT, UNSUPPORTED
from slime.rules import parse_args
from slime.rules.flags import own_flags
from slime.rules.model_args import READERS, check_model_args
from vime.backends import BACKENDS


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    return good_argv(tmp_path)


def test_generated_flags_set_core_fields(argv):
    c = parse_args(
        [
            *argv,
            *("--attention-dropout", "0.0", "--hidden-dropout", "0.0", "--attention-softmax-in-fp32"),
            *(
                "--recompute-granularity",
                "full",
                "--recompute-method",
                "uniform",
                "--recompute-num-layers",
                "1",
            ),
            *("--main-grads-dtype", "fp32", "--recompute-modules", "mlp", "core_attn"),
            *("--moe-token-dispatcher-type", "alltoall", "--window-size", "[4, 0]"),
        ]
    )
    assert c.megatron.overrides == {
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "main_grads_dtype": "float32",
        "recompute_modules": ["mlp", "core_attn"],
        "moe_token_dispatcher_type": "alltoall",
        "window_size": [4, 0],
    }


def test_historical_names(argv):
    c = parse_args(
        [
            *argv,
            *("--accumulate-allreduce-grads-in-fp32", "--attention-backend", "flash", "--no-rope-fusion"),
            *("--no-bias-swiglu-fusion", "--no-gradient-accumulation-fusion", "--recompute-activations"),
            *("--no-check-for-nan-in-loss-and-grad", "--ddp-bucket-size", "1000"),
        ]
    )
    assert c.megatron.overrides == {
        "grad_reduce_in_fp32": True,
        "attention_backend": "flash",
        "apply_rope_fusion": False,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
        "recompute_granularity": "selective",
        "check_for_nan_in_grad": False,
        "bucket_size": 1000,
    }


def test_core_overrides_come_in_the_types_of_core(argv):
    transformer, optimizer, ddp = core_config_classes()
    flags = ["--attention-backend", "flash", "--attention-dropout", "0", "--main-grads-dtype", "fp32"]
    m = parse_args([*argv, *flags, "--accumulate-allreduce-grads-in-fp32"]).megatron
    backend = m.core_overrides(transformer).pop("attention_backend")
    assert backend.name == "flash" and type(backend).__name__ == "AttnBackend"
    assert m.core_overrides(transformer)["attention_dropout"] == 0.0
    assert m.core_overrides(optimizer) == {"main_grads_dtype": torch.float32}
    assert m.core_overrides(ddp) == {"grad_reduce_in_fp32": True}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--attention-backend", "fast"], "--attention-backend must be one of auto, flash, fused, unfused"),
        (["--recompute-method", "all"], "--recompute-method must be one of uniform, block, got all"),
        (["--main-grads-dtype", "int3"], "--main-grads-dtype must be of type"),
        (["--params-dtype", "bf16"], "--params-dtype must be left out, got bf16; it is set by --bf16"),
        (["--no-rope-fusion", "x"], "--no-rope-fusion must stand alone, got 'x'"),
        (["--init-method", "x"], "--init-method is not a known flag"),
    ],
)
def test_wrong_megatron_flags(argv, extra, message):
    with pytest.raises(ValueError) as error:
        parse_args([*argv, *extra])
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_flag_has_one_owner(backend):
    """This project's flags replace some core fields on purpose; the hand-written tables may not overlap at all."""
    found = BACKENDS[backend]
    backends = [found.specs, found.unsupported, found.no_effect]
    tables = [own_flags(), UNSUPPORTED, NO_EFFECT, *backends, MODEL_ARGS, HISTORICAL, MANAGED]
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names))
    assert not (set(MODEL_ARGS) | set(HISTORICAL) | set(MANAGED)) & set(core_flags())
    foreign = ("router_", *(f"{name}_" for name in ("sglang", "vllm") if name != backend))
    assert not any(name.startswith(foreign) for name in names)


def test_historical_targets_and_managed_names_are_real_fields():
    fields = {f.name for cls in core_config_classes() for f in dataclasses.fields(cls)}
    assert {entry.field for entry in HISTORICAL.values()} <= fields
    assert set(MANAGED) <= fields


def test_every_core_field_is_a_flag_or_cannot_be_one():
    """A field that no flag sets is managed, describes the model, or holds an object."""
    objects = {
        *("timers", "finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func"),
        *("param_sync_func", "activation_func", "init_method", "output_layer_init_method"),
        *("embedding_init_method", "quant_recipe", "_cpu_offloading_context"),
        *("moe_grad_scale_func", "mtp_grad_scale_func", "experimental_attention_variant_loss_scale_func"),
    }
    known = {f.field for f in core_flags().values()} | {h.field for h in HISTORICAL.values()}
    known |= {*MANAGED, *MODEL_ARGS, *own_flags(), *UNSUPPORTED, *NO_EFFECT}
    fields = {f.name for cls in core_config_classes() for f in dataclasses.fields(cls)}
    known.add(
        "fp4_param_gather"
    )  # new in 0.19: the flag with this name sets fp4_param, and needs Transformer Engine
    assert fields - known == objects & fields


def test_model_args_agree_with_the_checkpoint(argv):
    c = parse_args(
        [
            *argv,
            *("--swiglu", "--num-layers", "4", "--hidden-size", "128", "--ffn-hidden-size", "384"),
            *("--num-attention-heads", "4", "--group-query-attention", "--num-query-groups", "2"),
            *("--use-rotary-position-embeddings", "--disable-bias-linear", "--normalization", "RMSNorm"),
            *(
                "--norm-epsilon",
                "1e-6",
                "--rotary-base",
                "1000000",
                "--vocab-size",
                "64",
                "--kv-channels",
                "32",
            ),
            *("--qk-layernorm", "--max-position-embeddings", "256", "--rotary-percent", "1.0"),
        ]
    )
    assert c.megatron.model_args["ffn_hidden_size"] == 384 and c.megatron.overrides == {}


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("num_layers", 36, "--num-layers is 36, config.json has 4"),
        ("norm_epsilon", 1e-5, "--norm-epsilon is 1e-05, config.json has 1e-06"),
        ("rotary_base", 1e4, "--rotary-base is 10000.0, config.json has 1000000.0"),
        ("add_qkv_bias", True, "--add-qkv-bias is True, config.json has False"),
        ("untie_embeddings_and_output_weights", True, "is True, config.json has False"),
    ],
)
def test_model_args_that_disagree(name, value, shown):
    with pytest.raises(ValueError, match="MODEL_ARGS must agree with") as error:
        check_model_args({name: value, "hidden_size": 128}, HF_CONFIG)
    assert shown in str(error.value) and "--hidden-size" not in str(error.value)


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        (
            "--fp8-format hybrid",
            "--fp8-format must be left out with --transformer-impl local, got hybrid; fp8 needs Transformer Engine; "
            "--fp8-format e4m3 --fp8-recipe blockwise does not",
        ),
        (
            "--tp-comm-overlap",
            "--tp-comm-overlap must be left out with --transformer-impl local, got it; this overlap",
        ),
    ],
)
def test_what_needs_transformer_engine_is_refused_without(argv, flags, shown):
    with pytest.raises(ValueError) as error:
        parse_args([*argv, *flags.split()])
    assert str(error.value).startswith(shown) and "needs Transformer Engine" in str(error.value)
    engine = ("--transformer-impl", "transformer_engine", "--device", "cuda")
    assert parse_args([*argv, *engine, *flags.split()]).megatron.overrides


def test_what_was_never_run_is_noted(argv):
    flags = "--cuda-graph-impl local --external-cuda-graph"
    said = [
        note.partition(":")[0]
        for note in parse_args([*argv, *flags.split()]).notes
        if "never run here" in note
    ]
    assert said == [flag for flag in flags.split() if flag.startswith("--")]
    assert not parse_args([*argv, "--cuda-graph-impl", "none"]).notes


def test_model_args_of_other_layouts():
    qwen2 = {
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 99,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 5},
    }
    check_model_args(
        {"add_qkv_bias": True, "rotary_base": 5.0, "kv_channels": 16, "num_query_groups": 4}, qwen2
    )
    assert set(READERS) == set(MODEL_ARGS)


def test_mismatch_stops_parse_args(argv):
    with pytest.raises(ValueError, match=r"--hidden-size is 256, config\.json has 128"):
        parse_args([*argv, "--hidden-size", "256"])


def test_the_table_of_flags_is_that_of_the_installed_version():
    """The table has a row for each version that was run. scripts/docs_core_flags.py writes the row of another
    version."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    found = {name: make_row(flag) for name, flag in imported_core_flags().items()}
    assert table[importlib.metadata.version("megatron-core")] == json.loads(json.dumps(found))
    assert core_flags() == imported_core_flags()
    assert set(RUN) <= set(table)


def test_flags_are_read_without_megatron():
    code = """
import sys
from slime.config.core_table import core_flags
assert core_flags()["attention_dropout"].parse(["0.5"], "--attention-dropout") == 0.5
assert "torch" not in sys.modules and "megatron.core" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
