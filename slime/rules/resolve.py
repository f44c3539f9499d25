"""Fills in derived values that the user did not give. Checks nothing (see validate.py)."""

from __future__ import annotations

import argparse
import contextlib
import glob
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from slime.algo.losses import MASKED_ROLLOUTS, SFT_ROLLOUT, held_out, loss_for, sampled
from slime.bridges import megatron_versions
from slime.config.fields import Values, spelled
from slime.config.schema import SECTIONS, Config, read_section
from slime.config.sections.algorithm import AlgorithmConfig
from slime.config.sections.kernels import BITWISE_OPERATORS, OPERATORS
from slime.config.sections.logging import new_run_dir
from slime.config.sections.lora import LoraConfig
from slime.config.sections.reward import reward_names
from slime.environments.flags import set_flags
from slime.hardware import HARDWARE
from slime.hooks import absolute
from slime.models.lora import read_peft
from slime.receipts.flags import fill_saved
from slime.roles.served import teachers
from slime.rollout.straw.flags import fill_queue, queue_notes
from slime.rules.algorithm import compares_alone, makes_groups, unread_notes
from slime.rules.checkpoint import remarks as read_remarks
from slime.rules.cluster import critic_notes, drop_prefill_engines
from slime.rules.flags import FALLBACKS, read_nowhere
from slime.rules.kernels import provider_notes
from slime.rules.megatron import muon_notes, never_run, rate_notes, remainder_notes, same_result
from slime.rules.off_policy import cuts, mismatch_notes
from slime.rules.packages import package_notes
from slime.rules.precision.fp8 import use_own_layers
from slime.rules.weights.cache_flush import flush_notes
from slime.rules.weights.channel import choose_channel
from slime.weight_sync.registry import default_channel

_OF_RANK = ("lora_alpha", "lora_name")
_DRIVER_FILES = ("/dev/nvidia*", "/dev/nvhost*", "/dev/dxg", "/dev/kfd")
"""Files of GPU drivers, also in a container, on boards with an integrated GPU and in Windows."""


def resolve(set_values: Values, notes: list[str] | None = None) -> Config:
    """Returns the configuration from flat values, with every derived value filled in. It is not validated yet."""
    draft = argparse.Namespace(**{**_defaults(), **set_values}, notes=list(notes or []))
    _hardware(draft, set_values)
    _debug(draft)
    _device(draft)
    _placement(draft)
    drop_prefill_engines(draft)
    _batches(draft)
    draft.notes += set_flags(draft, set_values)
    _evaluation(draft)
    _reference(draft)
    _dr_grpo(draft)
    _hook_files(draft)
    _distillation(draft)
    _lora(draft, set_values)
    for name, source in FALLBACKS.items():
        if getattr(draft, name) is None:
            setattr(draft, name, getattr(draft, source))
    draft.overrides, remarks = same_result(draft.overrides)
    draft.overrides, more = use_own_layers(draft.overrides)
    draft.notes += [*remarks, *more]
    draft.update_weight_disk_keep_files |= draft.update_weight_delta_keep_files
    choose_channel(draft)
    _trainer(draft, set_values)
    _kernels(draft)
    _run_dir(draft)
    fill_saved(draft)
    fill_queue(draft)
    adjusted = tuple(vars(draft).pop("notes"))
    config = Config.from_flat(vars(draft))
    return replace(config, notes=(*adjusted, *_remarks(config)))


def _defaults() -> Values:
    return {k: v for cls in SECTIONS.values() for k, v in vars(cls()).items()}


def _hardware(c: argparse.Namespace, set_values: Values) -> None:
    """Applies --gpu: selects CUDA, and the GPU's usual system gives the number of GPUs per node."""
    if c.gpu is None:
        return
    if c.device == "auto":
        c.device = "cuda"
    if "num_gpus_per_node" not in set_values:
        c.num_gpus_per_node = HARDWARE[c.gpu].gpus_per_node
    if "actor_num_gpus_per_node" not in set_values:
        c.actor_num_gpus_per_node = c.num_gpus_per_node


def _debug(c: argparse.Namespace) -> None:
    if c.load_debug_rollout_data:
        c.debug_train_only = True


