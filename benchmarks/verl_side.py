"""verl's side of against_peers.py: a timed GRPO run for one case with verl.trainer.main_ppo.

    PYTHONPATH=benchmarks/.peers/verl:benchmarks:. python benchmarks/verl_side.py '{"model": ..., "out": ..., ...}'

against_peers.py makes the folder and the argument, a JSON object with the fields of `Job`. The script writes the
prompts in verl's form, starts verl and reads the lines of verl's file logger as they appear. After each rollout, it
writes the result to the file `out` as JSON, with the fields of trl_side.Record that the table needs and verl's own
times (`timing_s/*`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer_job import PeerJob

from slime.rollout.rewards.gsm8k import gsm8k_reward

POLL_S = 0.02
TIMES = "timing_s/"
ATTENTION = "torch_varlen"  # registered by verl_attention.py
QUICK = {
    "trainer.v1.sampler.custom_sampler.path": "pkg://verl_sampler",
    "trainer.v1.sampler.custom_sampler.name": "QuickReplayBuffer",
}


@dataclass(frozen=True, kw_only=True)
class Job(PeerJob):
    """A run of verl.

    `tuned`: take the old log-probs from the engine, and ask often whether the rollout has ended. Otherwise verl's
    defaults apply.
    """

    micro_tokens: int
    tuned: bool

    @property
    def prompt_file(self) -> Path:
        return Path(self.run_dir) / "prompts.jsonl"

    @property
    def metrics_file(self) -> Path:
        return Path(self.run_dir) / "verl.jsonl"

    def settings(self) -> dict[str, Any]:
        """Returns the settings of peer_cases.our_command under verl's names. All other settings are verl's defaults."""
        return {
            **{"data.train_files": str(self.prompt_file), "data.val_files": str(self.prompt_file)},
            **{
                "data.train_batch_size": self.prompts_per_rollout,
                "data.shuffle": False,
                "data.seed": self.seed,
            },
            **{"data.max_prompt_length": self.context - self.max_tokens},
            **{"data.max_response_length": self.max_tokens, "data.filter_overlong_prompts": False},
            **{"algorithm.adv_estimator": "grpo", "algorithm.use_kl_in_reward": False},
            "algorithm.rollout_correction.bypass_mode": self.tuned,
            "reward.custom_reward_function.path": f"pkg://{Path(__file__).stem}",
            "reward.custom_reward_function.name": score.__name__,
            **{f"actor_rollout_ref.model.{name}": value for name, value in self.model_settings().items()},
            "+actor_rollout_ref.model.override_config.attn_implementation": ATTENTION,
            **{f"actor_rollout_ref.actor.{name}": value for name, value in self.actor_settings().items()},
            **{f"actor_rollout_ref.rollout.{name}": value for name, value in self.engine_settings().items()},
            **{"trainer.n_gpus_per_node": 1, "trainer.nnodes": 1, "trainer.total_epochs": 1},
            **{"trainer.total_training_steps": self.rollouts, "trainer.logger": "[console,file]"},
            **{"trainer.save_freq": -1, "trainer.test_freq": -1, "trainer.val_before_train": False},
            **{"trainer.resume_mode": "disable", "trainer.default_local_dir": self.run_dir},
            **(QUICK if self.tuned else {}),
            # verl attaches to another Ray on the host by default.
            **{"+ray_kwargs.ray_init.address": "local", "+ray_kwargs.ray_init.include_dashboard": False},
            **{"hydra.run.dir": self.run_dir, "hydra.output_subdir": "null"},
        }

    def model_settings(self) -> dict[str, Any]:
        """Returns packed micro-batches, log-probs without logits, and the attention of verl_attention.py."""
        return {
            **{"path": self.model, "use_remove_padding": True, "use_fused_kernels": True},
            **{"enable_gradient_checkpointing": self.recompute, "external_lib": "verl_attention"},
        }

    def actor_settings(self) -> dict[str, Any]:
        """Returns FSDP2 with float32 parameters and Adam state, which computes in bfloat16."""
        return {
            **{"strategy": "fsdp2", "fsdp_config.model_dtype": "fp32", "fsdp_config.seed": self.seed},
            **{"ppo_mini_batch_size": self.prompts_per_rollout // self.steps, "ppo_epochs": 1},
            **{"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": self.micro_tokens},
            **{"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1000.0},
            **{"loss_agg_mode": "seq-mean-token-mean", "use_kl_loss": False, "entropy_coeff": 0},
            **{"optim.lr": self.lr, "optim.betas": "[0.9,0.95]", "optim.weight_decay": 0.0},
            # Without the fused step, Adam needs 4 more bytes per parameter.
            **{"optim.clip_grad": 1.0, "optim.override_optimizer_config": "{fused:true}"},
        }

    def engine_settings(self) -> dict[str, Any]:
        """Returns the settings of the engine, which sleeps while the trainer works (`free_cache_engine`)."""
        samples = self.prompts_per_rollout * self.answers
        return {
            **{"name": "vllm", "n": self.answers, "temperature": 1.0, "tensor_model_parallel_size": 1},
            **{"gpu_memory_utilization": self.engine_share, "max_model_len": self.context},
            **{"max_num_seqs": max(256, samples), "free_cache_engine": True, "seed": self.seed},
        }

    def command(self) -> list[str]:
        """Returns verl's command."""
        overrides = [f"{name}={value}" for name, value in self.settings().items()]
        return [sys.executable, "-m", "verl.trainer.main_ppo", *overrides]

    def write_prompts(self) -> None:
        """Writes all rollouts' prompts in verl's form. It reads the file in order, and repeats it at its end."""
        rows = [json.loads(line) for line in Path(self.prompts).read_text(encoding="utf-8").splitlines()]
        taken = [rows[i % len(rows)] for i in range(self.rollouts * self.prompts_per_rollout)]
        lines = [
            {
                **{"data_source": "gsm8k", "prompt": [{"role": "user", "content": row[self.prompt_key]}]},
                **{"reward_model": {"style": "rule", "ground_truth": str(row[self.label_key])}},
                "extra_info": {"index": index},
            }
            for index, row in enumerate(taken)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        self.prompt_file.write_text(text, encoding="utf-8")


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Computes our `gsm8k` reward for verl."""
    return gsm8k_reward(solution_str, ground_truth, {})


def result_of(lines: Sequence[dict[str, Any]], times: Sequence[float]) -> dict[str, Any]:
    """Returns the content of `out` from the lines of verl's file logger and the times at which they appeared.

    verl writes the line of a rollout after its step and its metrics.
    """
    rows = [line["data"] for line in lines]
    parts = [name for name in rows[0] if name.startswith(TIMES)]
    return {
        "begins": [end - row[f"{TIMES}step"] for end, row in zip(times, rows, strict=True)],
        "ends": list(times),
        "generation_s": [row[f"{TIMES}gen"] for row in rows],
        "response_tokens": [row["response_length/mean"] for row in rows],
        "reward": [row["critic/score/mean"] for row in rows],
        "parts_s": {name: [row.get(name, 0.0) for row in rows] for name in parts},
    }


def new_lines(file: Path, process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """Yields the lines of a file as they appear, until the process has exited."""
    while not file.is_file():
        if process.poll() is not None:
            return
        time.sleep(POLL_S)
    with file.open(encoding="utf-8") as stream:
        part = ""
        while True:
            ended = process.poll() is not None
            part += stream.readline()
            if part.endswith("\n"):
                yield json.loads(part)
                part = ""
            elif ended:
                return
            else:
                time.sleep(POLL_S)


def main(argv: list[str]) -> int:
    job = Job(**json.loads(argv[0]))
    job.write_prompts()
    lines: list[dict[str, Any]] = []
    times: list[float] = []
    process = subprocess.Popen(
        job.command(), env={**os.environ, "VERL_FILE_LOGGER_PATH": str(job.metrics_file)}
    )
    for line in new_lines(job.metrics_file, process):
        lines.append(line)
        times.append(time.time())
        part = Path(job.out + ".part")  # against_peers.py reads the file during the run.
        part.write_text(json.dumps(result_of(lines, times)) + "\n", encoding="utf-8")
        part.rename(job.out)
    return process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
