"""Checks that a run can start. `vime train` calls one function before it starts anything, and `vime plan` calls the
same function.

First the flags, the model and the data are checked in one report, then the rules of the machine one by one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from slime.checkpoints.checkpoint_dir import released, resumed_iteration, start_directory
from slime.checkpoints.hf_config import read_hf_config, require_weight_files
from slime.config import Config
from slime.config.fields import spelled
from slime.config.hook_calls import CALLS, check_call
from slime.config.problems import Problems, split_problems
from slime.data.tokenizer import shared_tokenizer
from slime.hooks import load_function
from slime.memory.cards import Cards
from slime.operators import decide
from slime.records.errors import FlagError
from slime.roles.groups import on_one_host
from slime.rollout.eval_datasets import check_evaluation
from slime.rules.flags import FALLBACKS, own_flags
from slime.rules.precision.fp8 import require_fp8_cards
from slime.rules.precision.microscaling import require_kernels
from slime.rules.validate import Rule
from slime.tracking import check_trackers
from vime.backends import parse_config, require_reachable
from vime.memory.lines import require_fit
from vime.memory.sizes import RequestedSizes, device_memory, machine_sizes
from vime.pool.process import ServerSpec, require_free_port
from vime.run.disk_space import require_disk_space
from vime.run.lock import require_free, written_folders
from vime.run.temporary import SHARED_MEMORY, left_weights
from vime.start.model_check import with_model_note
from vime.start.run_start import check_start, finished
from vime.start.written_models import check_written_models

_SHAPE = "make_model.json"
"""Name of the note of scripts/make_model.py in a model's folder. "weights" is null for a model without weights, made
for a plan."""


Inputs = tuple[list[ValueError], int | None]
"""The problems of tokenizer and data, and the number of rollouts, or None if it is unknown."""


def check_run(
    argv: Sequence[str],
    read: Callable[[Config], Inputs],
    *,
    download: bool = False,
    is_elsewhere: Callable[[Config], bool] = lambda config: False,
) -> Config:
    """Returns the configuration of a run that can start here.

    Raises ValueError with every problem of flags, model and data, or with the first problem of this machine. `read`
    reads the data as far as the caller wants. For a run that `is_elsewhere`, this machine is not checked.
    """
    found: list[int | None] = []

    def inputs(config: Config) -> None:
        errors, rollouts = read(config)
        problems = Problems()
        problems.add(*errors)
        problems.report()
        found.append(rollouts)

    rules = (check_hooks, check_evaluation, inputs, check_start, check_written_models)
    config = parse_config(argv, rules, download=download)
    config = config.with_values(num_rollout=found[-1])
    here = not is_elsewhere(config) and not finished(config)
    if here:
        for rule in THIS_MACHINE:
            rule(config)
    return with_model_note(config, compares=here)


def check_hooks(config: Config) -> None:
    """Raises ValueError for functions of the user that the run could not call. Rules of the flags report missing
    functions."""
    problems = Problems()
    for name in CALLS:
        value, usual = config.get_value(name), own_flags()[name].default
        taken_over = name in FALLBACKS and value == config.get_value(FALLBACKS[name])
        if value in (None, usual) or taken_over:
            continue
        for path in value if isinstance(value, list) else [value]:
            problems.check(_check_hook, config, name, path)
    problems.report()


def _check_hook(config: Config, name: str, path: str) -> None:
    try:
        function = load_function(path, spelled(name))
    except ValueError:
        return
    check_call(spelled(name), path, function, CALLS[name], scores=name == "custom_rm_path")


def plans_other_machine(config: Config, sizes: RequestedSizes) -> bool:
    """Returns True if a plan is for another machine.

    This is the case if it names GPUs or sizes, if the run needs GPUs and this machine has no GPU, or if the model is a
    shape without weights.
    """
    asked = sizes != RequestedSizes() or config.cluster.gpu is not None
    return asked or lacks_gpu(config) or _is_shape(config)


def lacks_gpu(config: Config) -> bool:
    """Returns True if the run needs GPUs and this machine has no GPU."""
    return config.cluster.device == "cuda" and device_memory(config) is None


def read_inputs(config: Config, read: Callable[[Config], int | None], *, tokenizer: bool) -> Inputs:
    """Reads the data with `read`, and loads the tokenizer, because the rollout manager of every run loads it."""
    problems = Problems()
    if tokenizer:
        problems.check(_load_tokenizer, config)
    rollouts = problems.check(read, config)
    try:
        problems.report()
    except ValueError as error:
        return list(split_problems(error)), None
    return [], rollouts


def _load_tokenizer(config: Config) -> None:
    """Loads the tokenizer. A rule of the flags reports a missing --hf-checkpoint."""
    if config.rollout.hf_checkpoint is None or not Path(config.rollout.hf_checkpoint).is_dir():
        return
    shared_tokenizer(config.rollout.hf_checkpoint, trust_remote_code=config.train.trust_remote_code)


def weights_parent(config: Config) -> Path:
    """Returns the parent of the folder of published weights if --weight-dir names none.

    It is shared memory on a single host, and the run directory when engines may be on other hosts.
    """
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() and on_one_host(config) else Path(config.logging.run_dir)


def _is_shape(config: Config) -> bool:
    if config.rollout.hf_checkpoint is None:
        return False
    try:
        note = json.loads((Path(config.rollout.hf_checkpoint) / _SHAPE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(note, dict) and note.get("weights", "") is None


def find_missing_weights(config: Config) -> Path | None:
    """Returns the folder without weights that the engines or a new run read: --hf-checkpoint, or converted weights.
    Returns None if all weights exist."""
    folder = Path(config.rollout.hf_checkpoint)
    serves = config.num_engines > 0 and not config.rollout.rollout_external_engine_addrs
    start = None if resumed_iteration(config) is not None else start_directory(config)
    read = serves or start == config.rollout.hf_checkpoint
    if read and not any(next(folder.glob(f"*.{kind}"), None) for kind in ("safetensors", "bin", "pt")):
        return folder
    converted = None if start is None else released(start)
    return converted if converted and not next(converted.glob("*.distcp"), None) else None


def _require_weights(config: Config) -> None:
    require_weight_files(Path(config.rollout.hf_checkpoint))
    folder = find_missing_weights(config)
    if folder is None:
        return
    if folder == Path(config.rollout.hf_checkpoint):
        raise FlagError(
            "--hf-checkpoint",
            "have weights",
            f"no file *.safetensors in {folder}",
            "download or copy the whole checkpoint (`vime plan --gpu NAME` plans without weights)",
        )
    raise FlagError(
        "--load" if str(folder.parent) == str(config.checkpoint.load) else "--ref-load",
        "have weights",
        f"no file *.distcp in {folder}",
        "convert the model again, or copy the whole folder (`vime plan --gpu NAME` plans without weights)",
    )


def _require_fit(config: Config) -> None:
    if not os.environ.get("RAY_ADDRESS"):  # the GPUs belong to a cluster
        require_fit(
            config, read_hf_config(config.rollout.hf_checkpoint), machine_sizes(config, here_only=True)
        )


def _require_kernels(config: Config) -> None:
    require_kernels(config)
    if config.cluster.device == "cuda" and not os.environ.get("RAY_ADDRESS"):
        require_fp8_cards(config, Cards().capabilities())
    if config.cluster.device == "cpu" and config.kernels.rlk_fast == "strict":
        decide(config, config.cluster.device)  # raises; on GPUs the trainers decide


def _require_folders(config: Config) -> None:
    for flag, directory in written_folders(config).items():
        if directory is not None:
            require_free(flag, directory)


def _require_disk_space(config: Config) -> None:
    """Checks the disk space. For weights, files that an earlier run left in shared memory count as free, because the
    run removes them."""
    if config.weight_update.weight_dir is None:
        parent = weights_parent(config)
        left = left_weights(parent, Path(config.logging.run_dir))
        config = config.with_values(weight_dir=str(left[0] if left else parent / "weights"))
    require_disk_space(config)


def _require_router_port(config: Config) -> None:
    """Checks that the router's port is free before the models are loaded. In a cluster, its host is known only when the
    run starts."""
    port, fixed = config.engine.router_port, config.engine.router_ip is not None
    if port is None or fixed or not config.num_engines or os.environ.get("RAY_ADDRESS"):
        return
    host = ServerSpec.host
    try:
        require_free_port(host, port, "the router")
    except ValueError as error:
        flag = spelled(f"{config.engine.rollout_backend}_router_port")
        raise FlagError(
            flag, f"be a free port of {host}", f"{port} ({error.__cause__})", "give another, or leave it out"
        ) from error


def _require_devices(config: Config) -> None:
    if os.environ.get("RAY_ADDRESS"):
        return
    from slime.cluster.host_resources import host_resources
    from slime.cluster.placement import require_devices

    require_devices(config, host_resources())


THIS_MACHINE: tuple[Rule, ...] = (
    require_reachable,
    _require_router_port,
    _require_weights,
    _require_devices,
    _require_fit,
    _require_kernels,
    _require_folders,
    _require_disk_space,
    check_trackers,
)