def _device(c: argparse.Namespace) -> None:
    if c.device == "auto":
        c.device = "cuda" if _has_gpu() else "cpu"
    if c.device == "cpu":
        c.distributed_backend = "gloo"
    if c.engine_standby_s is None:  # no GPU has run the process that waits
        c.engine_standby_s = 60.0 if c.device == "cpu" else 0.0
    by_flag = {"float32": c.fp32, "float16": c.fp16, "bfloat16": c.bf16}
    c.params_dtype = next(
        (k for k, on in by_flag.items() if on), "float32" if c.device == "cpu" else "bfloat16"
    )


def _has_gpu() -> bool:
    """Returns True if torch finds a GPU here. The import of torch takes 0.8 s and 140 MiB, so it happens only if a
    driver exists."""
    if not any(glob.glob(files) for files in _DRIVER_FILES):
        return False
    import torch

    return torch.cuda.is_available()


def _placement(c: argparse.Namespace) -> None:
    world = c.actor_num_nodes * c.actor_num_gpus_per_node
    if c.rollout_external_engine_addrs and not c.debug_train_only:
        theirs = len(c.rollout_external_engine_addrs) * c.rollout_num_gpus_per_engine
        if c.rollout_num_gpus not in (None, theirs):
            c.notes.append(
                f"--rollout-num-gpus {c.rollout_num_gpus} is taken as {theirs}: the engines of "
                "--rollout-external-engine-addrs"
            )
        c.rollout_num_gpus = theirs
        c.update_weight_transport = c.update_weight_transport or default_channel(None)
    elif c.debug_train_only:
        if c.rollout_num_gpus:
            c.notes.append(f"--rollout-num-gpus {c.rollout_num_gpus} is taken as 0: only the trainer runs")
        c.rollout_num_gpus = 0
    elif c.colocate:
        if c.rollout_num_gpus not in (None, world):
            c.notes.append(
                f"--rollout-num-gpus {c.rollout_num_gpus} is taken as {world}, as --colocate shares all GPUs"
            )
        c.rollout_num_gpus = world
    elif c.debug_rollout_only and c.rollout_num_gpus is None:
        c.rollout_num_gpus = world
    if c.offload and c.offload_train is None:
        c.offload_train = True


def _reference(c: argparse.Namespace) -> None:
    """Drops a missing conversion of --hf-checkpoint, because the checkpoint itself is read."""
    if c.ref_load is None or c.hf_checkpoint is None or Path(c.ref_load).exists():
        return
    if Path(c.ref_load).name == f"{Path(c.hf_checkpoint).name}_torch_dist":
        c.notes.append(
            f"--ref-load {c.ref_load} does not exist; by its name it is --hf-checkpoint {c.hf_checkpoint} converted, "
            "which is read itself"
        )
        c.ref_load = None


def _dr_grpo(c: argparse.Namespace) -> None:
    if c.use_dr_grpo:
        c.disable_grpo_std_normalization = True
        c.dr_grpo_length = c.dr_grpo_length or c.rollout_max_response_len


def _hook_files(c: argparse.Namespace) -> None:
    """Makes each hook's file (`file.py:name`) an absolute path, because the processes of a run have other folders."""
    for name, value in vars(c).items():
        if name.endswith("_path") or name == "selected_logprob_provider":
            if isinstance(value, str):
                setattr(c, name, absolute(value))
            elif isinstance(value, list):
                setattr(c, name, [absolute(path) for path in value])
    if c.rm_type is not None:
        c.rm_type = ",".join(absolute(name) for name in reward_names(c.rm_type))


def _distillation(c: argparse.Namespace) -> None:
    """Replaces a reward that reads labels by `zero` if no label key is given. Scripts of pure distillation name such
    rewards."""
    labels = not {*reward_names(c.rm_type)} <= {"random", "remote_rm", "zero"}
    if c.use_opd and labels and c.label_key is None and c.custom_rm_path is None:
        c.notes.append(
            f"--rm-type {c.rm_type} is taken as zero, as --use-opd is given and --label-key is not: the teacher alone "
            "trains the policy"
        )
        c.rm_type = "zero"


