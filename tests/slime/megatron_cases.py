"""Makes tiny HF checkpoints, configurations and a training step for the Megatron tests and their worker processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from family_cases import BUILT_AS, MULTIMODAL, PREDICTION, TINY, multimodal
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import rl_kernel
from slime.checkpoints.hf_config import read_hf_config
from slime.config import Config
from slime.data.token_slice import token_slice
from slime.megatron_backend.checkpoint.weights import load_hf
from slime.megatron_backend.conformance import computed, reference
from slime.megatron_backend.model.attention import packed_layout
from slime.megatron_backend.model.gpt import (
    build_model,
    capped,
    compute_logits,
    logit_cap,
    output_weight,
    stage_output,
    unwrap,
    vocab_range,
)
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.model.optimizer import finish_grads
from slime.models import family_for
from slime.models.renaming import rename

VOCAB = 99
BATCH_TOKENS = 29
hidden_of, become_gradients = computed.compute_hidden, computed.store_gradients
hf_logits = reference.compute_reference_logits
"""The functions with which `vime.testing.check_family` compares a model, too."""


def make_config(**values: Any) -> Config:
    defaults = {
        "params_dtype": "float32",
        "seed": 1234,
        "distributed_timeout_minutes": 1,
        "global_batch_size": 8,
    }
    return Config.from_flat({**defaults, **values})


def tiny_checkpoint(directory: Path, kind: str = "qwen3", **shape: Any) -> nn.Module:
    """Writes a random checkpoint, in which norms and biases are random too, and returns the HF model."""
    values = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        **TINY[kind],
        **shape,
    }
    load: Any = transformers.AutoModelForCausalLM
    if kind in MULTIMODAL:
        load, values = transformers.AutoModelForImageTextToText, multimodal(kind, values)
    config = transformers.AutoConfig.for_model(BUILT_AS.get(kind, kind), **values)
    torch.manual_seed(0)
    model: Any = load.from_config(config).eval()
    model.get_input_embeddings().padding_idx = None  # a token with this id has a gradient
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        for name, parameter in model.named_parameters():
            if name.endswith("conv1d.weight"):  # a norm follows and makes the rounding of tiny values large
                parameter.normal_(std=0.5)
        for name, buffer in model.named_buffers():
            # Scores differ by less, so the bias decides many choices.
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.04)
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    name_as_published(directory, kind)
    if kind in BUILT_AS or kind in PREDICTION:
        as_published(directory, kind)
    if (
        values.get("num_nextn_predict_layers")
        and family_for(read_hf_config(directory)).prediction is not None
    ):
        add_prediction_layers(directory)
    return model


def loaded(directory: Path, *, ddp: bool = True, **config: Any) -> list[nn.Module]:
    """Returns the model of a checkpoint with its weights, on the ranks of this process."""
    model = build_model(load_hf_config(directory), make_config(**config), ddp=ddp)
    load_hf(model, directory)
    return model


def sequences(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator) for n in (5, 9, 3, 12)]


def packed_logits(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Returns logits [T, V] of a packed row, for a single tensor-parallel rank."""
    return capped(hidden_of(model, batch) @ output_weight(model).T, logit_cap(model))[:, :VOCAB]


def hf_gradients(hf: nn.Module, directory: Path) -> dict[str, Tensor]:
    """Returns gradients under the names of a checkpoint: transformers saves them like weights. Afterwards the
    parameters of `hf` are gradients."""
    reference.store_gradients(hf)
    hf.save_pretrained(directory)
    name_as_published(directory, hf.config.model_type)
    return load_file(directory / "model.safetensors")


def trained(tensors: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
    """Returns the tensors of a checkpoint except those that the trainer of a text run does not build: prediction
    layers, a vision tower."""
    hf_config = read_hf_config(directory)
    family = family_for(hf_config)
    others = {*family.prediction_names(tensors, hf_config), *family.tower_names(tensors, hf_config)}
    return {name: tensor for name, tensor in tensors.items() if name not in others}


def assert_gradients_equal(got: Tensor, wanted: Tensor, name: str) -> float:
    """Compares to 1e-4, or to 1e-5 of the tensor's largest value. The norm after a delta rule enlarges the rounding
    of small outputs, in transformers' float32 as in ours. Returns the largest difference, divided by the largest
    value."""
    largest = wanted.abs().max().item()
    atol = max(1e-6, 1e-5 * largest)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=atol, msg=lambda text: f"{name}: {text}")
    return (got - wanted).abs().max().item() / largest if largest else 0.0


SAVED_BY_KIMI = (
    ("language_model.model.blocks.", "language_model.model.layers."),
    ("model.mm_projector.", "mm_projector."),
    ("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed."),
)
"""Prefixes with which transformers 5.19 saves Kimi K2.5, and those of published files."""


