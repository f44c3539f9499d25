"""Tests the trainer of a service on a tiny model: losses against float64, tenants in turns against a tenant alone, and
saved states."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from slime.checkpoints.hf_config import read_hf_config
from slime.megatron_backend.tenants import build_trainer
from slime.megatron_backend.tenants.build import choose_micro_batch, count_left_bytes
from slime.megatron_backend.tenants.losses import LOSSES, make_columns
from slime.megatron_backend.tenants.trainer import Trainer
from slime.memory.host import host_total
from slime.plan.memory_estimate import activation_memory, head_memory
from slime.plan.model_shape import Shape
from slime.protocols.tenants import TENANT_LOSSES, AdamParams, LossSpec, PassResult, TenantDatum, TenantSpec
from vime.testing.tiny_model import write_tiny_model

STEP = AdamParams(learning_rate=1e-2)
CROSS_ENTROPY = LossSpec("cross_entropy")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def trainer(base: Path) -> Iterator[Trainer]:
    built = build_trainer(base, 8, 64, device="cpu", micro_batch=48)
    yield built
    built.close()


@pytest.fixture(autouse=True)
def empty(trainer: Trainer) -> Iterator[None]:
    yield
    for name in list(trainer.tenants):
        trainer.remove(name)


def test_later_groups_find_the_rendezvous(trainer: Trainer) -> None:
    """NCCL makes its communicator at the first collective, and gloo at the start. A later group of gloo reads the same
    file."""
    group = dist.new_group(timeout=timedelta(seconds=10))
    dist.barrier(group=group)
    dist.destroy_process_group(group)


def make_data(seed: int, loss: str = "cross_entropy", count: int = 5) -> list[TenantDatum]:
    rng = random.Random(seed)
    data = []
    for _ in range(count):
        size = rng.randint(2, 20)
        inputs: dict[str, list[float]] = {"target_tokens": [rng.randrange(256) for _ in range(size)]}
        if loss == "cross_entropy":
            inputs["weights"] = [rng.choice([0.0, 1.0, 0.5]) for _ in range(size)]
        else:
            inputs["logprobs"] = [-5.5 + 0.3 * rng.gauss(0, 1) for _ in range(size)]
            inputs["advantages"] = [rng.gauss(0, 1) for _ in range(size)]
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = [0.0, *(rng.choice([0.0, 1.0]) for _ in range(size - 2)), 1.0]
        data.append(TenantDatum([rng.randrange(256) for _ in range(size)], inputs))
    return data


def gradients(trainer: Trainer, name: str) -> list[Tensor]:
    found = trainer.tenants[name].gradients
    assert found is not None
    return [x.clone() for x in found]


def values(trainer: Trainer, name: str) -> list[Tensor]:
    return [x.clone() for x in trainer.tenants[name].masters]


def train(trainer: Trainer, name: str, seed: int) -> PassResult:
    """Runs two passes and a step, so that B is not zero and the gradients of A are not zero either."""
    trainer.forward_backward(name, make_data(seed), CROSS_ENTROPY)
    result = trainer.forward_backward(name, make_data(seed + 100), CROSS_ENTROPY)
    trainer.optim_step(name, STEP)
    return result


@pytest.mark.parametrize("loss", TENANT_LOSSES)
def test_losses_have_the_gradients_of_float64(loss: str) -> None:
    settings = {"dro": {"beta": 0.3}, "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}}
    spec = LossSpec(loss, settings.get(loss, {}))  # type: ignore[arg-type]
    data = make_data(1, loss)
    columns = make_columns(data, spec, torch.device("cpu"))
    at = torch.linspace(-6.5, -4.5, len(columns[min(columns)]), dtype=torch.float64, requires_grad=True)
    written = reference_loss(loss, at, {name: x.double() for name, x in columns.items()})
    (expected,) = torch.autograd.grad(written, at)
    mine = at.detach().float().requires_grad_()
    total = LOSSES[loss].compute(mine, columns).sum()
    (found,) = torch.autograd.grad(total, mine)
    assert total.item() == pytest.approx(written.item(), rel=1e-5)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def reference_loss(loss: str, at: Tensor, columns: dict[str, Tensor]) -> Tensor:
    """The formulas of the protocol's documentation, token by token."""
    if loss == "cross_entropy":
        return sum((-w * x for w, x in zip(columns["weights"], at, strict=True)), at.new_zeros(()))
    total = at.new_zeros(())
    if loss == "gspo":
        return sum((reference_gspo(at, columns, n) for n in columns["datum"].unique()), total)
    for x, sampled, advantage in zip(at, columns["logprobs"], columns["advantages"], strict=True):
        ratio = torch.exp(x - sampled)
        if loss == "importance_sampling":
            total = total - ratio * advantage
        elif loss == "ppo":
            total = total - min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        elif loss == "cispo":
            total = total - ratio.detach().clamp(0.8, 1.2) * x * advantage
        else:
            total = total - (x * advantage - 0.5 * 0.3 * (x - sampled) ** 2)
    return total