def _lora(c: argparse.Namespace, set_values: Values) -> None:
    """Reads values that the user did not give from --lora-load. The rules report an unreadable directory."""
    for name, other in (
        ("target_modules", "lora_target_modules"),
        ("lora_name", "lora_adapter_name"),
    ):
        if (value := getattr(c, other)) is None:
            continue
        if name not in set_values or getattr(c, name) is None:
            setattr(c, name, value)
        elif getattr(c, name) != value:
            c.notes.append(
                f"{spelled(other)} has no effect: {spelled(name)} is given, which is the same flag"
            )
    if c.lora_load is None:
        if not c.lora_rank:  # the rules refuse other values than the defaults
            names = [
                name
                for name in _OF_RANK
                if name in set_values and set_values[name] == getattr(LoraConfig, name)
            ]
            c.notes += [
                f"{spelled(name)} {set_values[name]} has no effect without --lora-rank: it is read only there"
                for name in names
            ]
        return
    with contextlib.suppress(ValueError):
        stored, _ = read_peft(c.lora_load)
        for name, value in (("lora_rank", stored.rank), ("lora_alpha", stored.alpha)):
            if name not in set_values:
                setattr(c, name, value)
        if not c.target_modules:
            c.target_modules = list(stored.targets)
        if not c.exclude_modules and stored.excluded:
            c.exclude_modules = list(stored.excluded)


def _trainer(c: argparse.Namespace, set_values: Values) -> None:
    """Lets an optimizer with its state in files compute on the host. For Muon, turns the distributed optimizer off,
    which is on by default and has only parts of matrices. A ring of context-parallel ranks is the default way."""
    c.optimizer_cpu_offload = c.optimizer_cpu_offload or c.stream_optimizer_state_to_disk
    if c.optimizer == "dist_muon":
        c.optimizer = "muon"
        c.notes.append("--optimizer dist_muon is taken as muon: each data-parallel rank has the whole state")
    if c.optimizer == "muon" and "use_distributed_optimizer" not in set_values:
        c.use_distributed_optimizer = False
    if c.cp_comm_type in ("p2p", "a2a+p2p"):
        c.notes.append(
            f"--cp-comm-type {c.cp_comm_type} is taken as the default: no ring is here, and the result is the same"
        )
        c.cp_comm_type = None


def _batches(c: argparse.Namespace) -> None:
    if c.rollout_batch_size is None:
        return
    samples = c.rollout_batch_size * c.n_samples_per_prompt
    _variable_batches(c, samples)
    # A division with a remainder leaves the value open. The rules then report the flag that the user gave.
    if c.global_batch_size is None and samples % (steps := max(c.num_steps_per_rollout or 1, 1)) == 0:
        c.global_batch_size = samples // steps
    if c.num_steps_per_rollout is None and c.global_batch_size and samples % c.global_batch_size == 0:
        c.num_steps_per_rollout = samples // c.global_batch_size
    for set_values, of_rollout in ((c.train_iters, c.num_steps_per_rollout), (c.train_samples, samples)):
        if c.num_rollout is None and set_values is not None and of_rollout and set_values % of_rollout == 0:
            c.num_rollout = set_values // of_rollout
    if c.num_rollout is not None and c.num_epoch is not None:
        c.notes.append(f"--num-epoch {c.num_epoch} has no effect, as --num-rollout {c.num_rollout} is given")


