"""Starts training from a Python launch script, under the names of slime's `command_utils`.

A script prepares its files and calls `execute_train`, which runs the training command in this environment. The command
starts its own Ray, so nothing on the host is killed, and no cluster has to be started before. In a Ray cluster that
RAY_ADDRESS names, the run joins it.
"""

from __future__ import annotations

import datetime
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from slime.system.import_path import ROOT

repo_base_dir = Path(ROOT)
NUM_GPUS_OF_HARDWARE = {"H100": 8, "H200": 8, "B200": 8, "GB200": 4, "GB300": 4}
GENERATION_HARDWARE = {
    "H100": "Hopper",
    "H200": "Hopper",
    "B200": "Blackwell",
    "GB200": "Blackwell",
    "GB300": "Blackwell",
}
_SCRIPTS = ("train.py", "train_async.py")
_RUNS_AHEAD = ["--max-staleness", "1"]
_TRUE, _FALSE = ("1", "true"), ("0", "false", "")


@dataclass
class ExecuteTrainConfig:
    """Settings of a launch script, which scripts extend with more fields (`dataclass_cli`)."""

    cuda_core_dump: bool = False
    """Write a core dump of the GPU after an exception on it."""
    num_nodes: int = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    extra_env_vars: str = ""
    """Environment variables of the run, as JSON or as `NAME=VALUE NAME=VALUE`."""


def exec_command(cmd: str, capture_output: bool = False) -> str | None:
    """Runs a bash command and prints it. Returns its output with `capture_output`. Raises CalledProcessError if it
    fails."""
    print(f"$ {cmd}", flush=True)
    done = subprocess.run(
        ["bash", "-c", cmd], check=True, text=True, stdout=subprocess.PIPE if capture_output else None
    )
    return done.stdout if capture_output else None


def execute_train(
    train_args: str,
    num_gpus_per_node: int,
    megatron_model_type: str | None,
    train_script: str = "train.py",
    before_ray_job_submit: Callable[[], object] | None = None,
    extra_env_vars: Mapping[str, str] | None = None,
    config: ExecuteTrainConfig | None = None,
) -> None:
    """Trains with the flags `train_args`, and returns when the run has ended. Raises CalledProcessError if the run
    fails. `$NAME` in a flag is replaced by the environment variable, whose value is not printed.

    `megatron_model_type` names a file of scripts/models, whose MODEL_ARGS come before `train_args`; without such a
    file, the model's shape comes from its config.json. `train_async.py` as `train_script` generates one update ahead.
    `num_gpus_per_node` limits the devices of this host, if CUDA_VISIBLE_DEVICES does not. `before_ray_job_submit` is
    called before the start. With SLIME_SCRIPT_ENABLE_RAY_SUBMIT=0 the command is only printed.
    """
    settings = ExecuteTrainConfig() if config is None else config
    words = [*train_command(train_script), *_model_args(megatron_model_type), *shlex.split(train_args)]
    if Path(train_script).name == _SCRIPTS[1] and _RUNS_AHEAD[0] not in words:
        words += _RUNS_AHEAD
    env = {**(extra_env_vars or {}), **_variables(settings.extra_env_vars)}
    if settings.cuda_core_dump:
        env |= {"CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1", "CUDA_COREDUMP_SHOW_PROGRESS": "1"}
    if num_gpus_per_node and "CUDA_VISIBLE_DEVICES" not in os.environ and shutil.which("nvidia-smi"):
        env.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus_per_node))))
    if before_ray_job_submit is not None:
        before_ray_job_submit()
    print("$", shlex.join([*(f"{name}={value}" for name, value in env.items()), *words]), flush=True)
    if all(get_bool_env_var(f"{name}_SCRIPT_ENABLE_RAY_SUBMIT", "1") for name in ("SLIME", "VIME")):
        subprocess.run([os.path.expandvars(word) for word in words], check=True, env={**os.environ, **env})


def train_command(train_script: str) -> list[str]:
    """Returns the words that start training. Raises ValueError for another script than those of slime."""
    if Path(train_script).name not in _SCRIPTS:
        raise ValueError(
            f"train_script must be {' or '.join(_SCRIPTS)}, got {train_script!r}; run another script with exec_command"
        )
    return [sys.executable, "-m", "vime", "train"]


def _model_args(name: str | None) -> list[str]:
    """Returns the words of MODEL_ARGS in scripts/models/`name`.sh, or none if this project does not have the file."""
    file = repo_base_dir / "scripts" / "models" / f"{name}.sh"
    if name is None:
        return []
    if not file.is_file():
        print(f"scripts/models has no {file.name}; the model's shape comes from its config.json")
        return []
    said = subprocess.run(
        ["bash", "-c", 'source "$1" && printf "%s\\0" "${MODEL_ARGS[@]}"', "bash", str(file)],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    )
    return said.stdout.split("\0")[:-1]


