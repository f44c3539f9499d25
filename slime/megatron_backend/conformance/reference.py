"""The log-probs and gradients of a checkpoint in transformers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from slime.checkpoints.hf_files import Files
from slime.megatron_backend.conformance.computed import shift_tokens
from slime.models import family_for
from slime.models.decoder import Hf


def load_reference(folder: Path, *, trust_remote_code: bool = False) -> transformers.PreTrainedModel:
    """Returns transformers' model of a checkpoint, in float32 and in the mode of evaluation. Raises ValueError if a
    tensor of the model is not in the files."""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    made_by = next(filter(None, named), transformers.AutoModelForCausalLM)
    model, found = made_by.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",  # other implementations leave out caps of scores
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
    )
    if found["missing_keys"]:
        raise ValueError(
            f"transformers' model must find its tensors in {folder}, got none for {sorted(found['missing_keys'])[:4]}; "
            "write the checkpoint again"
        )
    model.train(False)
    loaded: transformers.PreTrainedModel = model
    return loaded


def compute_reference_logits(model: nn.Module, batch: Iterable[Tensor]) -> Tensor:
    """Returns the logits of sequences, each computed alone, [T, V]."""
    with torch.no_grad():
        return torch.cat([model(tokens[None]).logits[0] for tokens in batch])


def compute_reference_gradients(model: nn.Module, batch: Sequence[Tensor], hf: Hf) -> dict[str, Tensor]:
    """Returns the gradients of the mean of -log p(next token), under the names of the family's weight table. `hf` is
    the config.json of the checkpoint. The parameters of `model` are gradients afterwards."""
    logits = torch.cat([model(tokens[None]).logits[0] for tokens in batch])
    loss = torch.nn.functional.cross_entropy(logits, shift_tokens(batch))
    loss.backward()
    store_gradients(model)
    with tempfile.TemporaryDirectory() as name:
        model.save_pretrained(name)  # type: ignore[operator]  # a method of transformers' models
        return read_table_tensors(Path(name), hf)


def store_gradients(model: nn.Module) -> None:
    """Replaces the parameters of transformers' model by their gradients, so that it saves gradients."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)


def read_table_tensors(folder: Path, hf: Hf) -> dict[str, Tensor]:
    """Returns the tensors of a folder that the trainer of a text run builds, under the names of the weight table of
    the family. `hf` is the config.json."""
    family = family_for(hf)
    opened = family.open(Files(folder), hf)
    names = opened.names()
    others = {*family.prediction_names(names, hf), *family.tower_names(names, hf)}
    return {name: opened.get(name)[...].clone() for name in sorted(names - others)}


def find_frequencies(model: nn.Module) -> dict[str, Tensor]:
    """Returns the frequencies of the rotary embeddings in transformers' model."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")}


def compute_layer_outputs(model: nn.Module, batch: Sequence[Tensor]) -> list[Tensor]:
    """Returns the hidden states [T, H] after the embedding and after each layer but the last."""
    with torch.no_grad():
        found = [model(tokens[None], output_hidden_states=True).hidden_states for tokens in batch]
    return [torch.cat([states[n][0] for states in found]) for n in range(len(found[0]) - 1)]
