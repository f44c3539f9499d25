"""Compares multi-token prediction on tiny models with plain PyTorch: loss, gradients, weights, and the unchanged
policy."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import VOCAB, become_gradients, hf_gradients, make_config, tiny_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from slime import operators
from slime.checkpoints.hf_config import read_hf_config
from slime.config.sections.kernels import KernelsConfig
from slime.data.ahead import look_ahead, unshared
from slime.data.packing import MicroBatch, pack
from slime.megatron_backend.checkpoint.weights import export_hf, load_hf, save_hf
from slime.megatron_backend.model.attention import packed_layout
from slime.megatron_backend.model.gpt import build_model, stage_output, unwrap
from slime.megatron_backend.parallel import ParallelInfo, destroy_parallel, init_parallel
from slime.megatron_backend.step.heads import lm_head
from slime.megatron_backend.step.prediction import Predictions

FACTOR = 0.3
LENGTHS = [(9, 5), (7, 6), (12, 5), (2, 1), (8, 5)]
"""(tokens, response tokens) per sample. The second and the fourth sample have a single prompt token. The fourth has a
single response token, which no layer predicts."""

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "mimo": ("mimo", {"num_nextn_predict_layers": 1}),
    "mimo-two": ("mimo", {"num_nextn_predict_layers": 2}),
    "glm4-moe": (
        "glm4_moe",
        {"num_nextn_predict_layers": 1, "first_k_dense_replace": 1, "use_qk_norm": True},
    ),
    "deepseek": ("deepseek_v3", {"num_nextn_predict_layers": 1}),
    "glm4-moe-lite": ("glm4_moe_lite", {"num_nextn_predict_layers": 1}),
    "deepseek-v32": ("deepseek_v32", {"num_nextn_predict_layers": 1}),
    "glm-5": ("glm_moe_dsa", {"num_nextn_predict_layers": 1}),
}


@pytest.fixture(scope="module", autouse=True)
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    yield init_parallel(0, 1, make_config(), init_method=f"file://{tmp_path_factory.mktemp('init')}/store")
    destroy_parallel()


@pytest.fixture(scope="module", params=SHAPES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    kind, shape = SHAPES[request.param]
    directory = tmp_path_factory.mktemp("hf")
    return directory, tiny_checkpoint(directory, kind, tie_word_embeddings=False, **shape)


def micro_batch(share: bool) -> tuple[dict[str, list[Any]], MicroBatch]:
    """Returns a micro-batch whose samples 0 and 2, and 4 too with `share`, have the same prompt. Masks have gaps,
    denominators differ."""
    generator = torch.Generator().manual_seed(4)
    tokens = [torch.randint(0, VOCAB, (n,), generator=generator) for n, _ in LENGTHS]
    if share:
        tokens[2] = torch.cat([tokens[0][:4], tokens[2][7:]])
        tokens[4] = torch.cat([tokens[0][:4], tokens[4][3:]])
    responses = [n for _, n in LENGTHS]
    data = {
        "tokens": tokens,
        "response_lengths": responses,
        "loss_masks": [(torch.rand(n, generator=generator) < 0.8).int() for n in responses],
        "loss_denominators": [torch.full((n,), 3.0 + i) for i, n in enumerate(responses)],
    }
    columns = ["loss_masks", "loss_denominators"]
    return data, pack(data, list(range(5)), columns, device="cpu", share_prompts=share)  # type: ignore[arg-type]


def loaded(directory: Path, **config: Any) -> nn.Module:
    model = build_model(read_hf_config(directory), make_config(**config), predicts=True)
    load_hf(model, directory)
    return model


def our_loss(model: nn.Module, ranks: ParallelInfo, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (the decoder's output, loss, metric)."""
    output = stage_output(model, batch.tokens, packed_layout(batch.part, "cpu"))
    head = lm_head(
        operators.ONE_PASS, model, ranks, KernelsConfig(rl_kernel_workspace_mib=1), temperature=0.7
    )
    return output, *Predictions(head, FACTOR).loss(batch, output)


