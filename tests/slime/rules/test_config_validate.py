"""Tests derived values, and every rule with the numbers that its error shows."""

from pathlib import Path

import pytest
from config_cases import good_argv

from slime.roles import REFERENCE, get_roles
from slime.rules import parse_args, resolve


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    return good_argv(tmp_path)


def without(argv: list[str], flag: str, values: int = 1) -> list[str]:
    at = argv.index(flag)
    return argv[:at] + argv[at + 1 + values :]


def test_what_was_left_open_is_filled_in(argv):
    c = parse_args([*argv, "--max-tokens-per-gpu", "256", "--use-dynamic-batch-size", "--eval-top-p", "0.5"])
    assert (c.rollout.over_sampling_batch_size, c.data.num_steps_per_rollout) == (4, 2)
    assert (c.algorithm.eps_clip_high, c.checkpoint.ref_load, c.cluster.rollout_num_gpus, c.num_engines) == (
        0.2,
        c.rollout.hf_checkpoint,
        2,
        2,
    )
    assert (
        c.evaluation.eval_top_p,
        c.evaluation.eval_temperature,
        c.evaluation.eval_max_response_len,
        c.evaluation.eval_input_key,
    ) == (
        0.5,
        1.0,
        32,
        "input",
    )
    assert c.cluster.distributed_backend == "gloo"
    assert (c.megatron.params_dtype, c.world_size, c.data_parallel_size, c.total_steps) == (
        "float32",
        2,
        2,
        6,
    )
    assert (
        c.evaluation.eval_function_path
        == c.rollout.rollout_function_path
        == "slime.rollout.vllm_rollout.generate_rollout"
    )
    assert REFERENCE not in get_roles(c)


@pytest.mark.parametrize(
    ("flags", "transport"),
    [
        ("", "disk"),  # two ranks on the CPU
        ("--device cuda", "ipc"),
        ("--device cuda --update-weight-transport nccl", "ipc"),
        ("--device cuda --update-weight-transport disk", "disk"),
        ("--device cuda --no-colocate --rollout-num-gpus 1", "nccl"),
        ("--device cuda --no-colocate --rollout-num-gpus 1 --update-weight-transport disk", "disk"),
        ("--update-weight-transport nccl", "nccl"),
    ],
)
def test_weights_travel_through_shared_memory_where_there_is_some(argv, flags, transport):
    c = parse_args([*argv, *flags.split()])
    assert c.weight_update.update_weight_transport == transport
    assert any("is ipc with --colocate" in note for note in c.notes) == (
        "nccl" in flags and transport == "ipc"
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, (32, 1)),
        ({"global_batch_size": 8}, (8, 4)),
        ({"num_steps_per_rollout": 2}, (16, 2)),
        ({"global_batch_size": 16, "num_steps_per_rollout": 2}, (16, 2)),
    ],
)
def test_batch_sizes_follow_from_each_other(flags, expected):
    c = resolve({"rollout_batch_size": 4, "n_samples_per_prompt": 8, "device": "cpu", **flags})
    assert (c.data.global_batch_size, c.data.num_steps_per_rollout) == expected


def test_the_batch_equation_names_the_flags_that_were_typed(argv):
    steps = [*without(argv, "--global-batch-size"), "--num-steps-per-rollout", "3"]
    with pytest.raises(ValueError) as error:
        parse_args(steps)
    wanted = "--num-steps-per-rollout must divide --rollout-batch-size * --n-samples-per-prompt, got 3 and 4 * 8 = 32"
    assert str(error.value) == wanted


def test_a_hub_name_is_told_from_a_wrong_path(argv):
    hint = "; if that is a name on the Hugging Face hub: hf download Qwen/Qwen3-4B (vime train does so)"
    for flags, ends in [
        ("Qwen/Qwen3-4B", "got Qwen/Qwen3-4B" + hint),
        ("Qwen/Qwen3-4B --use-kl-loss", "got Qwen/Qwen3-4B" + hint),
        ("./Qwen/Qwen3-4B", "check the path"),
        ("absent/path/model", "check the path"),
    ]:
        with pytest.raises(ValueError) as error:
            parse_args([*argv, "--hf-checkpoint", *flags.split()])
        assert str(error.value).startswith("--hf-checkpoint must be a directory") and str(
            error.value
        ).endswith(ends)


def test_precision_follows_the_device():
    assert resolve({"device": "cuda"}).megatron.params_dtype == "bfloat16"
    assert resolve({"device": "cuda", "fp16": True}).megatron.params_dtype == "float16"
    assert resolve({"device": "cuda", "fp32": True}).megatron.params_dtype == "float32"
    assert resolve({"device": "cpu", "bf16": True}).megatron.params_dtype == "bfloat16"
    assert resolve({"device": "cuda"}).cluster.distributed_backend == "nccl"


