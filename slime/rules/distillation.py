"""Defines the rules of on-policy distillation: where the teacher runs, and that its vocabulary is the policy's."""

from __future__ import annotations

import json
from pathlib import Path

from slime.algo.losses import loss_for
from slime.algo.needs import draws_in_loss
from slime.checkpoints.checkpoint_dir import is_hf_directory
from slime.checkpoints.hf_config import read_hf_config
from slime.config.fields import get_specs, spelled
from slime.config.problems import require_value
from slime.config.schema import Config
from slime.config.sections.distillation import DistillationConfig
from slime.models import read_decoder
from slime.models.decoder import Hf
from slime.plan.stages import check_stages
from slime.records.errors import FlagError
from slime.roles import TEACHER, get_roles
from slime.roles.served import by_name, teacher_directories, teachers
from slime.rules.heads import check_attention


def check_distillation(c: Config) -> None:
    """Checks that the flags of a teacher fit together, and that its log-probs are used."""
    flags = c.distillation
    if not flags.use_opd:
        for name, spec in get_specs(DistillationConfig).items():
            if (value := c.get_value(name)) != spec.default:
                raise FlagError(
                    "--use-opd",
                    f"be given with {spelled(name)}",
                    f"only {value}",
                    "add it, or leave the flag out",
                )
        return
    if flags.opd_type is None:
        raise FlagError(
            "--opd-type",
            "be given with --use-opd",
            "none",
            "megatron loads the teacher on the trainer's ranks, sglang and vllm serve "
            "--opd-teacher-model or ask a server at --rm-url",
        )
    if not loss_for(c.algorithm).rewarded or c.algorithm.disable_compute_advantages_and_returns:
        what = (
            f"--loss-type {c.algorithm.loss_type}"
            if not loss_for(c.algorithm).rewarded
            else "--disable-compute-advantages-and-returns"
        )
        raise FlagError(
            "--use-opd",
            f"not be combined with {what}",
            "both",
            "the KL to the teacher is a part of advantages",
        )
    _check_loss(c)
    if flags.opd_type == "megatron":
        _check_on_ranks(c)
    else:
        _check_served(c)


def _check_on_ranks(c: Config) -> None:
    """Checks the flags of a teacher on the trainer's ranks."""
    if c.distillation.opd_teacher_load is None:
        raise FlagError(
            "--opd-teacher-load", "be given with --opd-type megatron", "none", "name the teacher's weights"
        )
    for name, spec in get_specs(DistillationConfig).items():
        if name in _SERVED and (value := c.get_value(name)) != spec.default:
            raise FlagError(
                spelled(name),
                "be left out with --opd-type megatron",
                value,
                "its teacher is the one model of --opd-teacher-load",
            )


_SERVED = (
    "opd_teacher_model",
    "opd_teacher_url",
    "opd_teacher_key",
    "opd_teacher_num_gpus",
    "opd_teacher_num_gpus_per_engine",
    "opd_teacher_engine_args",
)


def _check_served(c: Config) -> None:
    """Checks the flags of teachers on engines of the run, or on the user's own servers."""
    flags = c.distillation
    for name in ("opd_teacher_load", "opd_teacher_ckpt_step"):
        if (value := c.get_value(name)) is not None:
            raise FlagError(
                spelled(name),
                f"be left out with --opd-type {flags.opd_type}",
                value,
                "engines of the run serve --opd-teacher-model, and --rm-url names a teacher's server",
            )
    by_name("opd_teacher_url", flags.opd_teacher_url)
    models = teacher_directories(c)
    in_files = [model for model in teachers(c).values() if model.file]
    kinds = {
        "--opd-teacher-model": len(models),
        "--opd-teacher-url": len(flags.opd_teacher_url or ()),
        **{f"{model.name} in {model.file}": 1 for model in in_files[:1]},
    }
    if len(found := [f"{many} of {kind}" for kind, many in kinds.items() if many]) > 1:
        raise FlagError(
            " and ".join((kind for kind, many in kinds.items() if many)),
            "not be combined",
            " and ".join(found),
            "a run has teachers of one kind",
        )
    if in_files and flags.opd_type != c.engine.rollout_backend:
        raise FlagError(
            "--opd-type",
            f"be {c.engine.rollout_backend} with {in_files[0].name} in {in_files[0].file}",
            flags.opd_type,
            "models of a file have engines of --rollout-backend",
        )
    for name in ("opd_teacher_num_gpus", "opd_teacher_num_gpus_per_engine", "opd_teacher_engine_args"):
        if not models and (value := c.get_value(name)) != get_specs(DistillationConfig)[name].default:
            raise FlagError(
                "--opd-teacher-model",
                f"be given with {spelled(name)}",
                f"only {value}",
                "it is for engines of the run",
            )
    if models or in_files:
        _check_temperature(c)
        return
    brought = c.rollout.custom_generate_function_path or c.rollout.rollout_sample_hook_path
    hooked = brought or c.reward.custom_rm_path or c.reward.custom_reward_post_process_path
    named = flags.opd_teacher_url or c.reward.rm_url
    if not named and not (hooked or c.debug.load_debug_rollout_data):
        raise FlagError(
            "--opd-teacher-model",
            f"be given with --opd-type {flags.opd_type}",
            "none",
            "or name the teacher's server in --rm-url",
        )