class Reference:
    """The layers of a checkpoint in plain PyTorch: decoder layers of a deeper transformers model, norms and products.
    `leaves`: the other tensors, by their names in files."""

    def __init__(self, directory: Path, hf: nn.Module, work: Path) -> None:
        self.hf, self.config = hf, read_hf_config(directory)
        depth, self.mimo = self.config["num_hidden_layers"], self.config["model_type"] == "mimo"
        self.prefixes = [
            f"model.mtp_layers.{i}." if self.mimo else f"model.layers.{depth + i}."
            for i in range(self.config["num_nextn_predict_layers"])
        ]
        self.deeper = {p: f"model.layers.{depth + i}." for i, p in enumerate(self.prefixes)}
        names = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj")
        self.names = names if self.mimo else ("enorm", "hnorm", "shared_head.norm", "eh_proj")
        stored = load_file(directory / "model.safetensors")
        self.leaves = {
            f"{p}{n}.weight": stored[f"{p}{n}.weight"].requires_grad_()
            for p in self.prefixes
            for n in self.names
        }
        config = copy.deepcopy(hf.config)
        config.num_hidden_layers += len(self.prefixes)
        for name in ("layer_types", "mlp_layer_types", "indexer_types"):
            if (kinds := getattr(config, name, None)) is not None:
                setattr(config, name, [*kinds, *kinds[-1:] * len(self.prefixes)])
        config.save_pretrained(work)
        own = (*self.names, "embed_tokens", "shared_head")
        tensors = {
            self.renamed(name, self.deeper): x.detach().clone()
            for name, x in stored.items()
            if not (name.startswith(tuple(self.prefixes)) and name.split(".")[3].startswith(own))
        }
        save_file(tensors, work / "model.safetensors", {"format": "pt"})
        self.deep, found = type(hf).from_pretrained(work, config=config, output_loading_info=True)
        assert not any(found.values()), found
        self.layers = self.deep.model.layers[depth:]

    @staticmethod
    def renamed(name: str, prefixes: dict[str, str]) -> str:
        start = next((p for p in prefixes if name.startswith(p)), "")
        return prefixes.get(start, "") + name.removeprefix(start)

    def gradients(self, work: Path) -> dict[str, Tensor]:
        """Returns gradients by their names in files."""
        back = {deeper: p for p, deeper in self.deeper.items()}
        found = {
            self.renamed(name, back): x
            for name, x in hf_gradients(self.deep, work).items()
            if name.startswith(tuple(back)) and not name.endswith("e_score_correction_bias")
        }
        return found | {name: x.grad for name, x in self.leaves.items() if x.grad is not None}

    def metric(self, data: dict[str, list[Any]]) -> Tensor:
        """Computes the metric sample by sample, from full logits."""
        total = torch.zeros(())
        for i, (tokens, responses) in enumerate(zip(data["tokens"], data["response_lengths"], strict=True)):
            with torch.no_grad():
                state = self.hf.model(tokens[None]).last_hidden_state
            for k, prefix in enumerate(self.prefixes, 1):
                state = self.next_state(state, tokens, k, prefix)
                log_probs = (state[0] @ self.hf.lm_head.weight.detach().T).log_softmax(-1)
                for j in range(responses):
                    place = len(tokens) - responses + j
                    if place - k - 1 >= 0:
                        weight = data["loss_masks"][i][j] / data["loss_denominators"][i][j]
                        total = total - weight * log_probs[place - k - 1, tokens[place]]
        return total / len(self.prefixes)

    def next_state(self, state: Tensor, tokens: Tensor, k: int, prefix: str) -> Tensor:
        size, eps = state.shape[-1:], self.config["rms_norm_eps"]
        embedding_norm, state_norm, last_norm, product = (
            self.leaves[f"{prefix}{n}.weight"] for n in self.names
        )
        ahead = torch.cat([tokens[k:], torch.zeros(min(k, len(tokens)), dtype=torch.int64)])
        embedded = self.hf.model.embed_tokens(ahead[None]).detach()
        pair = rms_norm(embedded, size, embedding_norm, eps), rms_norm(state, size, state_norm, eps)
        x = torch.cat(pair[::-1] if self.mimo else pair, -1) @ product.T
        positions = torch.arange(len(tokens))[None]
        out = self.layers[k - 1](
            x,
            attention_mask=torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None],
            position_embeddings=self.hf.model.rotary_emb(x, positions),
            position_ids=positions,
        )
        return rms_norm(out[0] if isinstance(out, tuple) else out, size, last_norm, eps)