def test_directories():
    given = {"device": "cpu", "hf_checkpoint": "models/tiny"}
    config = resolve(given)
    assert config.logging.run_dir.startswith(str(Path("runs") / "tiny-"))
    assert resolve(given).logging.run_dir != config.logging.run_dir, "two runs that start in the same second"
    assert config.weight_update.weight_dir is None
    assert resolve({**given, "update_weight_disk_dir": "w"}).weight_update.weight_dir == "w"
    assert (
        resolve({**given, "update_weight_disk_dir": "w", "weight_dir": "v"}).weight_update.weight_dir == "v"
    )


def test_debug_flags_expand():
    c = resolve({"device": "cpu", "dump_details": "out"})
    assert c.debug.save_debug_rollout_data == "out/rollout_data/{rollout_id}.pt"
    assert (
        resolve({"dump_details": "out", "save_debug_rollout_data": "mine"}).debug.save_debug_rollout_data
        == "mine"
    )
    given = {"device": "cpu", "n_samples_per_prompt": 2, "rollout_num_gpus": 4}
    c = resolve({**given, "load_debug_rollout_data": "x.pt"})
    assert c.debug.debug_train_only and c.num_engines == 0
    assert c.notes == ("--rollout-num-gpus 4 is taken as 0: only the trainer runs",)


def test_notes_name_what_was_adjusted(argv):
    c = parse_args(
        [*argv, "--rollout-num-gpus", "1", "--use-kl-loss", "--num-epoch", "2", "--rollout-top-p", "0.9"]
    )
    assert REFERENCE in get_roles(c) and c.cluster.rollout_num_gpus == 2
    starts = [
        "--rollout-num-gpus 1 is taken as 2",
        "--num-epoch 2 has no effect",
        "--use-kl-loss",
        "--rollout-top-p",
    ]
    assert [n.startswith(s) for n, s in zip(c.notes, starts, strict=True)] == [True] * 4


def test_supervised_training_needs_no_reference(argv):
    """A reported KL is left out with a note; a KL in the loss is an error."""
    sft = [*argv, "--loss-type", "sft_loss", "--n-samples-per-prompt", "1", "--global-batch-size", "4"]
    sft += ["--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout"]
    c = parse_args([*sft, "--use-kl-loss"])
    assert REFERENCE not in get_roles(c)
    assert [n for n in c.notes if "KL" in n or "kl" in n] == [
        "--use-kl-loss has no effect with --loss-type sft_loss: there is no KL in this loss"
    ]
    for flags, name in (("--use-kl-loss --kl-loss-coef 0.1", "kl-loss-coef"), ("--kl-coef 0.1", "kl-coef")):
        with pytest.raises(ValueError, match=f"^--{name} must be 0 with --loss-type sft_loss, got 0.1"):
            parse_args([*sft, *flags.split()])
    kept = [*argv, "--advantage-estimator", "reinforce_plus_plus", "--normalize-advantages"]
    for flags in ("--use-kl-loss --kl-loss-coef 0.1", "--kl-coef 0.1"):
        assert REFERENCE in get_roles(parse_args([*kept, *flags.split()]))


def test_supervised_training_needs_no_engine(argv):
    c = parse_args(
        [
            *without(without(argv, "--rollout-max-response-len"), "--colocate", 0),
            *("--debug-train-only", "--loss-type", "sft_loss", "--disable-compute-advantages-and-returns"),
            *("--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout", "--num-epoch", "1"),
        ]
    )
    assert c.num_engines == 0 and c.cluster.rollout_num_gpus == 0


@pytest.mark.parametrize(
    "flag", ["--hf-checkpoint", "--rollout-batch-size", "--prompt-data", "--num-rollout"]
)
def test_required_flags(argv, flag):
    with pytest.raises(ValueError, match=f"^{flag} must be given"):
        parse_args(without(argv, flag))