def reference_gspo(at: Tensor, columns: dict[str, Tensor], number: Tensor) -> Tensor:
    """One datum. The ratio is the geometric mean over the masked tokens, with the gradient of each token's own."""
    rows = (columns["datum"] == number).nonzero().flatten().tolist()
    logs = [(at[i] - columns["logprobs"][i]).item() for i in rows if columns["sequence_ratio_mask"][i]]
    ratio, total = math.exp(sum(logs) / len(logs)), at.new_zeros(())
    for i in rows:
        own = ratio * torch.exp(at[i] - at[i].item())
        advantage = columns["advantages"][i]
        total = total - min(own * advantage, own.clamp(0.9, 1.1) * advantage)
    return total


def test_log_probs_and_gradients_equal_those_of_peft_over_transformers(
    trainer: Trainer, base: Path, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    trainer.add("a", TenantSpec(4, alpha=8.0, seed=3))
    train(trainer, "a", 1)
    trainer.export_peft("a", tmp_path / "a")
    data = make_data(7)
    result = trainer.forward_backward("a", data, CROSS_ENTROPY)
    model = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64), tmp_path / "a", is_trainable=True
    ).double()
    total = torch.zeros((), dtype=torch.float64)
    for datum, output in zip(data, result.outputs, strict=True):
        logits = model(torch.tensor([datum.tokens])).logits[0].log_softmax(-1)
        log_probs = logits.gather(1, torch.tensor(datum.inputs["target_tokens"]).long()[:, None])[:, 0]
        torch.testing.assert_close(
            torch.tensor(output["logprobs"]).double(), log_probs.detach(), rtol=0, atol=2e-5
        )
        total = total - (log_probs * torch.tensor(datum.inputs["weights"])).sum()
    total.backward()
    assert result.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-5)
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
    assert trainer.optim_step("a", STEP)["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_tenants_in_turns_get_the_bits_they_get_alone(trainer: Trainer) -> None:
    specs = {
        "a": TenantSpec(4, seed=1),
        "b": TenantSpec(8, seed=2),
        "c": TenantSpec(2, seed=3, train_attn=False),
    }
    alone: dict[str, tuple[PassResult, list[Tensor], list[Tensor]]] = {}
    for number, (name, spec) in enumerate(specs.items()):
        trainer.add(name, spec)
        train(trainer, name, number)
        result = trainer.forward_backward(name, make_data(number + 50, "ppo"), LossSpec("ppo"))
        alone[name] = result, gradients(trainer, name), values(trainer, name)
        trainer.remove(name)
    for name, spec in specs.items():
        trainer.add(name, spec)
    for seed in (0, 100):
        for number, name in enumerate(specs):
            trainer.forward_backward(name, make_data(number + seed), CROSS_ENTROPY)
    for name in reversed(specs):
        trainer.optim_step(name, STEP)
    for number, name in enumerate(specs):
        result = trainer.forward_backward(name, make_data(number + 50, "ppo"), LossSpec("ppo"))
        expected, of_gradients, of_values = alone[name]
        assert result == expected
        assert all(map(torch.equal, gradients(trainer, name), of_gradients))
        assert all(map(torch.equal, values(trainer, name), of_values))
        assert sum(x.abs().sum().item() for x in of_gradients) > 0


def test_a_saved_state_continues_with_the_same_bits(trainer: Trainer, tmp_path: Path) -> None:
    trainer.add("a", TenantSpec(4, seed=1))
    train(trainer, "a", 1)
    trainer.save_state("a", tmp_path / "state", optimizer=True)
    train(trainer, "a", 2)
    expected = values(trainer, "a")
    trainer.add("b", TenantSpec(4, seed=9))
    trainer.load_state("b", tmp_path / "state", optimizer=True)
    train(trainer, "b", 2)
    assert all(map(torch.equal, values(trainer, "b"), expected))
    trainer.load_state("b", tmp_path / "state", optimizer=False)
    train(trainer, "b", 2)
    assert not all(map(torch.equal, values(trainer, "b"), expected))
    trainer.add("c", TenantSpec(8))
    with pytest.raises(ValueError, match="must have rank 8 as this one has, got 4"):
        trainer.load_state("c", tmp_path / "state", optimizer=True)


def test_only_the_chosen_modules_have_adapters(trainer: Trainer) -> None:
    trainer.add("a", TenantSpec(2, train_mlp=False))
    trainer.add("b", TenantSpec(2, train_attn=False))
    assert all("attn" in name or "attention" in name for name in trainer.tenants["a"].names)
    assert all("mlp" in name for name in trainer.tenants["b"].names)


def test_the_base_does_not_change(trainer: Trainer) -> None:
    model: nn.Module = trainer.model
    before = [p.clone() for name, p in model.named_parameters() if "adapters" not in name]
    trainer.add("a", TenantSpec(4, seed=1))
    train(trainer, "a", 1)
    after = [p for name, p in model.named_parameters() if "adapters" not in name]
    assert all(map(torch.equal, before, after))
    assert not any(p.requires_grad for p in after)


def test_adam_follows_its_definition(trainer: Trainer) -> None:
    trainer.add("a", TenantSpec(4, seed=1))
    trainer.forward_backward("a", make_data(1), CROSS_ENTROPY)
    before, found = values(trainer, "a"), gradients(trainer, "a")
    norm = torch.stack([x.double().norm() for x in found]).norm().item()
    params = AdamParams(3e-3, 0.8, 0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=norm / 2)
    metrics = trainer.optim_step("a", params)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    for old, gradient, new in zip(before, found, values(trainer, "a"), strict=True):
        clipped = gradient / 2
        expected = old * (1 - 3e-3 * 0.1) - 3e-3 * clipped / (clipped.abs() + 1e-6)
        torch.testing.assert_close(new, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_tokens": [1]}, "one value of target_tokens per token, got 1 for 3 tokens"),
        ({"target_tokens": [1, 2, 999]}, "target_tokens from 0 to 258, got 1 to 999"),
        ({"weights": [1.0, float("nan"), 1.0]}, "finite values of weights"),
        (
            {"advantages": [1.0, 1.0, 1.0]},
            "only inputs of cross_entropy, target_tokens, weights, got advantages",
        ),
    ],
)
def test_bad_data_change_nothing(trainer: Trainer, change: dict[str, list[float]], message: str) -> None:
    trainer.add("a", TenantSpec(4, seed=1))
    good = TenantDatum([1, 2, 3], {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]})
    bad = replace(good, inputs={**good.inputs, **change})
    with pytest.raises(ValueError, match=message):
        trainer.forward_backward("a", [good, bad], CROSS_ENTROPY)
    assert trainer.tenants["a"].gradients is None


