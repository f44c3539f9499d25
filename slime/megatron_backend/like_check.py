"""Compares a tiny model of a Llama-like model_type with transformers, on a CPU.

    python -m slime.megatron_backend.like_check CHECKPOINT [--trust-remote-code]

The tiny model has the config.json of the checkpoint with smaller sizes, and random weights. The command prints one line
of JSON: the largest difference of a logit, or the reason why the two could not be compared.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from slime.checkpoints.hf_config import read_hf_config
from slime.config import Config
from slime.data.token_slice import token_slice
from slime.megatron_backend.checkpoint.weights import load_hf
from slime.megatron_backend.model.attention import packed_layout
from slime.megatron_backend.model.gpt import build_model, compute_logits, stage_output
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.models.decoder import Hf
from slime.models.llama_like import LIKE, TENSORS

VOCAB, DEPTH, WINDOW, HEADS = 96, 8, 6, 4
_TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
LENGTHS = (5, 24)
"""Lengths of the two sequences. The second is longer than the window."""


def cut(values: Hf) -> dict[str, object]:
    """Returns a config.json with smaller sizes. Lists with one entry per layer keep the first entries."""
    depth = values["num_hidden_layers"]
    small: dict[str, object] = {
        key: value[:DEPTH] if isinstance(value, list) and len(value) == depth else value
        for key, value in values.items()
    }
    heads, groups = values["num_attention_heads"], values.get("num_key_value_heads")
    own_size = values.get("head_dim") not in (None, values["hidden_size"] // heads)
    small |= {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": min(depth, DEPTH),
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS if groups in (None, heads) else 1 if groups == 1 else 2,
        "dtype": "float32",
    }
    small |= {key: 1 for key in _TOKEN_IDS if values.get(key) is not None}
    small.pop("quantization_config", None)
    if values.get("head_dim") is not None:
        small["head_dim"] = 32 if own_size else 16
    if values.get("sliding_window") is not None:
        small["sliding_window"] = WINDOW
    return small


def make_tiny(checkpoint: Path, directory: Path, *, trust_remote_code: bool) -> nn.Module:
    """Writes a tiny random model with the settings of `checkpoint`, and returns transformers' model."""
    config = transformers.AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    small = type(config).from_dict(cut(config.to_dict()))
    torch.manual_seed(0)
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        small, trust_remote_code=trust_remote_code, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.train(False)
    model.save_pretrained(directory)
    return model


def trainer_logits(directory: Path, batch: list[Tensor]) -> Tensor:
    """Returns the logits [T, V] of the trainer for packed sequences."""
    config = Config.from_flat({"params_dtype": "float32", "seed": 1, "global_batch_size": 1})
    init_parallel(0, 1, config, init_method=f"file://{directory}/store")
    model = build_model(read_hf_config(directory), config, ddp=False)
    load_hf(model, directory)
    layout = packed_layout(token_slice([len(tokens) for tokens in batch]), "cpu")
    with torch.no_grad():
        logits = compute_logits(model, stage_output(model, torch.cat(batch), layout))[:, :VOCAB]
    destroy_parallel()
    return logits


def compare(checkpoint: Path, *, trust_remote_code: bool) -> float:
    """Returns the largest difference of a logit in float32. Raises ValueError if transformers builds other tensors."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        model = make_tiny(checkpoint, directory, trust_remote_code=trust_remote_code)
        mine, made = (read_hf_config(path)[TENSORS][LIKE] for path in (checkpoint, directory))
        if mine != made:
            raise ValueError(
                f"transformers' model must have the parts of the checkpoint, {mine}, got {made}; use the transformers "
                "release of the checkpoint"
            )
        generator = torch.Generator().manual_seed(1)
        batch = [torch.randint(0, VOCAB, (length,), generator=generator) for length in LENGTHS]
        with torch.no_grad():
            wanted = torch.cat([model(tokens[None]).logits[0] for tokens in batch])
        return (trainer_logits(directory, batch) - wanted).abs().max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a tiny Llama-like model with transformers.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--trust-remote-code", action="store_true")
    options = parser.parse_args()
    try:
        found: dict[str, object] = {
            "difference": compare(options.checkpoint, trust_remote_code=options.trust_remote_code),
            "tokens": sum(LENGTHS),
        }
    except Exception as error:  # border of this process: the caller reports the reason
        found = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
