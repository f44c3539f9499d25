"""GRPO of TRL on word problems in the form of GSM8K. `vime import` reads this file; vime does not run it."""

import re

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

SYSTEM = "Think step by step. Write the final number after ####."
ANSWER = re.compile(r"####\s*(-?[\d.,]+)")


def final_number(text):
    found = ANSWER.search(text)
    return found.group(1).replace(",", "") if found else None


def to_prompt(row):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}]
    return {"prompt": messages, "solution": final_number(row["answer"])}


def correct(prompts, completions, solution, **kwargs):
    """1 for the right number."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(final_number(text) == right) for text, right in zip(texts, solution, strict=True)]


def digits(completions, **kwargs):
    """The share of characters that are digits, and nothing for an empty text."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(c.isdigit() for c in text) / len(text) if text else None for text in texts]


dataset = load_dataset("json", data_files="examples/from-trl/problems.jsonl", split="train")
dataset = dataset.map(to_prompt)

training_args = GRPOConfig(
    output_dir="grpo-words",
    learning_rate=1e-3,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    num_generations=4,
    max_completion_length=8,
    max_steps=2,
    beta=0.0,
    min_p=0.0,
    loss_type="dr_grpo",
    reward_weights=[1.0, 0.5],
    save_strategy="no",
    logging_steps=1,
    report_to="none",
    use_vllm=True,
)

trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=[correct, digits],
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
