#!/usr/bin/env bash
# A launch script of verl: GRPO on word problems in the form of GSM8K. `vime import` reads this file; vime does not run it.
set -euo pipefail
DATA=words.parquet
GROUP=4

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=$DATA \
    data.val_files=$DATA \
    data.train_batch_size=4 \
    data.max_prompt_length=256 \
    data.max_response_length=8 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.optim.lr=1e-3 \
    actor_rollout_ref.actor.ppo_mini_batch_size=4 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.fsdp_config.wrap_policy.min_num_params=0 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.n=${GROUP} \
    custom_reward_function.path=examples/from-verl/reward.py \
    trainer.logger='["console"]' \
    trainer.n_gpus_per_node=1 \
    trainer.test_freq=-1 \
    trainer.total_training_steps=2 "$@"
