"""Defines the rules of the directories that a run reads at its start, and notes on the checkpoints that are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slime.algo.losses import loss_for
from slime.checkpoints.checkpoint_dir import (
    COMPLETE,
    HF_INDEX,
    HF_SINGLE,
    LATEST,
    existing,
    holds_hf_weights,
    is_hf_directory,
    latest,
    released,
    resumed_iteration,
    start_directory,
)
from slime.checkpoints.checkpoint_files import WRITE_LATEST, advice, damaged_size, iterations
from slime.config.fields import spelled
from slime.config.problems import require_value
from slime.config.schema import Config
from slime.models.lora import sends_adapters
from slime.records.errors import FlagError
from slime.roles import CRITIC, REFERENCE, TEACHER, get_roles
from slime.roles.critic import resume_folders, saves_to
from slime.weight_sync.delta.registry import checksum
from slime.weight_sync.registry import CHANNELS


def check_directories(c: Config) -> None:
    """Checks that the directories that the trainer reads at its start hold readable weights, and that --load and --save
    are folders.

    --load may be empty, or the missing folder that --save makes: then a new run starts. For the files of a checkpoint,
    sizes are checked here, and the trainer checks their content. Another check covers --hf-checkpoint.
    """
    for flag_name, path in (
        ("--load", c.checkpoint.load),
        ("--save", c.checkpoint.save),
        ("--critic-load", c.critic.critic_load),
        ("--critic-save", c.critic.critic_save),
    ):
        _require_folder(flag_name, path)
    for flag_name, load, save in (
        ("--load", c.checkpoint.load, c.checkpoint.save),
        ("--critic-load", c.critic.critic_load if CRITIC in get_roles(c) else None, saves_to(c)),
    ):
        _require_load(flag_name, load, save)
    if c.debug.debug_rollout_only:
        return
    if not _resumes(c) or c.checkpoint.finetune:
        _check_start(c)
    if CRITIC in get_roles(c):
        _check_critic(c)
    if TEACHER in get_roles(c) and (teacher := c.distillation.opd_teacher_load):
        step = c.distillation.opd_teacher_ckpt_step
        _check_weights("--opd-teacher-load", "--opd-teacher-ckpt-step", teacher, step, "check the path")
    reference, step = require_value(c.checkpoint.ref_load), c.checkpoint.ref_ckpt_step
    differ = Path(reference) != Path(require_value(c.rollout.hf_checkpoint))
    if reads_reference(c) and differ:
        _check_weights(
            "--ref-load", "--ref-ckpt-step", reference, step, "leave it out to use --hf-checkpoint"
        )
    elif step is not None and not differ:
        raise FlagError(
            "--ref-load", "be given with --ref-ckpt-step", f"only --ref-ckpt-step {step}", "name the folder"
        )


def check_saving(c: Config) -> None:
    """Checks that flags about saved checkpoints have a folder for them."""
    for name in ("exit_signal_handler", "max_actor_ckpt_to_keep", "save_hf"):
        if c.get_value(name) and c.checkpoint.save is None:
            raise FlagError(
                "--save", f"be given with {spelled(name)}", "none", "name the folder of checkpoints"
            )
    if c.checkpoint.save_hf_format and c.checkpoint.save_hf is None:
        form = c.checkpoint.save_hf_format
        raise FlagError(
            "--save-hf", "be given with --save-hf-format", f"only --save-hf-format {form}", "name a folder"
        )
    if c.weight_update.update_weight_disk_keep_files and c.weight_update.weight_dir is None:
        raise FlagError(
            "--weight-dir",
            "be given with --update-weight-disk-keep-files",
            "none",
            "the run removes its own folder",
        )


def _require_folder(flag_name: str, path: str | None) -> None:
    if path and Path(path).exists() and not Path(path).is_dir():
        raise FlagError(flag_name, "name a directory", f"the file {path}", "name the folder of checkpoints")


def _require_load(flag_name: str, load: str | None, save: str | None) -> None:
    """Checks that a --load folder exists, or will be made by the run.

    A missing folder is allowed if the run saves into it, because a command that resumes itself names it from the start.
    A --load without --save may be missing, too, as in slime.
    """
    if load is None or Path(load).exists() or (flag_name == "--load" and save is None):
        return
    if save is None or Path(load).absolute() != Path(save).absolute():
        save_flag = flag_name.replace("load", "save")
        raise FlagError(
            flag_name,
            f"name a folder that exists, or that of {save_flag}",
            f"{load}, which is no directory",
            "check the path",
        )


def _check_start(c: Config) -> None:
    """Raises ValueError if a new run's --load names a single iteration, or a model without weights."""
    load = c.checkpoint.load
    if load and (Path(load) / COMPLETE).is_file():
        folder = Path(load).absolute().parent
        raise FlagError(
            "--load", "name the folder of all iterations", f"one of them, {load}", f"use {folder}"
        )
    start = start_directory(c)
    if start == load and is_hf_directory(start) and not holds_hf_weights(start):
        raise FlagError(
            "--load",
            f"hold {HF_SINGLE} or {HF_INDEX} beside its config.json",
            f"neither in {start}",
            "copy them",
        )