def _check_temperature(c: Config) -> None:
    """Checks the temperature at which engines of the run can score."""
    if c.distillation.opd_type == "sglang" and c.rollout.rollout_temperature != 1:
        raise FlagError(
            "--rollout-temperature",
            "be 1 with teachers of the run and --opd-type sglang",
            c.rollout.rollout_temperature,
            "SGLang's log-probs of given tokens are at temperature 1, and their difference would "
            "be no KL: use --opd-type vllm, whose logits are divided by the temperature",
        )


def _check_loss(c: Config) -> None:
    """Checks that a divergence in the loss has the teacher's likeliest ids, and a loss that can include it."""
    flags, kind = c.distillation, f"--opd-loss-type {c.distillation.opd_loss_type}"
    if not draws_in_loss(c):
        set_flags = {"--opd-loss-coef": flags.opd_loss_coef != 1, "--opd-jsd-beta": flags.opd_jsd_beta != 0.5}
        if name := next((name for name, on in set_flags.items() if on), None):
            raise FlagError(
                name,
                f"be left out with {kind}",
                "both",
                "the reverse KL is a part of the advantages and has the weight --opd-kl-coef",
            )
        return
    if not flags.opd_top_k:
        raise FlagError(
            "--opd-top-k",
            f"be above 0 with {kind}",
            "0",
            "its sum is over that many of the teacher's likeliest tokens: 64 is a start",
        )
    if not 0 < flags.opd_jsd_beta < 1:
        raise FlagError(
            "--opd-jsd-beta", "lie between 0 and 1", flags.opd_jsd_beta, "at the ends the divergence is 0"
        )
    others = {
        f"--loss-type {c.algorithm.loss_type}": not loss_for(c.algorithm).surrogate,
        "--replay-kept-tokens": c.off_policy.replay_kept_tokens,
        "--opd-kl-coef": flags.opd_kl_coef != 1,
        "--opd-jsd-beta": flags.opd_loss_type != "jsd" and flags.opd_jsd_beta != 0.5,
    }
    if name := next((name for name, on in others.items() if on), None):
        raise FlagError(
            name,
            f"not be combined with {kind}",
            "both",
            "that loss is a term of policy_loss over the whole vocabulary, with the weight --opd-loss-coef",
        )


def check_teacher(c: Config) -> None:
    """Checks the models of teachers: the policy's vocabulary, and, on the trainer's ranks, layers that its layout can
    hold."""
    mine = require_value(c.rollout.hf_checkpoint)
    rows = read_hf_config(mine).get("vocab_size")  # another rule reports a vocab_size that config.json lacks
    if isinstance(rows, int) and c.distillation.opd_top_k > rows:
        raise FlagError(
            "--opd-top-k",
            "be at most the model's vocab_size",
            f"{c.distillation.opd_top_k} and {rows}",
            "lower it",
        )
    for source, model in teachers(c).items():
        if Path(its := model.checkpoint) != Path(mine) and is_hf_directory(its):
            flag = model.spelling.of("--hf-checkpoint") if model.file else f"--opd-teacher-model {source}"
            _check_vocabulary(flag, mine, its, read_hf_config(mine), read_hf_config(its))
    if TEACHER not in get_roles(c) or c.distillation.opd_teacher_load is None:
        return
    its = TEACHER.shape(c)
    if its == mine:
        return
    policy, teacher = read_hf_config(mine), read_hf_config(its)
    _check_vocabulary("--opd-teacher-load", mine, its, policy, teacher)
    decoder = read_decoder(teacher)
    try:
        check_attention(c, decoder)
        check_stages(c.megatron, len(decoder.layers))
    except ValueError as error:
        raise FlagError(
            "--opd-teacher-load", "fit the trainer's parallel sizes", f"{its}: {error}"
        ) from error
    if decoder.stateful and c.data.share_prompts and not read_decoder(policy).stateful:
        raise FlagError(
            "--no-share-prompts",
            "be given for a teacher whose layers have a state",
            its,
            "the state after a prompt that samples share is not kept: give the flag",
        )


def _check_vocabulary(flag: str, mine: str, its: str, policy: Hf, teacher: Hf) -> None:
    known = _tokens(mine), _tokens(its)
    if known[0] and known[1] and known[0] != known[1]:
        other = sum(known[1].get(token) != i for token, i in known[0].items())
        raise FlagError(
            flag,
            "have the tokenizer of --hf-checkpoint, as it scores its ids",
            f"{its}, which has another id or none for {other} of {len(known[0])} tokens",
            "take a teacher of the same family",
        )
    sizes: tuple[int, int] = (policy["vocab_size"], teacher["vocab_size"])
    rows = sizes[1] - sizes[0]
    if rows and not (all(known) and rows > 0):  # with the same tokens, more rows are padding of the matrix
        raise FlagError(
            flag,
            "have the vocabulary of --hf-checkpoint, as it scores its ids",
            f"vocab_size {sizes[1]} in {its} and {sizes[0]} in {mine}",
            "take a teacher of the same family",
        )


def _tokens(checkpoint: str) -> dict[str, int]:
    """Returns token -> id from tokenizer.json. The result is empty without such a file."""
    path = Path(checkpoint) / "tokenizer.json"
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content.get("model", {}).get("vocab", {})
    if not isinstance(vocabulary, dict):
        vocabulary = {piece[0]: i for i, piece in enumerate(vocabulary)}
    return vocabulary | {
        token.get("content", f"id {token['id']}"): token["id"] for token in content.get("added_tokens", [])
    }
