"""TRL's side of against_trl.py: GRPO of one case with trl.GRPOTrainer, timed.

    benchmarks/.trl-venv/bin/python benchmarks/trl_side.py '{"model": ..., "prompts": ..., "out": ..., ...}'

against_trl.py makes the environment and the argument, the JSON object of the fields of `Job`. The result goes to the
file `out`, as JSON: seconds since 1970 of the begin and the end of each rollout with its optimizer steps, the seconds
of its generation, the mean response length and the mean reward.
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
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from slime.rollout.rewards.gsm8k import gsm8k_reward


@dataclass(frozen=True)
class Job:
    """One run. `steps`: optimizer steps per rollout. `prompts` has one JSON object with prompt and label a line."""

    model: str
    prompts: str
    out: str
    run_dir: str
    rollouts: int
    prompts_per_rollout: int
    answers: int
    max_tokens: int
    steps: int
    lr: float
    seed: int

    def trainer_arguments(self) -> GRPOConfig:
        """The settings of against_trl.our_command under TRL's names, and TRL's defaults for all others."""
        samples = self.prompts_per_rollout * self.answers
        return GRPOConfig(
            output_dir=self.run_dir,
            use_cpu=True,
            # The parameters are float32 on both sides. Both flags are on by default, for GPUs.
            bf16=False,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
            max_steps=self.rollouts * self.steps,
            per_device_train_batch_size=samples // self.steps,
            gradient_accumulation_steps=1,
            steps_per_generation=self.steps,
            num_iterations=1,
            num_generations=self.answers,
            shuffle_dataset=False,
            max_completion_length=self.max_tokens,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            loss_type="grpo",
            scale_rewards="group",
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            learning_rate=self.lr,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=1.0,
            seed=self.seed,
            save_strategy="no",
            eval_strategy="no",
            report_to="none",
            logging_steps=1,
            disable_tqdm=True,
        )

    def dataset(self) -> Dataset:
        """The prompts of all rollouts as conversations, in the order of the file, from its start again at its end."""
        rows = [json.loads(line) for line in Path(self.prompts).read_text().splitlines()]
        count = self.rollouts * self.prompts_per_rollout
        taken = [rows[i % len(rows)] for i in range(count)]
        conversations = [[{"role": "user", "content": row["prompt"]}] for row in taken]
        return Dataset.from_dict({"prompt": conversations, "label": [row["label"] for row in taken]})


@dataclass
class Record:
    """What a run writes to `out`. Each list has one value a rollout."""

    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    generation_s: list[float] = field(default_factory=list)
    response_tokens: list[float] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    optimizer_steps: int = 0
    threads: int = 0

    def score(
        self, completions: list[Any], completion_ids: list[list[int]], label: list[Any], **_: Any
    ) -> list[float]:
        """TRL's reward function: our `gsm8k` reward. Both sides count the end token as a token of the response."""
        rewards = [
            gsm8k_reward(c[0]["content"], gold, {}) for c, gold in zip(completions, label, strict=True)
        ]
        self.reward.append(sum(rewards) / len(rewards))
        self.response_tokens.append(sum(map(len, completion_ids)) / len(completion_ids))
        return rewards


class Clock(TrainerCallback):
    """Writes down when a rollout begins and when its last optimizer step ends."""

    def __init__(self, record: Record, steps: int) -> None:
        self.record, self.steps = record, steps

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.steps == 0:
            self.record.begins.append(time.time())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.record.optimizer_steps = state.global_step
        if state.global_step % self.steps == 0:
            self.record.ends.append(time.time())


class TimedTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer that times its generation: `_generate` of the TRL version in trl.txt."""

    record: Record

    def _generate(self, prompts: list[Any]) -> Any:
        begin = time.time()
        generated = super()._generate(prompts)
        self.record.generation_s.append(time.time() - begin)
        return generated


def main(argv: list[str]) -> None:
    job, record = Job(**json.loads(argv[0])), Record(threads=torch.get_num_threads())
    trainer = TimedTrainer(
        model=job.model,
        reward_funcs=record.score,
        args=job.trainer_arguments(),
        train_dataset=job.dataset(),
        callbacks=[Clock(record, job.steps)],
    )
    trainer.record = record
    trainer.train()
    Path(job.out).write_text(json.dumps(asdict(record)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