def reads_reference(c: Config) -> bool:
    """Returns True if the trainer reads --ref-load: for the reference model, or as the first weights of a new run."""
    # a run with adapters reads their base again
    resumes = resumed_iteration(c) is not None and not c.lora.lora_rank
    return REFERENCE in get_roles(c) or (not resumes and start_directory(c) == c.checkpoint.ref_load)


def _resumes(c: Config) -> bool:
    """Returns True if the run resumes. Raises ValueError if the iteration to resume from is missing or damaged."""
    load, step = c.checkpoint.load, c.checkpoint.ckpt_step
    if step is None:
        iteration = None if load is None else _latest("--load", load)
    elif load is None:
        raise FlagError("--load", "be given with --ckpt-step", f"only --ckpt-step {step}", "name the folder")
    else:
        _require_iteration("--ckpt-step", load, step)
        iteration = step
    if load is None or iteration is None:
        if load is not None:
            _released("--load", load)
        return False
    if found := damaged_size(existing(Path(load), iteration)):
        text = f"{found}; {advice(Path(load), iteration, '--ckpt-step {}')}"
        raise ValueError(text)
    return True


def remarks(c: Config) -> Iterator[str]:
    """Yields notes on the checkpoints that are read. Yields nothing for flags that `check_directories` refuses."""
    reference, load = c.checkpoint.ref_load, c.checkpoint.load
    if c.debug.debug_rollout_only or not reference or reference == c.rollout.hf_checkpoint:
        return
    try:
        read = reads_reference(c)
    except ValueError:
        return
    if not read:
        yield (
            f"--ref-load {reference} is not read: the weights come from --load {load}, and nothing needs a reference"
        )
    elif (
        "ref_log_probs" in loss_for(c.algorithm).reads
        and resumed_iteration(c) is None
        and start_directory(c) == reference
    ):
        yield (
            f"--ref-load {reference} also gives the policy's first weights, as --load names none: --loss-type "
            f"{c.algorithm.loss_type} begins with a policy that is its reference. To train {c.rollout.hf_checkpoint} "
            f"against that reference, add --load {c.rollout.hf_checkpoint}"
        )


def _check_weights(flag_name: str, step_flag: str, path: str, step: int | None, remedy: str) -> None:
    """Checks the weights of a frozen model."""
    if step is not None:
        _require_iteration(step_flag, path, step)
    elif _latest(flag_name, path) is None and not _released(flag_name, path) and not holds_hf_weights(path):
        got = "which holds neither" if Path(path).is_dir() else "which is no directory"
        raise FlagError(
            flag_name,
            f"name a Hugging Face directory with {HF_SINGLE} or {HF_INDEX}, or a folder with the "
            f"{LATEST} that --save or slime's converter writes",
            f"{path}, {got}",
            remedy,
        )