RULES = [
    # batches
    (
        "--num-steps-per-rollout 3",
        "must equal --global-batch-size * --num-steps-per-rollout, got 4 * 8 = 32 and 16 * 3 = 48",
    ),
    (
        "--global-batch-size 12",
        "--global-batch-size must divide --rollout-batch-size * --n-samples-per-prompt, got 12 and 4 * 8 = 32",
    ),
    ("--global-batch-size 64", "--n-samples-per-prompt, got 64 and 4 * 8 = 32"),
    ("--global-batch-size 0", "--global-batch-size must be above 0, got 0"),
    (
        "--micro-batch-size 3",
        "--global-batch-size must be a multiple of data-parallel size * --micro-batch-size, got 16 and 2 * 3 = 6",
    ),
    (
        "--use-dynamic-batch-size",
        "--max-tokens-per-gpu must be given with --use-dynamic-batch-size, got none",
    ),
    (
        "--over-sampling-batch-size 2",
        "--over-sampling-batch-size must be at least --rollout-batch-size, got 2 and 4",
    ),
    ("--actor-num-gpus-per-node 32 --use-dynamic-batch-size --max-tokens-per-gpu 64", "got 16 for 32 ranks"),
    ("--rollout-batch-size 0", "--rollout-batch-size must be above 0, got 0"),
    # topology
    ("--tensor-model-parallel-size 3", "must be a multiple of TP * PP * CP, got 1 * 2 = 2 and 3 * 1 * 1 = 3"),
    (
        "--pipeline-model-parallel-size 3",
        "must be a multiple of TP * PP * CP, got 1 * 2 = 2 and 1 * 3 * 1 = 3",
    ),
    (
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 0",
        "--pipeline-model-parallel-size must deal the model's layers out equally, got 2 stages",
    ),
    ("--hidden-dropout 0.1", "--hidden-dropout must be 0, got 0.1; log-probs of two passes"),
    ("--attention-dropout 0.1", "--attention-dropout must be 0, got 0.1; log-probs of two passes"),
    (
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|L",
        "--pipeline-model-parallel-layout must have a number of stages that is a multiple of "
        "--pipeline-model-parallel-size 2, got Et|t|L (3 stages, 2 layers)",
    ),
    (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3",
        "must be a multiple of its 3 virtual stages, got 2 layers on rank 0 of 2 (4 layers)",
    ),
    ("--context-parallel-size 4", "must be a multiple of TP * PP * CP, got 1 * 2 = 2 and 1 * 1 * 4 = 4"),
    ("--expert-model-parallel-size 2", "must be left out for a dense model, got 2 and None"),
    ("--expert-tensor-parallel-size 2", "must be left out for a dense model, got 1 and 2"),
    ("--no-colocate", "--rollout-num-gpus must be given when --colocate is not, got none"),
    ("--no-colocate --rollout-num-gpus 3 --rollout-num-gpus-per-engine 2", "got 3 and 2"),
    (
        "--no-colocate --rollout-num-gpus 6 --rollout-num-gpus-per-engine 3 --num-gpus-per-node 2",
        "must be a multiple of --num-gpus-per-node when it is larger, got 3 and 2; use 2 or 4",
    ),
    (
        "--debug-rollout-only --debug-train-only",
        "--debug-rollout-only must not be combined with --debug-train-only",
    ),
    ("--max-staleness 1", "--max-staleness must be 0 with --colocate, got 1"),
    (
        "--update-weights-interval 2",
        "--update-weights-interval must be at most --max-staleness + 1, got 2 and 0",
    ),
    (
        "--update-weight-transport ipc",
        "--update-weight-transport ipc must have trainer and engines on the same GPUs, got --device cpu",
    ),
    (
        "--device cuda --no-colocate --rollout-num-gpus 1 --update-weight-transport ipc",
        "--update-weight-transport ipc must have trainer and engines on the same GPUs, got no --colocate",
    ),
    ("--update-weight-buffer-size 0", "--update-weight-buffer-size must be above 0, got 0"),
    ("--bf16 --fp32", "must not be combined, got --bf16 and --fp32"),
    ("--device cuda --distributed-backend gloo", "--distributed-backend must be nccl on GPUs, got gloo"),
    ("--fp16", "--fp16 must be left out in this version"),
    # sampling
    ("--rollout-temperature 0", "--rollout-temperature must be above 0, got 0.0"),
    ("--rollout-top-p 0", "--rollout-top-p must lie in (0, 1], got 0.0"),
    ("--eval-top-p 1.5", "--eval-top-p must lie in (0, 1], got 1.5"),
    ("--rollout-top-k 0", "--rollout-top-k must be -1 (off) or above 0, got 0"),
    # algorithm
    ("--critic-save x", "--critic-save must be left out with --advantage-estimator grpo, got x"),
    ("--advantage-estimator ppo --critic-lr -1", "--critic-lr must be 0 or more, got -1.0"),
    ("--advantage-estimator reinforce_plus_plus", "must be used with --normalize-advantages"),
    ("--loss-type custom_loss", "--custom-loss-function-path must be given with --loss-type custom_loss"),
    ("--eps-clip-c 1", "--eps-clip-c must be above 1, got 1.0"),
    ("--eps-clip 1", "--eps-clip must be below 1, got 1.0"),
    (
        "--kl-coef 0.1 --kl-loss-coef 0.2 --use-kl-loss",
        "--kl-coef and --kl-loss-coef must not both be set, got 0.1 and 0.2",
    ),
    ("--kl-loss-coef 0.2", "--use-kl-loss must be given with --kl-loss-coef, got only --kl-loss-coef 0.2"),
    ("--use-rollout-logprobs --use-tis", "--use-rollout-logprobs must not be combined with --use-tis"),
    (
        "--use-rollout-logprobs --rollout-top-k 5",
        "--use-rollout-logprobs must be used with --rollout-top-p 1",
    ),
    ("--tis-clip-low 3", "--tis-clip-low must be at most --tis-clip, got 3.0 and 2.0"),
    ("--adam-beta2 1", "--adam-beta2 must lie in [0, 1), got 1.0"),
    ("--lr -1", "--lr must be 0 or more, got -1.0"),
    # rewards, files, hooks
    ("--rm-type mth", "--rm-type must be one of math, deepscaler"),
    ("--rm-type remote_rm", "--rm-url must be given with --rm-type remote_rm, got none"),
    ("--save-interval 5", "--save must be given with --save-interval, got only --save-interval 5"),
    ("--eval-interval 5", "--eval-prompt-data must be given with --eval-interval 5, got none"),
    ("--eval-prompt-data a b c", "--eval-prompt-data must be pairs of name and path, got a b c"),
    (
        "--eval-prompt-data aime absent.jsonl",
        "--eval-prompt-data must name an existing file, got absent.jsonl",
    ),
    ("--prompt-data a=absent.jsonl b=x", "--prompt-data must name an existing file, got absent.jsonl"),
    (
        "--prompt-data a=x a=y",
        "--prompt-data must give each data set a name of its own, got a more than once",
    ),
    ("--prompt-data-weights a=1", "--prompt-data-weights must have one weight for each NAME=PATH"),
    ("--curriculum 2", "--curriculum must lie in [0, 1], got 2"),
    (
        "--curriculum 0.1 --n-samples-per-prompt 1 --global-batch-size 4",
        "--n-samples-per-prompt must be 2 or more",
    ),
    (
        "--curriculum 0.1 --data-source-path slime.types.Sample",
        "--data-source-path must have observe(groups)",
    ),
    (
        "--prompt-data absent.jsonl@[0:10]",
        "--prompt-data must name an existing file, got absent.jsonl",
    ),
    ("--eval-config absent.yaml", "--eval-config must name a file that exists, got absent.yaml"),
    ("--ref-load absent", "--ref-load must name a Hugging Face directory with model.safetensors"),
    (
        "--use-kl-loss --ref-load absent",
        "got absent, which is no directory; leave it out to use --hf-checkpoint",
    ),
    ("--hf-checkpoint absent", "--hf-checkpoint must be a directory with a config.json, got absent"),
    ("--custom-rm-path json.lods", "--custom-rm-path must name a function of json, got 'lods'; did you mean"),
    (
        "--rollout-sample-hook-path no_such_module.f",
        "--rollout-sample-hook-path must name a module that can be imported",
    ),
    (
        "--load-debug-rollout-data-subsample 2",
        "--load-debug-rollout-data-subsample must lie in (0, 1], got 2.0",
    ),
]


