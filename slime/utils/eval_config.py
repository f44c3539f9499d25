"""Import path of slime plug-ins: see slime.rollout.eval_datasets."""

from slime.rollout.eval_datasets import EvalDatasetConfig, build_eval_dataset_configs

__all__ = ["EvalDatasetConfig", "build_eval_dataset_configs"]
