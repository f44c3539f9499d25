"""Layers that do not keep the outputs of norms and activations: the same bits, less memory, and no storage held too
long."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnBackend
from megatron_cases import hidden_of, make_config, packed_logits, sequences, sum_loss, tiny_checkpoint
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import silu

import rl_kernel
from slime.data.token_slice import token_slice
from slime.megatron_backend.checkpoint.weights import load_hf
from slime.megatron_backend.model import gpt, layers
from slime.megatron_backend.model.attention import packed_layout
from slime.megatron_backend.model.gpt import build_model, unwrap
from slime.megatron_backend.model.layers import GatedMLP, NormedLinear, without_keeping
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.parallel import destroy_parallel, init_parallel

HIDDEN, FFN, LAYERS, LENGTHS = 64, 96, 2, (5, 9, 3, 12)
TOKENS = sum(LENGTHS)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "store"
    init_parallel(0, 1, make_config(), init_method=f"file://{store}", local_rank=0)
    yield
    destroy_parallel()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Callable[[str], Any]:
    root = tmp_path_factory.mktemp("hf")
    for kind in ("qwen3", "qwen2"):
        tiny_checkpoint(root / kind, kind)
    return lambda kind="qwen3": root / kind


def loaded(directory: Any, **values: Any) -> nn.Module:
    model = build_model(load_hf_config(directory), make_config(**values))
    load_hf(model, directory)
    return model


def keeping(make: Callable[[Tensor], Tensor], x: Tensor, product: Callable[[Tensor], Any]) -> Any:
    """Computes a layer without `without_keeping`."""
    return product(make(x))


def layer_step(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Returns output, input gradient and weight gradients of the first layer."""
    inner, layout = unwrap(model), packed_layout(token_slice(list(LENGTHS)), x.device)
    layout.rotary = inner.rotary(layout.positions)
    layer, leaf = inner.decoder.layers[0], x.clone().requires_grad_()
    output, _ = layer(leaf, packed_seq_params=layout)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(7)).to(output)
    return output.detach(), *torch.autograd.grad(output, [leaf, *layer.parameters()], weight)


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_gives_the_same_bits(checkpoint, monkeypatch, kind, dtype):
    model = loaded(checkpoint(kind), params_dtype=dtype)
    x = torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    first, again = layer_step(model, x), layer_step(model, x)
    monkeypatch.setattr(layers, "without_keeping", keeping)
    wanted = layer_step(model, x)
    assert len(wanted) > 7 and all(w.abs().max() > 1e-3 for w in wanted)
    for got, more, want in zip(first, again, wanted, strict=True):
        assert torch.equal(got, want) and torch.equal(more, want)


def backward_of(model: nn.Module) -> Tensor:
    batch = sequences(2)
    sum_loss(packed_logits(model, batch), batch).backward()
    return model.buffers[0].grad_data.clone()


@pytest.mark.parametrize(
    "overrides",
    [
        FULL,
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp", "core_attn"]},
    ],
    ids=lambda o: "-".join(o.get("recompute_modules", ["full"])),
)
def test_recomputation_changes_nothing(checkpoint, monkeypatch, overrides):
    """With full recomputation, layers stay as in Megatron. --recompute-modules layernorm asks for their usual
    behaviour. Inside a recomputed MLP, they do the same while the backward computes it again."""
    model = loaded(checkpoint(), overrides=overrides)
    first = unwrap(model).decoder.layers[0]
    assert first.input_layernorm.deferred is (overrides is not FULL)
    assert not first.recompute_input_layernorm and not first.recompute_pre_mlp_layernorm
    got, plain = backward_of(model), backward_of(loaded(checkpoint()))
    torch.testing.assert_close(got, plain, rtol=0, atol=1e-6)
    # Megatron's recomputation of an MLP sums the residual's gradient in another order.
    assert "mlp" in overrides.get("recompute_modules", ()) or torch.equal(got, plain)
    monkeypatch.setattr(layers, "without_keeping", keeping)
    assert torch.equal(got, backward_of(loaded(checkpoint(), overrides=overrides)))


def test_inputs_of_layers_travel_to_the_host(checkpoint, monkeypatch):
    """The inputs of two layers are copied, and three tensors of the last norm, which torch has on a CPU. The gradients
    have the same bits."""
    wanted = backward_of(loaded(checkpoint(), overrides=FULL))
    copied: list[tuple[int, ...]] = []

    class Counted(save_on_cpu):
        def __init__(self, pin_memory: bool) -> None:
            assert pin_memory
            super().__init__(pin_memory=True)
            pack = self.pack_hook
            self.pack_hook = lambda x: copied.append(tuple(x.shape)) or pack(x)

    monkeypatch.setattr(gpt, "save_on_cpu", Counted)
    got = backward_of(loaded(checkpoint(), overrides=FULL, cpu_offloading=True))
    assert torch.equal(got, wanted)
    assert copied.count((TOKENS, 1, HIDDEN)) == LAYERS + 3
    assert not any(
        HIDDEN in shape and TOKENS not in shape and len(shape) > 1 for shape in copied
    )  # no weights