def name_as_published(directory: Path, kind: str) -> None:
    """Changes the files of three families to the form of published files, which vLLM reads: transposes the stacks of
    experts of Qwen3-VL, adds the tower's prefix of Gemma 3, and corrects the names of Kimi K2.5. transformers reads
    both forms."""
    if kind not in ("qwen3_vl_moe", "gemma3", "kimi_k25"):
        return
    tensors = load_file(directory / "model.safetensors")
    family = family_for(read_hf_config(directory))
    aliases = SAVED_BY_KIMI if kind == "kimi_k25" else family.aliases
    named = {
        rename(name, aliases): x.transpose(1, 2).contiguous()
        if ".mlp.experts." in name and x.dim() == 3
        else x
        for name, x in tensors.items()
    }
    save_file(named, directory / "model.safetensors", {"format": "pt"})


def as_published(directory: Path, kind: str) -> None:
    """Adds the parts of published files that transformers does not write: the model_type of a family that
    transformers does not have, and a tensor of multi-token prediction."""
    hf_config = json.loads((directory / "config.json").read_text()) | {"model_type": kind}
    (directory / "config.json").write_text(json.dumps(hf_config))
    more = {PREDICTION[kind]: torch.randn(64, 128)} if kind in PREDICTION else {}
    save_file(
        load_file(directory / "model.safetensors") | more, directory / "model.safetensors", {"format": "pt"}
    )


def add_prediction_layers(directory: Path) -> None:
    """Adds random layers of multi-token prediction to a checkpoint, under the names of the family's published files,
    because transformers has no such layers. The decoder layer inside has the shape of the checkpoint's last layer."""
    hf_config, tensors = read_hf_config(directory), load_file(directory / "model.safetensors")
    mimo = hf_config["model_type"] == "mimo"
    depth, size = hf_config["num_hidden_layers"], hf_config["hidden_size"]
    last = f"model.layers.{depth - 1}."
    names = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj")
    names = names if mimo else ("enorm", "hnorm", "shared_head.norm", "eh_proj")
    generator = torch.Generator().manual_seed(2)
    more = {}
    for i in range(hf_config["num_nextn_predict_layers"]):
        prefix = f"model.mtp_layers.{i}." if mimo else f"model.layers.{depth + i}."
        like = {n.removeprefix(last): t for n, t in tensors.items() if n.startswith(last)}
        like |= {f"{name}.weight": torch.empty(size) for name in names[:3]}
        like[f"{names[3]}.weight"] = torch.empty(size, 2 * size)
        for name, tensor in like.items():
            around = 1.0 if "norm" in name else 0.0
            more[prefix + name] = around + 0.1 * torch.randn(tensor.shape, generator=generator)
        if not mimo:
            more[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            more[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors | more, directory / "model.safetensors", {"format": "pt"})


def sum_loss(logits: Tensor, batch: list[Tensor]) -> Tensor:
    """Returns the cross entropy for each next token (the first follows the last), summed and divided by the step's
    tokens."""
    targets = computed.shift_tokens(batch)
    return cross_entropy(logits, targets, reduction="sum") / BATCH_TOKENS


def train_step(
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    batch: list[Tensor],
    *,
    micro_batches: int = 1,
    **linear: Any,
) -> list[float]:
    """Runs one optimizer step on this rank's part of a batch, through rl_kernel's head. Returns [loss, gradient
    norm]."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    start, size = vocab_range(model)
    total = 0.0
    for part in (batch[i::micro_batches] for i in range(micro_batches)):
        hidden = hidden_of(model, part)
        targets = torch.cat([tokens.roll(-1) for tokens in part]).to(hidden.device)
        log_probs = rl_kernel.linear_logp(
            hidden, output_weight(model), targets, vocab_start=start, vocab_size=size, **linear
        )
        loss = -log_probs.sum() / BATCH_TOKENS
        loss.backward()
        total += loss.item()
    finish_grads(model)
    updated, norm, _ = optimizer.step()
    assert updated
    scheduler.step(increment=8)
    return [total, norm]


def compute_part(
    model, row: Sequence[Tensor], rank: int, ranks: int, vocab: int
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Returns the positions of a rank's tokens in the row, their logits, and all ranks' gradients."""
    lengths = [len(tokens) for tokens in row]
    part = token_slice(lengths, rank=rank, size=ranks)
    group = parallel_state.get_context_parallel_group() if ranks > 1 else None
    tokens = torch.zeros(part.rows, dtype=torch.int64)
    tokens[: len(part.tokens)] = torch.cat(list(row))[part.tokens]
    output = stage_output(model, tokens, packed_layout(part, "cpu", group))
    logits = compute_logits(model, output)[: len(part.tokens), :vocab]
    logits.log_softmax(-1).square().mean(-1).sum().div(sum(lengths)).backward()
    finish_grads(model)
    gradients = {name: p.main_grad.clone() for name, p in unwrap(model).named_parameters()}
    return part.tokens, logits.detach(), gradients