def test_bad_requests_are_errors(trainer: Trainer) -> None:
    with pytest.raises(ValueError, match="rank must be 1 to 8, the largest of this service, got 9"):
        trainer.add("a", TenantSpec(9))
    with pytest.raises(ValueError, match="must train attention or MLP, got neither"):
        trainer.add("a", TenantSpec(4, train_attn=False, train_mlp=False))
    with pytest.raises(ValueError, match="the adapter must exist, got z"):
        trainer.optim_step("z", STEP)
    trainer.add("a", TenantSpec(4))
    with pytest.raises(ValueError, match="names must be unique, got a twice"):
        trainer.add("a", TenantSpec(4))
    with pytest.raises(ValueError, match="datum 0 must have 1 to 64 tokens, got 65"):
        trainer.forward("a", [TenantDatum([1] * 65, {"target_tokens": [1] * 65})], CROSS_ENTROPY)
    with pytest.raises(ValueError, match="datum 0 must have logprobs for ppo, got target_tokens"):
        trainer.forward("a", [TenantDatum([1], {"target_tokens": [1]})], LossSpec("ppo"))
    with pytest.raises(ValueError, match="ppo must have only the settings it reads"):
        trainer.forward("a", make_data(1, "ppo"), LossSpec("ppo", {"beta": 1.0}))
    with pytest.raises(ValueError, match="datum 0 must have a token in sequence_ratio_mask, got only zeros"):
        zeros = [
            replace(x, inputs={**x.inputs, "sequence_ratio_mask": [0.0] * len(x.tokens)})
            for x in make_data(1, "ppo")
        ]
        trainer.forward("a", zeros, LossSpec("gspo"))
    with pytest.raises(ValueError, match="a pass must have data, got none"):
        trainer.forward("a", [], CROSS_ENTROPY)


