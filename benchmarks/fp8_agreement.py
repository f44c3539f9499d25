"""Measures on a CPU how far log-probs of the same weights differ, with and without products in fp8.

    python benchmarks/fp8_agreement.py MODEL DATA.jsonl --out OUT.json

MODEL is a Hugging Face folder whose linear layers have sizes of multiples of 128. Each row of DATA has `question` and
`answer`. transformers computes in float32. With `noise`, each linear layer rounds its input
and output to bfloat16. This stands for a program that adds in another order. The script compares the mean absolute
differences of the answers' log-probs: bf16 with noise against fp8 is a trainer in bf16 and an engine in fp8, and fp8
with noise against fp8 is a trainer and an engine in the same scheme.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_kernel.fp8.reference import quantize_blocks, quantize_rows


class Linear(nn.Module):
    """A linear layer whose arithmetic the fields choose."""

    fp8, noise, rounded = False, False, False

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        codes, scales = quantize_blocks(layer.weight)
        self.in_fp8 = codes.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        if self.noise:
            x = x.bfloat16().float()
        if self.fp8:
            codes, scales = quantize_rows(x.flatten(0, -2))
            x = (codes.float() * scales.repeat_interleave(128, 1)).view(x.shape)
        weight = self.in_fp8 if self.fp8 or self.rounded else self.weight
        y = nn.functional.linear(x, weight, self.bias)
        return y.bfloat16().float() if self.noise else y


def load_model(folder: Path) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(part, name, Linear(child))
    return model


@torch.no_grad()
def compute_log_probs(model: nn.Module, rows: list[tuple[list[int], int]], **fields: bool) -> Tensor:
    for name in ("fp8", "noise", "rounded"):
        setattr(Linear, name, fields.get(name, False))
    found = []
    for tokens, prompt in rows:
        logits = model(torch.tensor([tokens])).logits[0, prompt - 1 : -1]
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(tokens[prompt:])[:, None])[:, 0])
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare log-probs of computations in bf16 and fp8.")
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tokenizer, rows = AutoTokenizer.from_pretrained(args.model), []
    for line in args.data.read_text(encoding="utf-8").splitlines()[: args.rows]:
        row = json.loads(line)
        chat = [{"role": "user", "content": row["question"]}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        head, tail = tokenizer(prompt)["input_ids"], tokenizer(row["answer"])["input_ids"]
        rows.append((head + tail, len(head)))
    model = load_model(args.model)
    engine = compute_log_probs(model, rows, fp8=True)
    trainers = {
        "bf16": compute_log_probs(model, rows, noise=True),
        "bf16 from weights in fp8": compute_log_probs(model, rows, noise=True, rounded=True),
        "fp8": compute_log_probs(model, rows, noise=True, fp8=True),
    }
    differences = {name: round((engine - found).abs().mean().item(), 4) for name, found in trainers.items()}
    plain = compute_log_probs(model, rows)
    differences["bf16, engine in bf16"] = round((plain - trainers["bf16"]).abs().mean().item(), 4)
    record = {"tokens": len(engine), "differences": differences}
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
