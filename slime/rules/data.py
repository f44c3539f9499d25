"""Defines the rules of the data, of the length of a run, and of debug flags."""

from __future__ import annotations

import json
from pathlib import Path

from slime.algo.losses import MASKED_ROLLOUTS, PAIRS_ROLLOUT, SFT_ROLLOUT, loss_for
from slime.config.fields import spelled
from slime.config.problems import Problems, require_value
from slime.config.schema import Config
from slime.config.sections.debug import profiled_steps
from slime.data.drawing.mixing import data_sets
from slime.data.files import find_source
from slime.data.media.row import KINDS
from slime.hooks import load_function
from slime.records.errors import FlagError


def check_files(c: Config) -> None:
    """Checks that each file of prompts exists, and that each data set has a name and a weight."""
    problems = Problems()
    flag = "--environment" if c.sessions.environment else "--prompt-data"
    for one in data_sets(c.data):
        problems.check(find_source, one.path, flag)
    for path in (c.evaluation.eval_prompt_data or [])[1::2]:
        problems.check(find_source, path, "--eval-prompt-data")
    if c.evaluation.eval_config is not None and not Path(c.evaluation.eval_config).exists():
        problems.add(
            FlagError("--eval-config", "name a file that exists", c.evaluation.eval_config, "check the path")
        )
    problems.report()


def check_held_out(c: Config) -> None:
    """Checks that the trainer can compute the loss of the held-out samples that an evaluation makes."""
    problems, e, kind = Problems(), c.evaluation, loss_for(c.algorithm)
    if e.eval_interval is None or e.eval_function_path not in MASKED_ROLLOUTS:
        return
    if kind.rewarded:
        problems.add(
            FlagError(
                "--eval-interval",
                f"be left out with --loss-type {kind.name} and the evaluation function "
                f"{e.eval_function_path}",
                e.eval_interval,
                "give an --eval-function-path that scores responses: held-out losses are those of "
                "sft_loss, dpo and reward_model",
            )
        )
    elif kind.pairs != (e.eval_function_path == PAIRS_ROLLOUT):
        what, wanted = ("pairs", PAIRS_ROLLOUT) if kind.pairs else ("conversations", SFT_ROLLOUT)
        problems.add(
            FlagError(
                "--eval-function-path",
                f"make {what} with --loss-type {kind.name}",
                e.eval_function_path,
                f"use {wanted}",
            )
        )
    if c.debug.debug_rollout_only:
        problems.add(
            FlagError(
                "--eval-interval",
                f"be left out with --debug-rollout-only and --loss-type {kind.name}",
                e.eval_interval,
                "the trainer computes held-out losses",
            )
        )
    if hook := c.rollout.custom_eval_rollout_log_function_path:
        problems.add(
            FlagError(
                "--custom-eval-rollout-log-function-path",
                f"be left out with --loss-type {kind.name}",
                hook,
                "the trainer computes held-out losses, and metrics.jsonl has them",
            )
        )
    problems.report()


def check_media(c: Config) -> None:
    """Checks --multimodal-keys."""
    keys = c.data.multimodal_keys
    if not keys:
        return
    problems = Problems()
    for kind, column in keys.items():
        if kind not in KINDS:
            problems.add(
                FlagError(
                    "--multimodal-keys",
                    f"name columns of {' and '.join(KINDS)}",
                    f"{kind!r}",
                    "leave this kind of media out",
                )
            )
        elif not isinstance(column, str) or not column:
            problems.add(
                FlagError(
                    "--multimodal-keys",
                    "map each kind of media to the name of a column",
                    f"{column!r} for {kind!r}",
                    """write '{"image": "images"}'""",
                )
            )
    if loss_for(c.algorithm).pairs:
        problems.add(
            FlagError(
                "--multimodal-keys",
                f"be left out with --loss-type {c.algorithm.loss_type}",
                json.dumps(keys),
                "train on pairs of texts, or on conversations with --loss-type sft_loss",
            )
        )
    problems.report()


def check_curriculum(c: Config) -> None:
    """Checks --curriculum, which compares the rewards of a group of prompts from a data source that supports it."""
    data = c.data
    if data.curriculum is None:
        return
    problems = Problems()
    if data.n_samples_per_prompt < 2:
        problems.add(
            FlagError(
                "--n-samples-per-prompt",
                "be 2 or more with --curriculum",
                "1",
                "one reward has no advantage",
            )
        )
    if not loss_for(c.algorithm).rewarded:
        problems.add(
            FlagError(
                "--curriculum",
                "be left out without rewards",
                f"it with --loss-type {c.algorithm.loss_type}",
                "take it out",
            )
        )
    if not data.prompt_data or data.disable_rollout_global_dataset:
        problems.add(FlagError("--prompt-data", "be given with --curriculum", "none", "name a file"))
    source = load_function(data.data_source_path, flag="--data-source-path")
    if not hasattr(source, "observe"):
        problems.add(
            FlagError(
                "--data-source-path",
                "have observe(groups) with --curriculum",
                data.data_source_path,
                "derive the class from slime.data.data_source.RolloutDataSourceWithBuffer",
            )
        )
    problems.report()