@pytest.mark.parametrize(("flags", "message"), RULES, ids=[flags for flags, _ in RULES])
def test_rules(argv, flags, message):
    with pytest.raises(ValueError) as error:
        parse_args([*argv, *flags.split()])
    assert message in str(error.value)


def test_an_engine_may_fill_several_nodes(argv):
    flags = [
        "--no-colocate",
        "--rollout-num-gpus",
        "8",
        "--rollout-num-gpus-per-engine",
        "4",
        "--num-gpus-per-node",
    ]
    nodes = {size: parse_args([*argv, *flags, str(size)]).nodes_per_engine for size in (1, 2, 4, 8)}
    assert nodes == {1: 4, 2: 2, 4: 1, 8: 1}


def test_asynchronous_settings_pass(argv):
    flags = [
        "--no-colocate",
        "--rollout-num-gpus",
        "1",
        "--max-staleness",
        "1",
        "--update-weights-interval",
        "2",
    ]
    c = parse_args([*argv, *flags])
    assert (c.num_engines, c.rollout.max_staleness) == (1, 1)


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("--lr 10", ["--lr 10"]),
        ("--lr 2e-3", ["--lr 0.002"]),
        ("--lr 1e-3", []),
        ("--lr 1e-2 --lora-rank 4", []),
        ("--lr 2e-2 --lora-rank 4", ["--lr 0.02"]),
        ("--advantage-estimator ppo --critic-lr 10", ["--critic-lr 10"]),
        ("--advantage-estimator ppo --critic-lr 1e-2", []),
        ("--lr 10 --debug-rollout-only", []),
    ],
)
def test_a_note_names_a_learning_rate_that_is_too_high(argv, flags, names):
    notes = [note for note in parse_args([*argv, *flags.split()]).notes if "Adam moves" in note]
    assert [note.partition(":")[0] for note in notes] == names
