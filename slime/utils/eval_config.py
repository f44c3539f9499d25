"""Evaluation datasets under the path that slime plug-ins use."""

from slime.rollout.evaluation import EvalDatasetConfig, build_eval_dataset_configs

__all__ = ["EvalDatasetConfig", "build_eval_dataset_configs"]
