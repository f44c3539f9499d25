"""Tests optimizer and schedule: torch's AdamW is the reference for the update, hand-computed rates for the schedule."""

from __future__ import annotations

import math

import pytest
import torch
from megatron.core.optimizer import clip_grads
from megatron_cases import make_config, packed_logits, sequences, sum_loss, tiny_checkpoint, train_step

from slime import bridges
from slime.bridges.megatron import GRADIENT_NORM
from slime.megatron_backend.checkpoint.weights import export_hf, load_hf
from slime.megatron_backend.model.gpt import build_model
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.model.optimizer import build_optimizer, norm_at_once

pytestmark = pytest.mark.usefixtures("single_rank")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hf")
    return directory, tiny_checkpoint(directory)


def trainer(directory, **config):
    config = make_config(**config)
    model = build_model(load_hf_config(directory), config)
    load_hf(model, directory)
    return model, *build_optimizer(model, config, total_steps=10)


@pytest.mark.parametrize("distributed", [True, False])
def test_two_steps_equal_torch_adamw(checkpoint, distributed, tmp_path):
    """Gradients are clipped to norm 0.5, and only matrices have weight decay. The two libraries must agree."""
    settings = {"lr": 1e-3, "weight_decay": 0.1, "clip_grad": 0.5, "adam_beta2": 0.95}
    directory, _ = checkpoint
    model, optimizer, scheduler = trainer(directory, use_distributed_optimizer=distributed, **settings)
    hf = tiny_checkpoint(tmp_path)
    matrices = [p for p in hf.parameters() if p.dim() > 1]
    vectors = [p for p in hf.parameters() if p.dim() == 1]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.95),
    )
    for step in range(2):
        batch = sequences(step)
        loss, norm = train_step(model, optimizer, scheduler, batch)
        reference.zero_grad()
        expected = sum_loss(torch.cat([hf(tokens[None]).logits[0] for tokens in batch]), batch)
        expected.backward()
        expected_norm = torch.nn.utils.clip_grad_norm_(hf.parameters(), 0.5)
        reference.step()
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        assert norm == pytest.approx(expected_norm.item(), rel=1e-4)
        assert norm > 0.5  # the gradient was clipped
    wanted = dict(hf.named_parameters())
    for name, tensor in export_hf(model):
        # Adam divides by the root of tiny second moments: single entries may differ by a fraction of the rate.
        torch.testing.assert_close(tensor, wanted[name].data, rtol=0, atol=2e-5, msg=name)


def test_the_norm_of_all_gradients_is_one_call(checkpoint):
    """Megatron's own function waits for each weight on a GPU. A function of Transformer Engine is kept."""
    trainer(checkpoint[0])
    assert bridges.is_applied(GRADIENT_NORM)
    gradients = [torch.randn(n, 3) for n in (1, 40, 7)]
    norm, _ = clip_grads.l2_norm_impl(65536, torch.zeros(1), [gradients], False)
    torch.testing.assert_close(norm, torch.cat(gradients).norm()[None])
    rounded = [gradient.bfloat16() for gradient in gradients]
    norm, _ = clip_grads.l2_norm_impl(65536, torch.zeros(1), [rounded], False)
    torch.testing.assert_close(
        norm, torch.cat(rounded).float().norm()[None]
    )  # the sum is not rounded to bfloat16
    assert norm_at_once(theirs := lambda *call: None) is theirs


def test_bfloat16_keeps_fp32_masters(checkpoint):
    """Steps with a rate below bf16's resolution still add up."""
    directory, _ = checkpoint
    model, optimizer, scheduler = trainer(directory, params_dtype="bfloat16", lr=1e-5, clip_grad=0.0)
    (only,) = optimizer.chained_optimizers
    masters = [group["params"] for group in only.optimizer.param_groups]
    assert {p.dtype for group in masters for p in group} == {torch.float32}
    before = torch.cat([p.detach().flatten().clone() for group in masters for p in group])
    for _ in range(3):
        train_step(model, optimizer, scheduler, sequences(0))
    after = torch.cat([p.detach().flatten() for group in masters for p in group])
    assert 2e-5 < (after - before).abs().max() < 4e-5


def rates(directory, steps, **config):
    _, optimizer, scheduler = trainer(directory, lr=1.0, **config)
    out = []
    for _ in range(steps):
        out.append(optimizer.param_groups[0]["lr"])
        scheduler.step(increment=8)
    return out


def test_schedule_counts_batches(checkpoint):
    directory, _ = checkpoint
    assert rates(directory, 3) == [1.0, 1.0, 1.0]
    assert rates(directory, 4, lr_warmup_iters=2) == [0.0, 0.5, 1.0, 1.0]
    assert rates(directory, 6, lr_warmup_fraction=0.4) == [
        0.0,
        0.25,
        0.5,
        0.75,
        1.0,
        1.0,
    ]  # total_steps is 10
    assert rates(directory, 4, lr_warmup_iters=2, lr_warmup_init=0.5) == [0.5, 0.75, 1.0, 1.0]
    linear = rates(directory, 6, lr_decay_style="linear", lr_decay_iters=4, min_lr=0.2)
    assert linear == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = rates(directory, 11, lr_decay_style="cosine")  # over total_steps = 10
    assert cosine == pytest.approx([0.5 * (1 + math.cos(math.pi * k / 10)) for k in range(11)], abs=1e-12)


