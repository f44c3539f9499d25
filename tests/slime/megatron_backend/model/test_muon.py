"""Tests --optimizer muon: torch's Muon and AdamW are the references, and torch's matrix products for a split matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from config_cases import good_argv
from megatron_cases import make_config, sequences, sum_loss, tiny_checkpoint, train_step

from slime.megatron_backend.checkpoint.distributed import load_checkpoint, save_checkpoint
from slime.megatron_backend.checkpoint.weights import export_hf, load_hf
from slime.megatron_backend.model.gpt import build_model
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.model.muon import Matrix, Muon, MuonSettings, orthogonalize
from slime.megatron_backend.model.optimizer import build_optimizer, reset_states
from slime.rules import parse_args

# torch's Muon repeats one set of coefficients, in bfloat16, and scales a rate by 0.2 sqrt(max(rows, columns)).
AS_TORCH = {"muon_coefficient_type": "simple", "muon_extra_scale_factor": 0.2, "muon_split_qkv": False}
PLAIN = MuonSettings(0.95, False, 5, "spectral", 1.0, "highest", "quintic", False, False)
FLAGS: dict[str, Any] = {
    "optimizer": "muon",
    "use_distributed_optimizer": False,
    "lr": 1e-3,
    "weight_decay": 0.1,
}
MUON = {"muon_fp32_matmul_prec": "highest", "muon_tp_mode": "duplicated"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hf")
    return directory, tiny_checkpoint(directory)


def trainer(directory, *, muon=MUON, **values):
    config = make_config(**FLAGS | {"overrides": muon} | values)
    model = build_model(load_hf_config(directory), config)
    load_hf(model, directory)
    return model, *build_optimizer(model, config, total_steps=10)


def inner(parts) -> Muon:
    (only,) = parts[1].chained_optimizers
    assert isinstance(only.optimizer, Muon)
    return only.optimizer


@pytest.mark.parametrize("shape", [(12, 12), (8, 32), (48, 16)])
def test_singular_values_come_near_one_and_vectors_stay(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    made = orthogonalize(x, PLAIN)
    of_made = u.mT @ made @ v.mT
    torch.testing.assert_close(of_made, torch.diag(of_made.diag()), atol=1e-3, rtol=0)
    assert of_made.diag().min() > 0.6 and of_made.diag().max() < 1.3


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("nesterov", [False, True])
def test_updates_are_those_of_torchs_muon(nesterov):
    """The matrices of one group, over three steps with other gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 8), (24, 8), (8, 24)]
    ours = [torch.randn(shape, generator=generator) for shape in shapes]
    theirs = [torch.nn.Parameter(weight.clone()) for weight in ours]
    settings = MuonSettings(0.95, nesterov, 5, "spectral", 0.2, "medium", "simple", False, False)
    groups = [{"params": ours, "lr": 0.02, "weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}]
    muon = Muon(groups, {weight: Matrix() for weight in ours}, settings)
    reference = torch.optim.Muon(
        theirs, lr=0.02, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(3):
        for weight, other in zip(ours, theirs, strict=True):
            weight.grad = torch.randn(weight.shape, generator=generator)
            other.grad = weight.grad.clone()
        muon.step()
        reference.step()
    for weight, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(weight, other.detach(), rtol=0, atol=1e-3)


@pytest.mark.usefixtures("single_rank")
def test_steps_of_a_model_equal_torchs_muon_and_adamw(checkpoint, tmp_path):
    """Fused q, k and v, and the two halves of an MLP, are one matrix in Megatron: the reference joins them."""
    directory, _ = checkpoint
    trained = trainer(directory, clip_grad=0.0, muon={"muon_split_qkv": True, **MUON})
    hf = tiny_checkpoint(tmp_path)
    matrices = {name for name, p in hf.named_parameters() if p.dim() == 2 and "embed" not in name}
    others = [p for name, p in hf.named_parameters() if name not in matrices]
    vectors, tables = [p for p in others if p.dim() == 1], [p for p in others if p.dim() == 2]
    adam = torch.optim.AdamW(
        [{"params": tables, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1e-3
    )
    moving = {name: torch.zeros_like(p) for name, p in hf.named_parameters() if name in matrices}
    for step in range(2):
        batch = sequences(step)
        train_step(*trained, batch)
        hf.zero_grad()
        sum_loss(torch.cat([hf(tokens[None]).logits[0] for tokens in batch]), batch).backward()
        adam.step()
        weights = dict(hf.named_parameters())
        with torch.no_grad():
            for name in matrices:
                moving[name].lerp_(weights[name].grad, 0.05)
            for name in matrices:
                if "up_proj" in name:
                    continue
                names = [name, name.replace("gate_proj", "up_proj")] if "gate_proj" in name else [name]
                whole = torch.cat([moving[n] for n in names])
                update = orthogonalize(whole, PLAIN) * max(whole.shape) ** 0.5
                for n, part in zip(names, update.chunk(len(names)), strict=True):
                    weights[n].mul_(1 - 1e-3 * 0.1).add_(part, alpha=-1e-3)
    wanted = dict(hf.named_parameters())
    for name, tensor in export_hf(trained[0]):
        torch.testing.assert_close(tensor, wanted[name].data, rtol=0, atol=1e-4, msg=name)


def test_loaded_state_is_on_the_device_of_its_weight():
    """The device of meta tensors takes the place of a GPU."""

    def make(device):
        weights = [torch.zeros(shape, device=device) for shape in ((4, 4), (4,))]
        settings = {"lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.99), "eps": 1e-8}
        return Muon([{"params": weights, **settings}], {weights[0]: Matrix()}, PLAIN)

    loaded = make("meta")
    loaded.load_state_dict(make("cpu").state_dict())
    states = list(loaded.state.values())
    assert [sorted(state) for state in states] == [["momentum_buffer"], ["exp_avg", "exp_avg_sq", "step"]]
    assert all(value.is_meta for state in states for value in state.values())


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_resumes_to_the_last_bit(checkpoint, tmp_path, dtype):
    directory = checkpoint[0]
    whole = trainer(directory, params_dtype=dtype)
    expected = [train_step(*whole, sequences(step)) for step in range(4)]
    first = trainer(directory, params_dtype=dtype)
    got = [train_step(*first, sequences(step)) for step in range(2)]
    save_checkpoint(tmp_path, 2, *first)
    resumed = trainer(directory, params_dtype=dtype)
    load_checkpoint(tmp_path, *resumed)
    got += [train_step(*resumed, sequences(step)) for step in (2, 3)]
    assert got == expected
    wanted = dict(export_hf(whole[0]))
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in export_hf(resumed[0]))
    save_checkpoint(tmp_path, 4, *resumed)  # the state of a resumed run can be saved again
    reset_states(resumed[1])
    assert not any(value.any() for state in inner(resumed).state.values() for value in state.values())
    with pytest.raises(ValueError, match="must hold the tensors of this model and optimizer"):
        other = trainer(directory, params_dtype=dtype, optimizer="adam", muon={})
        load_checkpoint(tmp_path, *other)


@pytest.mark.usefixtures("single_rank")
def test_each_expert_and_no_embedding_is_a_matrix(tmp_path):
    tiny_checkpoint(tmp_path, "qwen3_moe")
    optimizer = inner(trainer(tmp_path))
    sizes = {"momentum_buffer": 0, "exp_avg": 0}
    for weight, state in optimizer.state.items():
        kind = "momentum_buffer" if "momentum_buffer" in state else "exp_avg"
        sizes[kind] += 1
        assert (kind == "momentum_buffer") <= (weight.dim() == 2 and min(weight.shape) > 1)
    experts = sum("experts" in name for name, _ in trainer(tmp_path)[0].named_parameters())
    assert sizes["momentum_buffer"] > experts > 0 and sizes["exp_avg"] > 0


MUST = "must be left out with --optimizer muon, got it; Muon needs whole matrices"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--use-distributed-optimizer", f"--use-distributed-optimizer {MUST}"),
        ("--optimizer-cpu-offload", f"--optimizer-cpu-offload {MUST}"),
        (
            "--muon-scale-mode fast",
            "--muon-scale-mode must be one of spectral, shape_scaling, unit_rms_norm, got f",
        ),
        ("--muon-tp-mode none", "--muon-tp-mode must be one of blockwise, duplicated, distributed, got none"),
        ("--muon-num-ns-steps 0", "--muon-num-ns-steps must be"),
    ],
)
def test_combinations_without_muon_end_in_one_line(tmp_path, flags, message):
    with pytest.raises(ValueError) as error:
        parse_args([*good_argv(tmp_path), "--optimizer", "muon", *flags.split()])
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_flags_of_muon(tmp_path):
    argv = good_argv(tmp_path)
    config = parse_args([*argv, "--optimizer", "dist_muon", "--muon-tp-mode", "distributed"])
    assert config.megatron.optimizer == "muon" and not config.megatron.use_distributed_optimizer
    assert [note.split(":")[0] for note in config.notes] == [
        "--optimizer dist_muon is taken as muon",
        "--muon-tp-mode distributed is taken as duplicated, which gives the same update",
    ]
    (note,) = parse_args([*argv, "--muon-momentum", "0.9"]).notes
    assert note == "--muon-momentum has no effect without --optimizer muon: it is read only there"