@pytest.mark.parametrize("share", [False, True])
def test_loss_and_gradients(
    tiny: tuple[Path, nn.Module], ranks: ParallelInfo, share: bool, tmp_path: Path
) -> None:
    directory, hf = tiny
    data, batch = micro_batch(share)
    assert batch.part.shares == share
    model = loaded(directory)
    _, loss, metric = our_loss(model, ranks, batch)
    plain = Reference(directory, hf, tmp_path)
    wanted = plain.metric(data)
    torch.testing.assert_close(metric, wanted.detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(loss.detach(), FACTOR * metric, rtol=1e-6, atol=0)
    loss.backward()
    (FACTOR * wanted).backward()
    expected = plain.gradients(tmp_path / "gradients")
    become_gradients(model)
    got = {n: x for n, x in export_hf(model) if not n.endswith("e_score_correction_bias")}
    assert expected.keys() == {name for name in got if name.startswith(tuple(plain.prefixes))}
    for name, gradient in got.items():
        if name in expected:
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)
            assert gradient.any() or ".experts." in name or ".indexer." in name, name
        else:
            assert not gradient.any(), name


@pytest.mark.parametrize("depth", [1, 2])
def test_no_prediction_crosses_a_border(depth: int) -> None:
    """Every token that a row reads or predicts belongs to the row's own sample."""
    _, batch = micro_batch(share=True)
    part = unshared(batch.part, 1)
    ahead = look_ahead(batch, part, depth)
    lengths = batch.part.lengths
    sample = torch.arange(5).repeat_interleave(torch.tensor(lengths))
    place = part.tokens
    inside = [t for t in range(len(sample)) if t + depth < len(sample) and sample[t + depth] == sample[t]]
    assert ahead.tokens[place[inside]].tolist() == [int(batch.packed[t + depth]) for t in inside]
    assert not ahead.tokens[[t for t in range(len(sample)) if t not in inside]].any()
    wanted = [
        (t, int(batch.packed[t + depth + 1]))
        for s, (length, (_, response)) in enumerate(zip(lengths, LENGTHS, strict=True))
        for t in (sample == s).nonzero()[:, 0].tolist()
        if t + depth + 1 - int((sample < s).sum()) in range(length - response, length)
    ]
    assert list(zip(ahead.rows.tolist(), ahead.targets.tolist(), strict=True)) == wanted


def test_weights_return_with_the_same_bits(tiny: tuple[Path, nn.Module], tmp_path: Path) -> None:
    """The prediction layers keep their bits too. The copies of embedding and head in GLM's files follow the model."""
    directory, _ = tiny
    original = load_file(directory / "model.safetensors")
    model = loaded(directory)
    save_hf(model, directory, tmp_path / "same")
    written = load_file(tmp_path / "same" / "model.safetensors")
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], original[name]) for name in original)
    with torch.no_grad():
        for parameter in unwrap(model).parameters():
            parameter.add_(1.0)
    save_hf(model, directory, tmp_path / "moved")
    moved = load_file(tmp_path / "moved" / "model.safetensors")
    for name, tensor in original.items():
        assert name.endswith("e_score_correction_bias") or torch.equal(moved[name], tensor + 1.0), name
    for copy_, source in (
        (".embed_tokens.weight", "model.embed_tokens.weight"),
        ("head.weight", "lm_head.weight"),
    ):
        assert all(torch.equal(x, moved[source]) for name, x in moved.items() if name.endswith(copy_))


def test_a_missing_tensor_of_a_trained_layer_is_named(tiny: tuple[Path, nn.Module], tmp_path: Path) -> None:
    directory, _ = tiny
    tensors = load_file(directory / "model.safetensors")
    (name,) = [n for n in tensors if n.endswith(("mtp_layers.0.input_proj.weight", "eh_proj.weight"))]
    shutil.copy(directory / "config.json", tmp_path)
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"1 missing from .*: {name}"):
        loaded(tmp_path)