R2, C1, C3 = 2**-0.5, 0.5 * (1 + math.cos(math.pi / 4)), 0.5 * (1 + math.cos(3 * math.pi / 4))
SCHEDULES = {
    # The rates are those before steps 0, 2, 4, 6 and 8 of ten: a warm-up of 2 steps to 1, then 8 steps down to 0.2.
    "constant": [0.0, 1.0, 1.0, 1.0, 1.0],
    "linear": [0.0, 1.0, 0.8, 0.6, 0.4],
    "cosine": [0.0, 1.0, 0.2 + 0.8 * C1, 0.6, 0.2 + 0.8 * C3],
    # sqrt(warm-up / samples so far)
    "inverse-square-root": [0.0, 1.0, R2, (2 / 6) ** 0.5, 0.5],
}
WSD = {
    # The rate falls in the last 4 steps, and two of the 4 are over before step 8.
    "linear": [0.0, 1.0, 1.0, 1.0, 0.6],
    "cosine": [0.0, 1.0, 1.0, 1.0, 0.6],
    "exponential": [0.0, 1.0, 1.0, 1.0, 0.2 + 0.8 * (2 * R2 - 1)],
    "minus_sqrt": [0.0, 1.0, 1.0, 1.0, 0.2 + 0.8 * (1 - R2)],
}


def test_schedules_by_hand(checkpoint):
    flags = {"lr_warmup_iters": 2, "min_lr": 0.2}
    for style, wanted in SCHEDULES.items():
        got = rates(checkpoint[0], 11, lr_decay_style=style, **flags)
        assert got[:10:2] == pytest.approx(wanted, abs=1e-12), style
        end = {"constant": 1.0, "inverse-square-root": (2 / 10) ** 0.5}
        assert got[10] == pytest.approx(end.get(style, 0.2))
    for style, wanted in WSD.items():
        wsd = {"lr_decay_style": "WSD", "lr_wsd_decay_style": style, "lr_wsd_decay_iters": 4}
        got = rates(checkpoint[0], 11, **wsd, **flags)
        assert got[:10:2] == pytest.approx(wanted, abs=1e-12), style
        assert got[10] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("style", "wanted"),
    [
        ("linear", [0.1, 0.2, 0.3, 0.4, 0.5]),
        ("cosine", [0.1, 0.3 - 0.2 * 2**-0.5, 0.3, 0.3 + 0.2 * 2**-0.5, 0.5]),
    ],
)
def test_weight_decay_by_hand(checkpoint, style, wanted):
    """The values are the decay of matrices over eight steps; vectors have no decay."""
    flags = {"start_weight_decay": 0.1, "end_weight_decay": 0.5, "weight_decay_incr_style": style}
    _, optimizer, scheduler = trainer(checkpoint[0], **flags, lr_decay_iters=8)
    found = []
    for _ in range(9):
        found.append(sorted(group["weight_decay"] for group in optimizer.param_groups))
        scheduler.step(increment=8)
    assert [decay for _, decay in found[::2]] == pytest.approx(wanted)
    assert {none for none, _ in found} == {0.0}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lr_warmup_iters": 10}, r"--lr-warmup-iters must lie in \[0, 10\).*got 10"),
        ({"lr": 1e-6, "min_lr": 1e-5}, r"--min-lr must lie in \[0, --lr 1e-06\], got 1e-05"),
        ({"lr": 1e-6, "lr_warmup_init": 1e-5}, "--lr-warmup-init must be at most --lr 1e-06, got 1e-05"),
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 9, "lr_warmup_iters": 2},
            "--lr-wsd-decay-iters must be at most 8, .* got 9",
        ),
    ],
)
def test_bad_settings_are_refused(checkpoint, config, message):
    with pytest.raises(ValueError, match=message):
        trainer(checkpoint[0], **config)


def test_gradient_that_is_not_finite_shows_in_the_norm(checkpoint):
    """Without a loss scale, Megatron still reports success, so callers must check the norm."""
    model, optimizer, _ = trainer(checkpoint[0])
    (sum_loss(packed_logits(model, sequences(0)), sequences(0)) * math.nan).backward()
    updated, norm, _ = optimizer.step()
    assert updated and math.isnan(norm)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        # upstream's cases: rollouts of 6 samples in steps of 2 and 4, rollouts of 5 in steps of 4 and 1
        (
            {"rollout_batch_size": 6, "global_batch_size_schedule": [2, 4], "lr_decay_iters": 2},
            (6, 2, 4),
        ),
        ({"rollout_batch_size": 5, "global_batch_size": 4, "lr_decay_iters": 3}, (9, 4, 4)),
    ],
)
def test_a_schedule_counts_steps_of_several_sizes(checkpoint, flags, wanted):
    flags |= {"variable_global_batch_size": True, "num_steps_per_rollout": 2, "lr_decay_style": "WSD"}
    _, _, scheduler = trainer(checkpoint[0], lr_warmup_iters=1, lr_wsd_decay_iters=1, **flags)
    assert (scheduler.lr_decay_steps, scheduler.lr_warmup_steps, scheduler.wsd_decay_steps) == wanted
    assert scheduler.wd_incr_steps == wanted[0]