def check_length(c: Config) -> None:
    """Checks that --train-iters and --train-samples are a whole number of rollouts, equal to --num-rollout."""
    d, steps = c.data, c.data.num_steps_per_rollout
    for name, of_rollout in (
        ("train_iters", steps),
        ("train_samples", d.rollout_batch_size * d.n_samples_per_prompt),
    ):
        if of_rollout and (stated := c.get_value(name)) not in (None, (d.num_rollout or 0) * of_rollout):
            rollouts = "" if d.num_rollout is None else f" * --num-rollout {d.num_rollout}"
            raise FlagError(
                spelled(name),
                f"be a number of whole rollouts, {of_rollout} each{rollouts}",
                stated,
                "give --num-rollout alone",
            )


def check_train_data_file(c: Config) -> None:
    """Checks that each rank and each rollout writes a separate file, in a format of this version."""
    if (samples := c.debug.save_debug_rollout_data) is not None and samples.endswith(".straw.json"):
        raise FlagError(
            "--save-debug-rollout-data",
            "not end with .straw.json, which names an archive of slime's",
            samples,
            "end it with .pt, for a file that has all samples",
        )
    if (template := c.debug.save_debug_train_data) is None:
        return
    try:
        one = template.format(rollout_id=0, rank=0)
        distinct = template.format(rollout_id=1, rank=0) != one != template.format(rollout_id=0, rank=1)
    except (KeyError, IndexError, ValueError):
        distinct = False
    if not distinct:
        raise FlagError(
            "--save-debug-train-data",
            "hold {rollout_id} and {rank} and no other braces",
            template,
            "each rank writes a file a rollout",
        )


def check_memory_history(c: Config) -> None:
    """Checks --record-memory-history: PyTorch records the memory of GPUs only."""
    if not c.debug.record_memory_history:
        return
    if c.cluster.device != "cuda":
        raise FlagError(
            "--record-memory-history",
            "be used on GPUs",
            f"--device {c.cluster.device}",
            "leave the flag out: PyTorch does not record the memory of a CPU",
        )
    if c.debug.debug_rollout_only:
        raise FlagError(
            "--record-memory-history",
            "not be combined with --debug-rollout-only",
            "both",
            "it records the trainer",
        )


def check_profile_steps(c: Config) -> None:
    """Checks that the range of --profile-steps contains a training step of the run."""
    steps = profiled_steps(c.debug.profile_steps)
    if steps and c.debug.debug_rollout_only:
        raise FlagError(
            "--profile-steps",
            "not be combined with --debug-rollout-only",
            c.debug.profile_steps,
            "it traces training",
        )
    if steps and c.data.num_rollout is not None and steps.start >= c.data.num_rollout:
        raise FlagError(
            "--profile-steps",
            "begin below --num-rollout",
            f"{c.debug.profile_steps} and {c.data.num_rollout}",
            "rollouts count from 0",
        )


def check_batches(c: Config) -> None:
    """Checks that the optimizer steps of a rollout have its samples."""
    prompts = require_value(c.data.rollout_batch_size)
    samples = prompts * c.data.n_samples_per_prompt
    ours = f"{prompts} * {c.data.n_samples_per_prompt} = {samples}"
    size, steps = c.data.global_batch_size, c.data.num_steps_per_rollout
    if c.data.variable_global_batch_size and size is not None:
        _check_step_sizes(c, samples, ours)
    elif size is None or steps is None:  # only one was given, and the other cannot be derived from it
        name = "--global-batch-size" if steps is None else "--num-steps-per-rollout"
        raise FlagError(
            name, "divide --rollout-batch-size * --n-samples-per-prompt", f"{size or steps} and {ours}"
        )
    elif samples != size * steps:
        raise FlagError(
            "--rollout-batch-size * --n-samples-per-prompt",
            "equal --global-batch-size * --num-steps-per-rollout",
            f"{ours} and {size} * {steps} = {size * steps}",
        )
    if require_value(c.rollout.over_sampling_batch_size) < prompts:
        raise FlagError(
            "--over-sampling-batch-size",
            "be at least --rollout-batch-size",
            f"{c.rollout.over_sampling_batch_size} and {prompts}",
        )


def _check_step_sizes(c: Config, samples: int, ours: str) -> None:
    """Checks steps of several sizes."""
    sizes, steps = c.data.step_sizes, c.data.num_steps_per_rollout
    shown = "+".join(map(str, sizes))
    if sum(sizes) != samples:
        raise FlagError(
            "--global-batch-size-schedule",
            "have the sum --rollout-batch-size * --n-samples-per-prompt",
            f"{shown} = {sum(sizes)} and {ours}",
            "or give --global-batch-size with --variable-global-batch-size",
        )
    if steps != len(sizes):
        raise FlagError(
            "--num-steps-per-rollout", f"be the number of steps {shown}", steps, "leave the flag out"
        )