def test_micro_batches_use_half_of_the_memory_left(trainer: Trainer, base: Path) -> None:
    """The choice changes where the estimate of a size is half of the bytes left. Without them, it is the least."""
    config, shape = trainer.config, Shape.of(read_hf_config(base))
    for tokens, smaller in ((8192, 4096), (1024, 512)):
        needed = activation_memory(config, shape, tokens)[0].bytes + head_memory(config, shape, tokens)[0]
        assert choose_micro_batch(config, shape, 2 * needed) == tokens
        assert choose_micro_batch(config, shape, 2 * needed - 1) == smaller
    assert choose_micro_batch(config, shape, 0.0) == choose_micro_batch(config, shape, None) == 512
    total, left = host_total(), count_left_bytes(trainer.model, trainer.info, 0.4)
    assert total is not None and left is not None
    parameters = [p for name, p in trainer.model.named_parameters() if "adapters" not in name]
    assert total - left == 2 * sum(p.numel() for p in parameters) * 4
    assert trainer.config.data.max_tokens_per_gpu == 48


def test_a_switch_copies_no_values(trainer: Trainer) -> None:
    for name in ("a", "b"):
        trainer.add(name, TenantSpec(4))
        train(trainer, name, 1)
    memory = {name: [p.data_ptr() for p in trainer.tenants[name].parameters] for name in ("a", "b")}
    for name in ("a", "b", "a"):
        trainer.activate(trainer.tenants[name])
        active = [p.data_ptr() for p in trainer.inner.adapters.parameters()]
        assert active == memory[name]
    assert set(memory["a"]).isdisjoint(memory["b"])


def test_the_bytes_of_a_tenant_are_values_copies_and_moments(trainer: Trainer) -> None:
    trainer.add("a", TenantSpec(4))
    tenant = trainer.tenants["a"]
    count = sum(p.numel() for p in tenant.parameters)
    assert tenant.count_bytes() == count * (4 + 4)
    trainer.forward_backward("a", make_data(1), CROSS_ENTROPY)
    assert tenant.count_bytes() == count * (4 + 4 + 4)
    trainer.optim_step("a", STEP)
    steps = 4 * len(tenant.parameters)
    assert tenant.count_bytes() == count * (4 + 4 + 8) + steps