def _check_critic(c: Config) -> None:
    """Checks that --critic-load holds weights, and in a run that resumes, those of the policy's iteration."""
    own, resumed, iteration = c.critic.critic_load, CRITIC.resumes(c), resumed_iteration(c)
    saved = {directory: iterations(Path(directory)) for directory in resume_folders(c)}
    if resumed is not None and iteration is not None:
        if found := damaged_size(existing(Path(resumed.directory), iteration)):
            raise ValueError(f"{found}; {advice(Path(resumed.directory), iteration, '--ckpt-step {}')}")
    elif iteration is not None and any(saved.values()):
        listed = ", ".join(f"{i} in {directory}" for directory, of_it in saved.items() for i in of_it)
        raise FlagError(
            "--critic-load",
            f"hold iteration {iteration}, from which the policy resumes",
            listed,
            "take an iteration that both have with --ckpt-step, or a folder without checkpoints "
            "for a new critic",
        )
    elif own and is_hf_directory(own) and not holds_hf_weights(own):
        raise FlagError(
            "--critic-load",
            f"hold {HF_SINGLE} or {HF_INDEX} beside its config.json",
            f"neither in {own}",
            "copy them",
        )
    elif own:
        _latest("--critic-load", own), _released("--critic-load", own)  # which report unreadable files


def _require_iteration(flag_name: str, path: str, step: int) -> None:
    if step not in (saved := iterations(Path(path))):
        listed = ", ".join(map(str, saved)) or "none"
        raise FlagError(flag_name, f"name an iteration in {path}", step, f"it has {listed}")


def _released(flag_name: str, path: str) -> Path | None:
    try:
        return released(path)
    except ValueError as error:
        raise FlagError(flag_name, "hold a checkpoint that can be read", f"{path}: {error}") from error


def _latest(flag_name: str, path: str) -> int | None:
    try:
        return latest(path)
    except ValueError as error:
        choose = "--ckpt-step {}" if flag_name == "--load" else WRITE_LATEST
        remedy = advice(Path(path), None, choose)
        raise FlagError(
            flag_name, "hold a checkpoint that can be read", f"{path}: {error}", remedy
        ) from error


def check_weight_update(c: Config) -> None:
    """Checks the requirements of deltas, and the flags that require deltas."""
    w = c.weight_update
    if w.update_weight_mode == "full":
        if w.update_weight_local_checkpoint_dir is not None:
            raise FlagError(
                "--update-weight-mode",
                "be delta with --update-weight-local-checkpoint-dir",
                f"full with {w.update_weight_local_checkpoint_dir}",
                "add --update-weight-mode delta, or leave the directory out",
            )
        return
    if c.cluster.colocate:
        raise FlagError(
            "--update-weight-mode",
            "be full with --colocate",
            "delta",
            "such engines read the weights where the trainer has them: leave out one of the two",
        )
    if not CHANNELS[require_value(w.update_weight_transport)].sliced:
        raise FlagError(
            "--update-weight-mode",
            f"be full with --update-weight-transport {w.update_weight_transport}",
            "delta",
            "use nccl or disk, by which each rank sends its own changes",
        )
    if sends_adapters(c):
        raise FlagError(
            "--update-weight-mode",
            "be full where adapters are sent",
            f"delta with --lora-rank {c.lora.lora_rank}",
            "an adapter is smaller than a delta: leave the flag out, or add --lora-merge",
        )
    checksum(w.update_weight_delta_checksum, b"")  # ValueError if the checksum's package is missing


def check_recovery(c: Config) -> None:
    """Checks that the host's memory can hold the checkpoint of --recover-from memory."""
    if c.fault_tolerance.recover_from != "memory" or c.debug.debug_rollout_only:
        return
    if c.algorithm.ref_update_interval is not None:
        raise FlagError(
            "--recover-from",
            "be disk with --ref-update-interval",
            "memory",
            "checkpoints do not hold the moved reference model, so the run repeats its steps from the start",
        )
