"""Tests rules of the shelf of algorithms: names, flags that cannot be combined, and the advice of `vime plan`."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_cases import good_argv

from slime.algo.estimators import surrogate_for
from slime.algo.needs import columns_read
from slime.config import Config
from slime.operators import LINEAR, ONE_PASS, loss_head
from slime.rules import parse_args
from vime.backends import parse_config


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    return good_argv(tmp_path)


def parsed(argv: list[str], flags: str) -> Config:
    return parse_args([*argv, *flags.split()])


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("--advantage-estimator gae", "ppo"),
        ("--advantage-estimator rloo_vectorized", "rloo"),
        ("--advantage-estimator grpo_passk", "pass_at_k"),
        ("--advantage-estimator reinforce++ --normalize-advantages", "reinforce_plus_plus"),
    ],
)
def test_names_of_other_projects(argv, typed, wanted):
    assert parsed(argv, typed).algorithm.advantage_estimator == wanted


@pytest.mark.parametrize(
    ("typed", "name", "head"),
    [
        ("vanilla", "clip", ONE_PASS),
        ("clip-cov", "clip_cov", ONE_PASS),
        ("kl-cov", "kl_cov", ONE_PASS),
        ("sapo", "sapo", ONE_PASS),
        ("reinforce", "reinforce", ONE_PASS),
        ("geo_mean", "gmpo", LINEAR),
        ("gspo-token", "gspo_token", LINEAR),
    ],
)
def test_policy_losses_and_their_heads(argv, typed, name, head):
    c = parse_args([*argv, "--pg-loss-type", typed])
    assert surrogate_for(c.algorithm).name == name and loss_head(c)[0] is head
    if head is LINEAR:
        assert loss_head(c)[1] == f"--pg-loss-type {name} looks at whole sequences"
    assert ("old_log_probs" in columns_read(c)) == name.endswith("_cov")


def test_corrections_per_token_stay_in_the_operator(argv):
    c = parsed(argv, "--use-tis --tis-mode icepop --tis-clip-low 0.5 --use-rs --rs-type k3")
    assert c.off_policy.tis_mode == "mask" and loss_head(c) == (ONE_PASS, "")
    assert (c.off_policy.rs_lower_bound, c.off_policy.rs_upper_bound) == (0.5, 2.0)
    for more in (
        "--use-tis --tis-level turn",
        "--use-rs --rs-level geometric",
        "--use-rs --rs-veto-threshold 1e-4",
    ):
        assert loss_head(parsed(argv, more))[0] is LINEAR, more
    # No token has a weight.
    assert loss_head(parse_args([*argv, "--tis-level", "sequence"])) == (ONE_PASS, "")


def test_settings_of_slimes_example_file(argv, tmp_path):
    """The file's keys are flags here. null leaves a flag out, and the other keys are settings of the user's
    function."""
    (tmp_path / "mis.yaml").write_text(
        "use_tis: true\nuse_rs: false\ntis_level: token\nrs_level: token\ntis_mode: truncate\ntis_lower_bound: 0.5\n"
        "tis_upper_bound: 2.0\nrs_lower_bound: null\nrs_upper_bound: null\nrs_veto_threshold: 1.0e-4\n"
        "tis_batch_normalize: true\n"
    )
    with pytest.raises(ValueError, match="--use-rs must be given with --rs-veto-threshold, got only 0.0001"):
        parse_args([*argv, "--custom-config-path", str(tmp_path / "mis.yaml")])
    path = "slime.backends.megatron_utils.loss.icepop_function"
    c = parse_args(
        [*argv, "--custom-config-path", str(tmp_path / "mis.yaml"), "--custom-tis-function-path", path]
    )
    assert c.off_policy.use_tis and c.namespace().tis_upper_bound == 2.0


def test_dr_grpo_is_one_flag(argv):
    c = parse_args([*argv, "--use-dr-grpo"])
    assert c.algorithm.disable_grpo_std_normalization and c.algorithm.dr_grpo_length == 32
    assert parsed(argv, "--use-dr-grpo --dr-grpo-length 20").algorithm.dr_grpo_length == 20
    assert parse_args(argv).algorithm.dr_grpo_length is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--use-dr-grpo --calculate-per-token-loss",
            "--use-dr-grpo must not be combined with --calculate-per-t",
        ),
        ("--dr-grpo-length 20", "--use-dr-grpo must be given with --dr-grpo-length, got only 20"),
        (
            "--overlong-buffer-len 33",
            "--overlong-buffer-len must be at most --rollout-max-response-len, got 33 and 32",
        ),
        (
            "--overlong-buffer-len 3 --custom-reward-post-process-path json.loads",
            "--overlong-buffer-len must not be combined with --custom-reward-post-process-path",
        ),
        (
            "--use-overlong-filtering --loss-type sft_loss",
            "--use-overlong-filtering must be left out with --loss-type",
        ),
        (
            "--advantage-estimator rloo --disable-rewards-normalization",
            "--disable-rewards-normalization must be left out with --advantage-estimator rloo",
        ),
        (
            "--advantage-estimator rloo --kl-coef 0.1",
            "--kl-coef must be 0 with --advantage-estimator rloo, got 0.1",
        ),
        (
            "--advantage-estimator rloo --n-samples-per-prompt 1 --rollout-batch-size 32",
            "--n-samples-per-prompt must be above 1 with --advantage-estimator rloo, got 1",
        ),
        (
            "--advantage-estimator pass_at_k --pass-at-k 9",
            "--n-samples-per-prompt must be at least --pass-at-k with --advantage-estimator pass_at_k, got 8 and 9",
        ),
        ("--advantage-estimator pass_at_k --pass-at-k 1", "--pass-at-k must be 2 or more, got 1"),
        (
            "--pg-loss-type sapo --loss-type sft_loss",
            "--pg-loss-type must be left out with --loss-type sft_loss",
        ),
        (
            "--pg-loss-type clip_cov --clip-cov-lb 6",
            "--clip-cov-lb must be below --clip-cov-ub, got 6.0 and 5.0",
        ),
        (
            "--pg-loss-type kl_cov --custom-advantage-function-path json.loads",
            "--custom-advantage-function-path must be left out with --pg-loss-type kl_cov",
        ),
        ("--use-rs --use-rollout-logprobs", "--use-rollout-logprobs must not be combined with --use-rs"),
        ("--use-rs --rs-lower-bound 3", "--rs-lower-bound must be at most --rs-upper-bound, got 3.0 and 2.0"),
        (
            "--use-rs --advantage-estimator gspo",
            "--rs-level token must not be combined with the policy loss gspo, got both; its ratio is of whole",
        ),
        (
            "--use-tis --tis-mode mask --tis-level turn --pg-loss-type gmpo",
            "--tis-mode mask --tis-level turn must not be combined with the policy loss gmpo",
        ),
    ],
)
def test_what_does_not_go_together(argv, flags, message):
    with pytest.raises(ValueError, match=message):
        parsed(argv, flags)


def test_masks_of_whole_sequences_go_with_ratios_of_sequences(argv):
    parsed(argv, "--use-rs --rs-level geometric --advantage-estimator gspo")
    parsed(argv, "--use-tis --tis-mode mask --tis-level sequence --pg-loss-type gmpo")
    parsed(argv, "--use-tis --advantage-estimator gspo")


def test_masks_of_whole_sequences_go_with_ratios_of_tokens(argv):
    """The masks drop whole responses, and the ratios of the remaining tokens do not change."""
    parsed(argv, "--use-rs --rs-level sequence")
    parsed(argv, "--use-tis --tis-mode mask --tis-level sequence")


@pytest.mark.parametrize(("flags", "rollouts"), [("--train-iters 6", 3), ("--train-samples 96", 3)])
def test_the_length_of_a_run_in_steps_or_samples(argv, flags, rollouts):
    at = argv.index("--num-rollout")
    c = parsed([*argv[:at], *argv[at + 2 :]], flags)
    assert c.data.num_rollout == rollouts and c.data.num_steps_per_rollout == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--train-iters 7 --num-rollout 3", r"--train-iters must be .*, 2 each \* --num-rollout 3, got 7"),
        (
            "--train-samples 100 --num-rollout 3",
            r"--train-samples must be .*, 32 each \* --num-rollout 3, got 100",
        ),
        (
            "--save-debug-train-data x/{rollout_id}.pt",
            r"must hold \{rollout_id\} and \{rank\} and no other braces",
        ),
        ("--save-debug-train-data x/{rank}", r"must hold \{rollout_id\} and \{rank\} and no other braces"),
        ("--save-debug-train-data {rollout_id}{rank}{x}", "must hold .* and no other braces"),
    ],
)
def test_flags_of_length_and_of_files_of_ranks(argv, flags, message):
    with pytest.raises(ValueError, match=message):
        parsed(argv, flags)


def test_details_are_the_samples_and_the_train_data(argv):
    c = parsed(argv, "--dump-details d")
    assert c.debug.save_debug_rollout_data == "d/rollout_data/{rollout_id}.pt"
    assert c.debug.save_debug_train_data == "d/train_data/{rollout_id}_{rank}.pt"


def test_a_correction_is_recommended_where_the_precision_differs(argv):
    def notes(*flags: str) -> list[str]:
        return [note for note in parse_config([*argv, *flags]).notes if "their probabilities" in note]

    assert notes() == [] and notes("--bf16") == []
    (note,) = notes("--vllm-dtype", "bfloat16")
    assert note.startswith("vLLM computes with bfloat16, the trainer with float32: ") and "--use-tis" in note
    assert notes("--vllm-dtype", "bfloat16", "--use-tis") == []
    assert notes("--vllm-dtype", "bfloat16", "--use-rollout-logprobs") == []
    (note,) = notes("--bf16", "--vllm-quantization", "fp8")
    assert note.startswith("vLLM computes with quantised weights (1 bytes each), the trainer with bfloat16: ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--loss-type sft_loss --debug-rollout-only",
            "--eval-interval must be left out with --debug-rollout-only and --loss-type sft_loss, got 2",
        ),
        (
            "--loss-type sft_loss --eval-function-path slime.rollout.sft_rollout.generate_pairs",
            "--eval-function-path must make conversations with --loss-type sft_loss, got slime.rollout.sft_rollout."
            "generate_pairs; use slime.rollout.sft_rollout.generate_rollout",
        ),
        (
            "",
            "--eval-interval must be left out with --loss-type policy_loss and the evaluation function slime.",
        ),
        (
            "--loss-type sft_loss --custom-eval-rollout-log-function-path slime.rollout.generate.generate",
            "--custom-eval-rollout-log-function-path must be left out with --loss-type sft_loss",
        ),
    ],
)
def test_held_out_losses_need_a_loss_and_a_trainer(argv, tmp_path, flags, message):
    given = [*argv, "--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout"]
    given += ["--eval-interval", "2", "--eval-prompt-data", "held", argv[argv.index("--prompt-data") + 1]]
    with pytest.raises(ValueError) as error:
        parse_args([*given, *flags.split()])
    assert message in str(error.value)
