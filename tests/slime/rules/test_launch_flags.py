"""Tests flags of existing launch scripts: those compared with config.json, those without effect, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from config_cases import HF_CONFIG, good_argv, write_model
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.models import FAMILIES, Family
from slime.models.reading import read_decoder
from slime.rules import parse_args
from slime.rules.megatron import SAME_RESULT
from slime.rules.model_args import UNKNOWN, check_model_args, model_arg_notes

ORIGINAL = {"original_max_position_embeddings": 4096}
LATENT = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 99,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_size": 64,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "mscale": 1.0,
        "beta_fast": 32,
        "original_max_position_embeddings": 4096,
    },
    "num_nextn_predict_layers": 1,
    "scoring_func": "sigmoid",
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
}


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    return good_argv(tmp_path)


def notes_of(argv: list[str], flags: str) -> list[str]:
    before = parse_args(argv).notes
    return [note for note in parse_args([*argv, *flags.split()]).notes if note not in before]


@pytest.mark.parametrize(
    "model_args",
    [
        {"multi_latent_attention": True, "kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8},
        {"v_head_dim": 16, "kv_channels": 128, "qk_layernorm": True, "rope_type": "yarn"},
        {"rotary_scaling_factor": 40.0, "mscale": 1.0, "beta_fast": 32.0, "mtp_num_layers": 1},
        {"moe_router_score_function": "sigmoid", "moe_router_pre_softmax": True},
        {"moe_router_enable_expert_bias": True, "no_position_embedding": True},
        {"spec": ["slime_plugins.models.deepseek", "get_spec"]},
    ],
)
def test_model_flags_that_agree(model_args):
    check_model_args(model_args, LATENT)


@pytest.mark.parametrize(
    ("model_args", "message"),
    [
        ({"kv_lora_rank": 64}, "--kv-lora-rank is 64, config.json has 32"),
        ({"q_lora_rank": 8}, "--q-lora-rank is 8, config.json has None"),
        ({"rotary_scaling_factor": 4.0}, "--rotary-scaling-factor is 4.0, config.json has 40"),
        ({"mtp_num_layers": 2}, "--mtp-num-layers is 2, config.json has 1"),
        ({"use_rope_scaling": True}, "--use-rope-scaling is True, config.json has False"),
        (
            {"spec": ["my_models.layers", "get_spec"]},
            "--spec is my_models.layers get_spec, config.json has model_type",
        ),
        (
            {"spec": ["slime_plugins.models.glm4", "get_glm_spec"]},
            "--spec is slime_plugins.models.glm4 get_glm_spec",
        ),
    ],
)
def test_model_flags_that_differ(model_args, message):
    with pytest.raises(ValueError) as error:
        check_model_args(model_args, LATENT)
    assert message in str(error.value)


def test_the_record_of_a_family_is_asked(monkeypatch):
    flags = (("attention_output_gate", lambda hf: hf["attn_output_gate"]),)
    gates = Family("gated", "Gated", "none", (), read_decoder, flags=flags)
    monkeypatch.setitem(FAMILIES, "gated", gates)
    for flag in ("use_gated_attention", "attention_output_gate"):
        check_model_args({flag: True}, {"model_type": "gated", "attn_output_gate": True})
        with pytest.raises(ValueError, match="config.json has False"):
            check_model_args({flag: True}, {"model_type": "gated", "attn_output_gate": False})
    with pytest.raises(ValueError, match="--post-mlp-layernorm is True, config.json has False"):
        check_model_args({"post_mlp_layernorm": True}, HF_CONFIG)
    assert repr(UNKNOWN) == "nothing"


def test_what_config_json_leaves_open_is_noted():
    silent = {k: v for k, v in LATENT.items() if k != "rope_scaling"}
    args = {"rotary_scaling_factor": 40.0, "mtp_num_layers": 1, "kv_lora_rank": 32}
    check_model_args(args, silent)
    assert list(model_arg_notes(args, silent)) == [
        "not compared with config.json, which has no values for them: --rotary-scaling-factor 40.0; "
        "config.json and the model family decide"
    ]
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    }
    shared = HF_CONFIG | experts | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 48}
    check_model_args({"moe_shared_expert_intermediate_size": 24}, shared)
    assert list(model_arg_notes({"moe_shared_expert_intermediate_size": 24}, shared)) == [
        "--moe-shared-expert-intermediate-size 24 is not 48 as in config.json, which decides: the load compares the "
        "width with the shapes of the weights"
    ]


@pytest.mark.parametrize(
    ("flags", "left", "note"),
    [
        (
            "--moe-token-dispatcher-type flex --moe-enable-deepep",
            {"moe_token_dispatcher_type": "alltoall"},
            "--moe-token-dispatcher-type flex, --moe-enable-deepep: no effect on the result; the number of ranks",
        ),
        (
            "--optimizer-cpu-offload --pin-cpu-grads --use-torch-optimizer-for-cpu-offload",
            {},
            "--pin-cpu-grads, --use-torch-optimizer-for-cpu-offload: no effect on the result; Adam on the host is "
            "torch's",
        ),
        (
            "--optimizer-cpu-offload --use-precision-aware-optimizer",
            {},
            "--use-precision-aware-optimizer has no effect with --optimizer-cpu-offload: it makes",
        ),
        (
            "--attention-backend unfused",
            {"attention_backend": "auto"},
            "--attention-backend unfused: no effect on",
        ),
        (
            "--overlap-param-gather",
            {},
            "--overlap-param-gather: no effect on the result; parameters are gathered",
        ),
    ],
)
def test_flags_with_the_same_result(argv, flags, left, note):
    assert parse_args([*argv, *flags.split()]).megatron.overrides == left
    (told,) = notes_of(argv, flags)
    assert told.startswith(note)


def test_the_fused_backend_reaches_megatron(argv):
    c = parse_args([*argv, "--attention-backend", "fused"])
    assert c.megatron.overrides == {"attention_backend": "fused"}
    assert c.megatron.core_overrides(TransformerConfig)["attention_backend"] is AttnBackend.fused


def test_layers_without_the_fused_backend_are_noted(argv, tmp_path):
    flags = "--attention-backend fused"
    assert notes_of(argv, flags) == ["--attention-backend fused: no effect on cpu in float32"]
    argv += ["--device", "cuda", "--bf16"]
    assert notes_of(argv, flags) == []
    write_model(tmp_path / "model", head_dim=256)
    assert notes_of(argv, flags) == [
        "--attention-backend fused: no effect in 4 of 4 layers with softmax attention, because heads have 256 "
        "dimensions, not a multiple of 8 up to 128"
    ]


def test_settings_that_change_nothing_are_fields_of_megatron_core():
    from slime.config.core_table import core_flags
    from slime.config.megatron_flags import HISTORICAL

    assert set(SAME_RESULT) <= {flag.field for flag in core_flags().values()} | {
        h.field for h in HISTORICAL.values()
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--exp-avg-dtype bf16 --use-precision-aware-optimizer",
            "--exp-avg-dtype must be fp32, got bfloat16",
        ),
        (
            "--lr-warmup-fraction 0.1 --lr-warmup-iters 2",
            "--lr-warmup-fraction must not be given with --lr-warmup-iters",
        ),
        ("--lr-warmup-fraction 1", "--lr-warmup-fraction must lie in [0, 1), got 1.0"),
        (
            "--attention-backend fused --rlk-bitwise --rlk-consistency strict",
            "--attention-backend must be auto with --rlk-bitwise, got fused; change it, or leave --rlk-bitwise out",
        ),
    ],
)
def test_refused(argv, flags, message):
    with pytest.raises(ValueError) as error:
        parse_args([*argv, *flags.split()])
    assert message in str(error.value)


def test_one_evaluation_file_alone_is_called_aime(argv, tmp_path):
    c = parse_args([*argv, "--eval-interval", "5", "--eval-prompt-data", str(tmp_path / "prompts.jsonl")])
    assert c.evaluation.eval_prompt_data == ["prompts", str(tmp_path / "prompts.jsonl")]
    assert any("has no name; it is called prompts" in note for note in c.notes)


def test_keys_of_the_custom_config_that_are_no_flags_reach_hooks(argv, tmp_path):
    file = tmp_path / "tis.yaml"
    file.write_text(
        "judge: strict\nlevels: {token: 2, rest: [1, null]}\nmax-turns: 3\nrollout_sed: 1\nlr: 0.5\n"
    )
    c = parse_args([*argv, "--custom-config-path", str(file)])
    args = c.namespace()
    assert (args.judge, args.levels, args.max_turns, args.rollout_sed, args.lr) == (
        "strict",
        {"token": 2, "rest": [1, None]},
        3,
        1,
        0.5,
    )
    assert (
        "--custom-config-path: judge, levels, max_turns, rollout_sed: no flags, so hooks find them in args "
        "(rollout_sed; did you mean --rollout-seed?)"
    ) in c.notes
    assert json.loads(json.dumps(c.to_dict()))["train"]["hook_settings"]["max_turns"] == 3


def converted(folder: Path) -> Path:
    """Writes the files of a checkpoint that slime converted, as far as the configuration reads them."""
    (folder / "release").mkdir(parents=True)
    (folder / "release" / ".metadata").touch()
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    return folder


def test_converted_checkpoints(argv, tmp_path):
    folder = str(converted(tmp_path / "model_torch_dist"))
    c = parse_args([*argv, "--ref-load", folder, "--load", folder, "--use-kl-loss"])
    assert c.checkpoint.ref_load == folder
    (tmp_path / "model_torch_dist" / "release" / ".metadata").unlink()
    with pytest.raises(ValueError, match="--ref-load must hold a checkpoint that can be read"):
        parse_args([*argv, "--ref-load", folder])


def test_a_missing_conversion_of_the_checkpoint_is_not_needed(argv, tmp_path):
    c = parse_args([*argv, "--ref-load", str(tmp_path / "model_torch_dist")])
    assert c.checkpoint.ref_load == c.rollout.hf_checkpoint
    assert any("by its name it is --hf-checkpoint" in note for note in c.notes)
    with pytest.raises(ValueError, match="--ref-load must name a Hugging Face directory"):
        parse_args([*argv, "--ref-load", str(tmp_path / "another_torch_dist")])


def test_one_report_has_the_reasons_of_every_stage(argv, tmp_path):
    """An unknown flag, hooks, files and the model are reported together. No early error raises a traceback."""
    write_model(tmp_path / "model", model_type="qwen9")
    flags = (
        "--fo 1 --custom-rm-path absent.f --custom-generate-function-path absent.g --eval-config absent.yaml"
    )
    with pytest.raises(ValueError) as error:
        parse_args([*argv, *flags.split(), "--vocab-size", "7"])
    text = str(error.value)
    for reason in (
        "--fo is not a known flag",
        "--custom-rm-path must name a module that can be imported",
        "--custom-generate-function-path must name a module",
        "--eval-config must name a file that exists",
        "--vocab-size is 7, config.json has 64",
    ):
        assert reason in text
    with pytest.raises(ValueError, match="--hf-checkpoint must be given"):
        parse_args(["--colocate", "--device", "cpu"])


def test_lists_of_parameters(argv):
    """The lists are checked against the family's names before anything starts."""
    frozen = parse_args([*argv, "--freeze-params-name-list", r"mlp\.linear_fc1", "embedding"])
    assert frozen.train.freeze_params_name_list == [r"mlp\.linear_fc1", "embedding"]
    for flags, message in {
        "--freeze-params-name-list vision": "--freeze-params-name-list must match parameters .* got 'vision'",
        "--only-train-params-name-list .": "--only-train-params-name-list must leave parameters .* got ., which",
        "--only-train-params-name-list (": r"must be regular expressions, got '\(': missing \)",
        "--only-train-params-name-list mlp --freeze-params-name-list mlp": "must not be given with --freeze",
    }.items():
        with pytest.raises(ValueError, match=message):
            parse_args([*argv, *flags.split()])


