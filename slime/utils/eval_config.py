"""Import path of slime plug-ins: see slime.rollout.evaluation."""

from slime.rollout.evaluation import EvalDatasetConfig, build_eval_dataset_configs

__all__ = ["EvalDatasetConfig", "build_eval_dataset_configs"]
