"""Write a tiny Qwen3 checkpoint and two-digit addition data: everything the first run needs, from a seed alone.

    python scripts/make_tiny_model.py runs/tiny/data

leaves in that folder

    base/                    Hugging Face checkpoint: 1.2 M random fp32 parameters, fast tokenizer, chat template
    train.jsonl  .parquet    {"prompt": "12+34=", "label": "46"}: what reinforcement learning draws from
    test.jsonl   .parquet    the same for pairs that occur in no other file
    sft.jsonl                {"messages": [user, assistant]}: supervised warm-up on the pairs of train.jsonl

The teacher of sft.jsonl is sloppy: three in ten of its answers (--slips) are off by a little. A model that imitates it
learns how to add and also to be wrong, which the reward of the first run then corrects.

The same seed gives the same bytes. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant")
PAIRS = 90 * 90
SLIPS = (-20, -10, -2, -1, 1, 2, 10, 20)

# Qwen's turn markers without its default system turn: "12+34=" becomes 14 tokens, most of which carry the question.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_tokenizer() -> Tokenizer:
    """One token a byte, so that every text round-trips; turn markers are special, role names are one token each."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT, TURN_START, TURN_END])
    tokenizer.add_tokens([AddedToken(role, normalized=False) for role in ROLES])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json; the general class name is read alike by every transformers release."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START, TURN_END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def build_model(tokenizer: Tokenizer, seed: int) -> Qwen3ForCausalLM:
    """Random fp32 weights from `seed`; the caller's random state is left as it was."""
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(TURN_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def save_model(model: Qwen3ForCausalLM, folder: Path) -> None:
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.config.save_pretrained(folder)
    # The tied head is not written: a loader that finds no lm_head.weight ties it, as with the real Qwen3 models.
    tensors = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def additions(seed: int, test: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """All ordered pairs of two-digit numbers, shuffled by `seed`: (train, test) with `test` rows held out."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a, b in pairs]
    return rows[test:], rows[:test]


def write_jsonl(rows: list[dict], path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sloppy_lessons(rows: list[dict[str, str]], seed: int, slips: float) -> list[dict]:
    """Chats in an order of their own; each answer is off by 1, 2, 10 or 20 with probability `slips`."""
    teacher = random.Random(seed + 1)
    lessons = []
    for row in teacher.sample(rows, len(rows)):
        slip = teacher.choice(SLIPS) if teacher.random() < slips else 0
        question = {"role": "user", "content": row["prompt"]}
        answer = {"role": "assistant", "content": str(int(row["label"]) + slip)}
        lessons.append({"messages": [question, answer]})
    return lessons


def write_data(folder: Path, seed: int, test: int, slips: float) -> None:
    train_rows, test_rows = additions(seed, test)
    for name, rows in (("train", train_rows), ("test", test_rows)):
        write_jsonl(rows, folder / f"{name}.jsonl")
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    write_jsonl(sloppy_lessons(train_rows, seed, slips), folder / "sft.jsonl")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a tiny Qwen3 checkpoint and two-digit addition data.")
    parser.add_argument("folder", type=Path, help="where to write; files of an earlier call are replaced")
    parser.add_argument("--seed", type=int, default=0, help="decides every byte (default 0)")
    parser.add_argument(
        "--test", type=int, default=256, help=f"held-out prompts of the {PAIRS} (default 256)"
    )
    parser.add_argument(
        "--slips", type=float, default=0.3, help="share of wrong answers in sft.jsonl (default 0.3)"
    )
    args = parser.parse_args(argv)
    if not 0 < args.test < PAIRS:
        parser.error(f"--test must lie in (0, {PAIRS}), got {args.test}; the default is 256")
    if not 0 <= args.slips <= 1:
        parser.error(f"--slips must lie in [0, 1], got {args.slips}; the default is 0.3")

    base = args.folder / "base"
    base.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, args.seed)
    save_tokenizer(tokenizer, base)
    save_model(model, base)
    write_data(args.folder, args.seed, args.test, args.slips)
    size = f"{model.num_parameters() / 1e6:.1f} M parameters"
    print(f"{args.folder}: {size}, {PAIRS - args.test} training and {args.test} test prompts")


if __name__ == "__main__":
    main()
