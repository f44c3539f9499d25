"""Import path of slime's launch scripts: see slime.plug_ins.launch and slime.plug_ins.dataclass_cli."""

from slime.plug_ins.dataclass_cli import dataclass_cli
from slime.plug_ins.launch import (
    GENERATION_HARDWARE,
    NUM_GPUS_OF_HARDWARE,
    ExecuteTrainConfig,
    check_has_nvlink,
    convert_checkpoint,
    create_run_id,
    exec_command,
    execute_train,
    fp8_cast_bf16,
    get_bool_env_var,
    get_default_wandb_args,
    get_env_enable_infinite_run,
    hf_download_dataset,
    repo_base_dir,
    rsync_simple,
    save_to_temp_file,
)

__all__ = [
    "GENERATION_HARDWARE",
    "NUM_GPUS_OF_HARDWARE",
    "ExecuteTrainConfig",
    "check_has_nvlink",
    "convert_checkpoint",
    "create_run_id",
    "dataclass_cli",
    "exec_command",
    "execute_train",
    "fp8_cast_bf16",
    "get_bool_env_var",
    "get_default_wandb_args",
    "get_env_enable_infinite_run",
    "hf_download_dataset",
    "repo_base_dir",
    "rsync_simple",
    "save_to_temp_file",
]