def _variables(text: str) -> dict[str, str]:
    if not text.strip():
        return {}
    if text.lstrip().startswith("{"):
        return {str(name): str(value) for name, value in json.loads(text).items()}
    pairs = [word.partition("=") for word in shlex.split(text)]
    if wrong := [name for name, mark, _ in pairs if not mark]:
        raise ValueError(f"extra_env_vars must be NAME=VALUE pairs or JSON, got {wrong[0]!r}; add its value")
    return {name: value for name, _, value in pairs}


def convert_checkpoint(
    model_name: str,
    megatron_model_type: str | None,
    num_gpus_per_node: int,
    multinode: bool = False,
    extra_args: str = "",
    dir_dst: str | None = None,
    hf_checkpoint: str | None = None,
) -> None:
    """Makes `dir_dst`/`model_name`_torch_dist a link to the checkpoint, because a run reads Hugging Face's files.

    `dir_dst` defaults to the home folder, and `hf_checkpoint` to models/`model_name` in it. An existing folder is kept.
    The other arguments belong to slime's conversion. Raises FileNotFoundError without the checkpoint.
    """
    home = Path.home()
    source = Path(hf_checkpoint or home / "models" / model_name).absolute()
    target = Path(dir_dst or home) / f"{model_name}_torch_dist"
    if target.exists():
        print(f"{target} exists and is kept")
        return
    if not (source / "config.json").is_file():
        raise FileNotFoundError(
            f"hf_checkpoint must be a checkpoint with a config.json, got {source}; download the model first"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(source, target_is_directory=True)
    print(f"{target} is a link to {source}: a run needs no conversion")


def rsync_simple(path_src: str, path_dst: str) -> None:
    """Copies the content of a folder to another folder, which it makes. Equal files are not copied again."""
    exec_command(
        f"mkdir -p {shlex.quote(path_dst)} && rsync -a {shlex.quote(path_src)}/ {shlex.quote(path_dst)}"
    )


def hf_download_dataset(full_name: str, local_dir: str | None = None) -> None:
    """Downloads a data set of the Hugging Face hub to datasets/NAME in the home folder, or to `local_dir`."""
    from huggingface_hub import snapshot_download

    folder = local_dir or str(Path.home() / "datasets" / full_name.rpartition("/")[2])
    snapshot_download(full_name, repo_type="dataset", local_dir=folder)


def fp8_cast_bf16(path_src: str, path_dst: str) -> None:
    """Writes a copy of a quantised checkpoint with bfloat16 weights. An existing copy is kept."""
    script = repo_base_dir / "scripts" / "dequantize.py"
    if Path(path_dst).exists():
        print(f"{path_dst} exists and is kept")
        return
    if not script.is_file():
        raise FileNotFoundError(
            f"fp8_cast_bf16 must run from the repository, which has scripts, got {ROOT}; clone it"
        )
    subprocess.run([sys.executable, str(script), path_src, path_dst], check=True)


def check_has_nvlink() -> bool:
    """Returns True if GPUs of this host are connected by NVLink."""
    if shutil.which("nvidia-smi") is None:
        return False
    topology = subprocess.run(["nvidia-smi", "topo", "-m"], text=True, stdout=subprocess.PIPE).stdout
    return any(word.startswith("NV") and word[2:].isdigit() for word in topology.split())


def get_default_wandb_args(
    test_file: str, run_name_prefix: str | None = None, run_id: str | None = None
) -> str:
    """Returns flags for W&B, or "" without WANDB_API_KEY. The run reads the key from the environment."""
    if not os.environ.get("WANDB_API_KEY"):
        return ""
    name = "_".join(filter(None, (run_name_prefix, run_id or create_run_id())))
    project = shlex.quote(f"slime-{Path(test_file).stem}")
    return f"--use-wandb --wandb-project {project} --wandb-group {shlex.quote(name)} "


def create_run_id() -> str:
    """Returns a name for a run: the time in UTC and a random number."""
    now = datetime.datetime.now(datetime.UTC)
    return f"{now:%y%m%d-%H%M%S}-{random.Random().randint(0, 999):03d}"


def get_bool_env_var(name: str, default: str = "false") -> bool:
    """Returns True for 1 or true, False for 0, false or an empty value. Raises ValueError for another value."""
    value = os.environ.get(name, default).strip().lower()
    if value not in (*_TRUE, *_FALSE):
        raise ValueError(f"{name} must be 1, true, 0 or false, got {value!r}; correct the variable")
    return value in _TRUE


def get_env_enable_infinite_run() -> bool:
    """Returns the value of SLIME_TEST_ENABLE_INFINITE_RUN."""
    return get_bool_env_var("SLIME_TEST_ENABLE_INFINITE_RUN")


def save_to_temp_file(text: str, ext: str) -> str:
    """Writes the text to a new file that ends in .`ext`, and returns its path. Only this user can read the file."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=f".{ext}", delete=False) as file:
        file.write(text)
    return file.name
