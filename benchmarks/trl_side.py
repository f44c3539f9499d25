"""TRL's side of against_peers.py: a timed GRPO run for one case with trl.GRPOTrainer.

    PYTHONPATH=benchmarks/.peers/trl:. python benchmarks/trl_side.py '{"model": ..., "prompts": ..., "out": ..., ...}'

against_peers.py makes the folder and the argument, a JSON object with the fields of `Job`. After each rollout, the
script writes the result to the file `out` as JSON: each rollout's begin and end with its optimizer steps in seconds
since 1970, the seconds of its generation, the mean response length and the mean reward.

On a GPU, a vLLM engine in this process generates. On CPUs, transformers generates.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peer_job import PeerJob
from transformers import TrainerCallback

from slime.rollout.rewards.gsm8k import gsm8k_reward


@dataclass(frozen=True, kw_only=True)
class Job(PeerJob):
    """A run of TRL. `sleep`: the engine frees its memory while TRL trains."""

    device: str
    micro_samples: int
    sleep: bool

    def settings(self) -> dict[str, Any]:
        """Returns the settings of peer_cases.our_command under TRL's names. All other settings are TRL's defaults."""
        samples = self.prompts_per_rollout * self.answers
        return {
            **{"output_dir": self.run_dir, "max_steps": self.rollouts * self.steps, "seed": self.seed},
            "per_device_train_batch_size": self.micro_samples,
            "gradient_accumulation_steps": samples // self.steps // self.micro_samples,
            "steps_per_generation": samples // self.micro_samples,
            **{"num_iterations": 1, "num_generations": self.answers, "shuffle_dataset": False},
            "max_completion_length": self.max_tokens,
            **{"temperature": 1.0, "top_p": 1.0, "top_k": 0},
            **{
                "loss_type": "grpo",
                "scale_rewards": "group",
                "beta": 0.0,
                "epsilon": 0.2,
                "epsilon_high": 0.28,
            },
            **{"learning_rate": self.lr, "lr_scheduler_type": "constant", "adam_beta2": 0.95},
            **{"weight_decay": 0.0, "max_grad_norm": 1.0, "gradient_checkpointing": self.recompute},
            **{"save_strategy": "no", "eval_strategy": "no", "report_to": "none"},
            **{"logging_steps": 1, "disable_tqdm": True},
            # Float32 parameters. On a GPU, autocast computes in bfloat16.
            **{"model_init_kwargs": {"dtype": "float32"}, "bf16": self.device == "cuda"},
            **(self.gpu_settings() if self.device == "cuda" else {"use_cpu": True}),
        }

    def gpu_settings(self) -> dict[str, Any]:
        """Returns the settings of the engine. As on our side, its log-probs are not corrected, which saves a pass."""
        return {
            **{"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": self.sleep},
            "vllm_gpu_memory_utilization": self.engine_share,
            "vllm_max_model_length": self.context,
            "vllm_importance_sampling_correction": False,
        }

    def dataset(self) -> Dataset:
        """Returns all rollouts' prompts as conversations. It reads the file in order, and repeats it at its
        end."""
        rows = [json.loads(line) for line in Path(self.prompts).read_text(encoding="utf-8").splitlines()]
        count = self.rollouts * self.prompts_per_rollout
        taken = [rows[i % len(rows)] for i in range(count)]
        conversations = [[{"role": "user", "content": row[self.prompt_key]}] for row in taken]
        return Dataset.from_dict({"prompt": conversations, "label": [row[self.label_key] for row in taken]})


@dataclass
class Record:
    """The content of `out`. Each list has one value per rollout."""

    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    generation_s: list[float] = field(default_factory=list)
    response_tokens: list[float] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    optimizer_steps: int = 0
    threads: int = 0
    attention: str = ""

    def score(
        self, completions: list[Any], completion_ids: list[list[int]], label: list[Any], **_: Any
    ) -> list[float]:
        """Computes our `gsm8k` reward for TRL. Both sides count the end token as a token of the response."""
        rewards = [
            gsm8k_reward(c[0]["content"], gold, {}) for c, gold in zip(completions, label, strict=True)
        ]
        self.reward.append(sum(rewards) / len(rewards))
        self.response_tokens.append(sum(map(len, completion_ids)) / len(completion_ids))
        return rewards

    def timed(self, generate: Any) -> Any:
        """Wraps `generate` so that it also records its seconds."""

        def call(*given: Any, **named: Any) -> Any:
            begin = time.time()
            generated = generate(*given, **named)
            self.generation_s.append(time.time() - begin)
            return generated

        return call


class Clock(TrainerCallback):
    """Records when each rollout begins and when its last optimizer step ends."""

    def __init__(self, record: Record, job: Job) -> None:
        self.record, self.job = record, job

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.job.steps == 0:
            self.record.begins.append(time.time())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.record.optimizer_steps = state.global_step
        if state.global_step % self.job.steps == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # The time of the step includes the optimizer's kernels.
            self.record.ends.append(time.time())
            part = Path(self.job.out + ".part")  # against_peers.py reads the file during the run.
            part.write_text(json.dumps(asdict(self.record)) + "\n", encoding="utf-8")
            part.rename(self.job.out)


def main(argv: list[str]) -> None:
    job = Job(**json.loads(argv[0]))
    if job.device == "cpu":
        sys.modules["vllm"] = None  # type: ignore[assignment]  # TRL imports vLLM if it is installed.
    from trl import GRPOConfig, GRPOTrainer

    record = Record(threads=torch.get_num_threads())
    trainer = GRPOTrainer(
        model=job.model,
        reward_funcs=record.score,
        args=GRPOConfig(**job.settings()),
        train_dataset=job.dataset(),
        callbacks=[Clock(record, job)],
    )
    record.attention = trainer.model.config._attn_implementation
    trainer._generate = record.timed(trainer._generate)
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1:])