def _variable_batches(c: argparse.Namespace, samples: int) -> None:
    """Fills in the largest step and the number of steps for steps of several sizes."""
    if (sizes := c.global_batch_size_schedule) is not None:
        c.variable_global_batch_size = True
        c.global_batch_size = c.global_batch_size or max(sizes)
        c.num_steps_per_rollout = c.num_steps_per_rollout or len(sizes)
    elif c.variable_global_batch_size:
        if c.global_batch_size is None and c.num_steps_per_rollout:
            c.global_batch_size = -(-samples // c.num_steps_per_rollout)
        elif c.global_batch_size and c.num_steps_per_rollout is None:
            c.num_steps_per_rollout = -(-samples // c.global_batch_size)


def _evaluation(c: argparse.Namespace) -> None:
    """Names a data set that has only a path, which is slime's older spelling. The name is "aime" if the
    file's name contains it, else the file's name."""
    if len(c.eval_prompt_data or []) == 1:
        stem = Path(c.eval_prompt_data[0].split("@[")[0]).stem
        name = "aime" if "aime" in stem.lower() else stem
        c.notes.append(f"--eval-prompt-data {c.eval_prompt_data[0]} has no name; it is called {name}")
        c.eval_prompt_data = [name, *c.eval_prompt_data]
    own = (
        c.rollout_function_path in MASKED_ROLLOUTS and not loss_for(read_section(AlgorithmConfig, c)).rewarded
    )
    if c.debug_train_only and c.eval_interval is not None and c.eval_function_path is None and not own:
        c.notes.append(
            f"--eval-interval {c.eval_interval} has no effect: without engines nothing is evaluated"
        )
        c.eval_interval = None


def _kernels(c: argparse.Namespace) -> None:
    if c.rlk_fast is None:
        c.rlk_fast = "strict" if c.rl_kernel_strict else "auto"
    named = ",".join(OPERATORS if c.rl_kernel_ops is None else c.rl_kernel_ops)
    c.rl_kernel_ops = [name for name in named.split(",") if name]
    chosen = ",".join(BITWISE_OPERATORS if c.rlk_bitwise_operators is None else c.rlk_bitwise_operators)
    c.rlk_bitwise_operators = [name for name in chosen.split(",") if name]


def _run_dir(c: argparse.Namespace) -> None:
    if c.run_dir is None:
        c.run_dir = new_run_dir(c.hf_checkpoint)


def _remarks(c: Config) -> Iterator[str]:
    """Yields notes on the given flags. The notes adjust nothing."""
    yield from queue_notes(c)
    if compares_alone(c) and (maker := makes_groups(c)) is not None:
        yield (
            f"--n-samples-per-prompt 1 with --advantage-estimator {c.algorithm.advantage_estimator}: a "
            "reward counts relative to "
            f"its group, so all advantages are 0 unless {maker} brings several samples to a group"
        )
    loss = loss_for(c.algorithm)
    if loss.rollout == SFT_ROLLOUT and sampled(c):
        yield (
            f"--loss-type {loss.name} with --rollout-function-path {c.rollout.rollout_function_path} trains on "
            f"responses that the model samples. To train on the responses of the data, give {loss.inputs}"
        )
    if c.rollout.rollout_function_path == SFT_ROLLOUT and c.data.n_samples_per_prompt > 1:
        yield (
            f"--n-samples-per-prompt {c.data.n_samples_per_prompt} with --rollout-function-path {SFT_ROLLOUT} trains "
            f"on each row {c.data.n_samples_per_prompt} times per visit: leave it out"
        )
    if c.algorithm.use_kl_loss and c.algorithm.kl_loss_coef == 0 and loss_for(c.algorithm).rewarded:
        yield (
            "--use-kl-loss with --kl-loss-coef 0 only reports the KL and needs a reference pass in each rollout; "
            "leave it out to save that pass"
        )
    separate = c.distillation.opd_type != "megatron" and not teachers(c)
    if c.distillation.use_opd and separate and c.rollout.rollout_temperature != 1:
        yield (
            f"--opd-type {c.distillation.opd_type}: the server's log-probs are at temperature 1, and the policy's at "
            f"--rollout-temperature {c.rollout.rollout_temperature}: their difference is no KL to the teacher"
        )
    if cuts(c) and not c.off_policy.replay_kept_tokens:
        yield (
            "--rollout-top-p below 1 and --rollout-top-k restrict the engine's distribution, the trainer's "
            "is over the whole vocabulary: train/train_rollout_logprob_abs_diff will not be near zero: "
            "--replay-kept-tokens N computes both over what the engine kept"
        )

    if c.evaluation.eval_interval is not None and held_out(c):
        yield from _unread_by_held_out(c)
    yield from unread_notes(c)
    yield from read_nowhere(c)
    yield from critic_notes(c)
    yield from mismatch_notes(c)
    yield from flush_notes(c)
    yield from rate_notes(c)
    yield from muon_notes(c)
    yield from remainder_notes(c)
    version = megatron_versions.installed()  # `vime plan` works without it
    if version is not None and (remark := megatron_versions.check(version)):
        yield remark
    yield from package_notes(c)
    yield from provider_notes(c)
    yield from never_run(c.megatron.overrides)
    yield from read_remarks(c)


def _unread_by_held_out(c: Config) -> Iterator[str]:
    """Yields notes on the flags of an evaluation that only generation reads."""
    usual: dict[str, object] = {"eval_min_new_tokens": None, "n_samples_per_eval_prompt": 1}
    sampling = ("eval_temperature", "eval_top_p", "eval_top_k", "eval_max_response_len")
    usual |= {name: c.get_value(FALLBACKS[name]) for name in sampling}
    for name, value in usual.items():
        if (set_values := c.get_value(name)) != value:
            yield f"{spelled(name)} {set_values} has no effect: the loss of held-out samples needs no generation"
