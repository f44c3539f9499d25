"""Defines the common parts of the tables of other trainers' settings, and values of flags that have another name in
other trainers.

The tables are peer_trl.py and peer_verl.py.
"""

from __future__ import annotations

from collections.abc import Mapping

TRL, VERL, OTHERS = "TRL", "verl", "other trainers"
Row = tuple[str, str, str] | tuple[str, str, str, Mapping[str, str]]
"""A setting, its flags here, a note, and flags by value if the value decides. In flags, {} is the setting's value.
Empty flags mean that the setting or the value needs no flag."""
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
RECOMPUTED = {"true": RECOMPUTE, "false": ""}
TRACKERS = {
    **{name: f"--use-{name}" for name in ("wandb", "tensorboard", "mlflow", "swanlab", "trackio")},
    **dict.fromkeys(("none", "console", "file"), ""),
}
TRACKED = "also --use-tensorboard, --use-mlflow, --use-swanlab, --use-trackio"
DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16"), "--bf16"),
    **dict.fromkeys(("float16", "fp16"), "--fp16"),
    **dict.fromkeys(("float32", "fp32"), "--fp32"),
    "auto": "",
}
HOOK = "FILE.py:FUNCTION or module.function"

VALUES: Mapping[str, Mapping[str, str]] = {
    "loss_type": {
        "grpo": "leave the flag out: the mean over each response, then over the responses, is the default",
        **dict.fromkeys(
            ("bnpo", "dapo"), "give --calculate-per-token-loss instead: the mean over all tokens of a step"
        ),
        "dr_grpo": "give --use-dr-grpo instead, which also leaves out the division by the standard deviation",
        "cispo": "give --advantage-estimator cispo instead",
        "sapo": "give --pg-loss-type sapo instead",
        "gspo": "give --advantage-estimator gspo instead",
        "ppo": "give --advantage-estimator ppo instead",
        "sigmoid": "give --loss-type dpo",
        **dict.fromkeys(("sft", "nll"), "give --loss-type sft_loss"),
        **dict.fromkeys(("rm", "reward"), "give --loss-type reward_model"),
    },
    "advantage_estimator": {
        "dr_grpo": "give grpo with --use-dr-grpo",
        "dapo": "give grpo with --calculate-per-token-loss and --eps-clip-high (docs/algorithms.md)",
        "sapo": "give grpo with --pg-loss-type sapo",
        "reinforce": "give reinforce_plus_plus, or grpo with --pg-loss-type reinforce",
        "remax": "give rloo: there is no greedy response to subtract",
        "on_policy_distillation": "give grpo with --use-opd --opd-type sglang (docs/algorithms.md)",
    },
    "pg_loss_type": {
        "grpo": "give clip, or leave the flag out",
        "dr_grpo": "give --use-dr-grpo instead",
        "dapo": "give --calculate-per-token-loss instead",
    },
    "kl_loss_type": {"kl": "give k1", "mse": "give k2"},
    "lr_decay_style": {
        "constant_with_warmup": "give constant with --lr-warmup-iters",
        "cosine_with_min_lr": "give cosine with --min-lr",
        "inverse_sqrt": "give inverse-square-root",
        "warmup_stable_decay": "give WSD",
    },
    "optimizer": dict.fromkeys(
        ("adamw", "adamw_torch", "adamw_torch_fused"),
        "give adam, whose weight decay is decoupled as in AdamW",
    ),
    "attention_backend": dict.fromkeys(
        ("flash_attention_2", "flash_attention_3", "flash_attn"), "give flash"
    ),
    "train_backend": dict.fromkeys(("fsdp", "fsdp2", "deepspeed"), "give megatron, or leave the flag out"),
}
"""Flag -> remedy for a value that only another trainer has."""