def kept_bytes(model: nn.Module) -> int:
    """Returns the bytes that the graph of a forward holds, without parameters."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        hidden = hidden_of(model, sequences(2))
    known = {p.untyped_storage()._cdata for p in model.parameters()}
    found = {t.untyped_storage()._cdata: t.untyped_storage().size() for t in saved}
    assert hidden.requires_grad
    return sum(size for storage, size in found.items() if storage not in known)


def test_what_is_not_kept(checkpoint, monkeypatch):
    """A layer drops two norms of H and an activation of F per token, to the byte; full recomputation keeps
    even less."""
    ours = kept_bytes(loaded(checkpoint()))
    recomputed = kept_bytes(loaded(checkpoint(), overrides=FULL))
    monkeypatch.setattr(layers, "without_keeping", keeping)
    assert kept_bytes(loaded(checkpoint())) - ours == LAYERS * TOKENS * (2 * HIDDEN + FFN) * 4
    assert recomputed < ours / 2


def test_without_a_gradient_nothing_is_made_twice(checkpoint, monkeypatch):
    calls = []
    operator = rl_kernel.swiglu
    monkeypatch.setattr(rl_kernel, "swiglu", lambda x: calls.append(x.shape) or operator(x))
    model = loaded(checkpoint())
    with torch.no_grad():
        alone = packed_logits(model, sequences(2))
    assert len(calls) == LAYERS
    logits = packed_logits(model, sequences(2))
    assert torch.equal(alone, logits) and len(calls) == 2 * LAYERS
    logits.sum().backward()
    assert len(calls) == 3 * LAYERS


class Chain:
    """Products one after the other, and the state of the storages between them."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.weights = [torch.randn(8, 8, generator=generator).requires_grad_() for _ in range(count)]
        self.made: list[StorageWeakRef] = []
        self.sizes: list[Callable[[], int]] = []

    def forward(self, x: Tensor, step: Callable[..., Any] = without_keeping) -> Tensor:
        for weight in self.weights:
            x, _ = step(silu, x, lambda made, weight=weight: (self.product(made, weight), None))
        return x.sum()

    def product(self, made: Tensor, weight: Tensor) -> Tensor:
        self.made.append(StorageWeakRef(made.untyped_storage()))
        return made @ weight


def test_each_storage_is_filled_for_its_product_and_dropped_after_it():
    """The loss and the graph's nodes are still alive, but hooks hold no storage that the backward has used."""
    chain, inputs, seen = Chain(4), [], []

    def step(make, x, product):
        inputs.append(StorageWeakRef(x.untyped_storage()))
        return without_keeping(make, x, product)

    loss = chain.forward(torch.randn(5, 8), step)
    for weight in chain.weights:
        weight.register_hook(lambda _: seen.append([storage.expired() for storage in chain.made]))
    loss.backward()
    assert [sum(gone) for gone in seen] == [1, 2, 3, 4]
    assert all(storage.expired() for storage in (*chain.made, *inputs))


def test_a_storage_is_empty_between_forward_and_backward():
    kept: list[Any] = []
    weight = torch.randn(8, 8).requires_grad_()

    def product(made: Tensor) -> tuple[Tensor, None]:
        kept.append(made.untyped_storage())
        return made @ weight, None

    x = torch.randn(5, 8)
    output, _ = without_keeping(silu, x, product)
    assert kept[0].size() == 0
    output.sum().backward()
    assert kept[0].size() == 5 * 8 * 4
    assert torch.equal(weight.grad, silu(x).t() @ torch.ones(5, 8))


def test_two_backwards_through_one_graph():
    chain = Chain(3)
    x = torch.randn(5, 8, requires_grad=True)
    (loss, same), leaves = (
        (chain.forward(x, step) for step in (without_keeping, keeping)),
        [x, *chain.weights],
    )
    wanted = torch.autograd.grad(same, leaves)
    for retain in (True, True, False):
        got = torch.autograd.grad(loss, leaves, retain_graph=retain)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_a_product_gets_its_other_arguments_with_a_deferred_norm_too(checkpoint):
    layer = unwrap(loaded(checkpoint())).decoder.layers[0]
    linear, norm = layer.mlp.linear_fc1, layer.pre_mlp_layernorm
    x = torch.randn(5, 1, HIDDEN)
    other = torch.randn_like(linear.weight)
    wanted = norm.normalise(x) @ other.t()
    for output, _ in (linear(x, other), linear(x, weight=other)):
        torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)


def test_layers_are_made_of_our_modules(checkpoint):
    for layer in unwrap(loaded(checkpoint())).decoder.layers:
        assert isinstance(layer.mlp, GatedMLP)
        assert layer.mlp.linear_fc1.tp_group is parallel_state.get_tensor_model_parallel_group()
        linears = layer.self_attention.linear_qkv, layer.mlp.linear_fc1
        assert all(isinstance(linear, NormedLinear) and linear.norm for linear in linears)
        names = {name for name, _ in layer.named_parameters()}
        assert {"input_layernorm.weight", "pre_mlp_layernorm.weight"} <= names
        assert not any("linear_qkv.norm" in name or "linear_fc1.norm" in name for name in names)


def test_variables_of_transformer_engine_are_neither_read_nor_set(checkpoint, monkeypatch):
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    for backend in ("fused", "flash", "auto"):
        loaded(checkpoint(), overrides={"attention_backend": AttnBackend[backend]})
    assert {name: value for name, value in os.environ.items() if name.startswith("NVTE_")} == {
        "NVTE_FUSED_ATTN": "0"
    }