def test_schedules(argv):
    """The flags of a schedule must be given together."""
    for flags, message in {
        "--lr-decay-style WSD": "--lr-wsd-decay-iters must be given with --lr-decay-style WSD .* got None with WSD",
        "--lr-wsd-decay-iters 5": "and only there, got 5 with constant",
        "--start-weight-decay 0.1": "--start-weight-decay must be given with --end-weight-decay, got 0.1 and None",
        "--start-weight-decay 0.1 --end-weight-decay 0.2": "--end-weight-decay must be .* got 0.2 after 0.1",
    }.items():
        with pytest.raises(ValueError, match=message):
            parse_args([*argv, *flags.split()])
    parse_args(
        [
            *argv,
            *["--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "1", "--lr-wsd-decay-style", "minus_sqrt"],
        ]
    )


def test_what_is_done_with_checkpoints_needs_a_folder(argv):
    for flags in ("--exit-signal-handler", "--max-actor-ckpt-to-keep 2", "--save-hf folder"):
        with pytest.raises(ValueError, match=f"--save must be given with {flags.split()[0]}, got none"):
            parse_args([*argv, *flags.split()])
    with pytest.raises(ValueError, match="--weight-dir must be given with --update-weight-disk-keep-files"):
        parse_args([*argv, "--update-weight-disk-keep-files"])
    assert parse_args([*argv, "--async-save"]).checkpoint.async_save  # scripts also have it without --save


def test_flags_of_megatron_with_rules_of_their_own(argv):
    for flags, message in {
        "--padded-vocab-size 10": "--padded-vocab-size must be a multiple of .* 1 and at least .* got 10",
        "--exp-avg-dtype bf16": "--exp-avg-dtype must be fp32, got bfloat16; .* need Transformer",
        "--optimizer-cpu-offload --no-use-distributed-optimizer": "--use-distributed-optimizer must be on with",
        "--optimizer-offload-fraction 1.5": r"--optimizer-offload-fraction must lie in \[0, 1\], got 1.5",
    }.items():
        with pytest.raises(ValueError, match=message):
            parse_args([*argv, *flags.split()])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--rollout-buffer-url http://x",
            "--rollout-buffer-url must be left out .* got http://x; no trajectory buffer",
        ),
        ("--rollout-task-type code", "--rollout-task-type must be left at math .* got code"),
        ("--fetch-trajectory-retry-times 3", "--fetch-trajectory-retry-times must be left at -1 .* got 3"),
        ("--min-batch-collection-ratio 0.5", "--min-batch-collection-ratio must be left at 1.0 .* got 0.5"),
        (
            "--load-forge-rollout-data x.pt",
            "--load-forge-rollout-data must be left out .* got x.pt; --load-debug-",
        ),
    ],
)
def test_flags_that_no_script_of_slime_has_pass_at_their_default_only(argv, flags, message):
    with pytest.raises(ValueError, match=message):
        parse_args([*argv, *flags.split()])
    defaults = "--rollout-task-type math --fetch-trajectory-retry-times -1 --min-batch-collection-ratio 1"
    assert parse_args([*argv, *defaults.split()]).namespace().fetch_trajectory_retry_times == -1
