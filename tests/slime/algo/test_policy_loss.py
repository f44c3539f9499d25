"""Compares every objective with numbers by hand, and checks the arguments of every hook."""

import math
from dataclasses import replace

import pytest
import torch

from slime.algo import ppo, surrogates
from slime.algo.policy_loss import policy_loss, sft_loss
from slime.algo.token_columns import HookView, TokenColumns
from slime.config.schema import Config

CLIP = dict(eps_clip=0.2, eps_clip_high=0.3)


def flags(**changes):
    """Returns the configuration with clips of 0.2 and 0.3, and these fields."""
    return Config.from_flat({"eps_clip_high": 0.3, "opsm_delta": 0.1, **changes})


def columns(**changes):
    """Returns two samples of 2 and 1 tokens; the second token of the first is masked out. The ratios are 2, 5
    (masked), 0.5."""
    old = torch.log(torch.tensor([0.2, 0.1, 0.4]))
    new = torch.log(torch.tensor([0.4, 0.5, 0.2])).requires_grad_()
    table = dict(
        loss_masks=torch.tensor([1, 0, 1], dtype=torch.int32),
        loss_denominators=torch.full((3,), 2.0),  # one trained token per sample, two rollouts
        advantages=torch.tensor([1.0, 1.0, -1.0]),
        old_log_probs=old,
        ref_log_probs=torch.log(torch.tensor([0.1, 0.1, 0.2])),
        rollout_log_probs=torch.log(torch.tensor([0.1, 0.1, 0.4])),
    )
    table |= {name: value for name, value in changes.items() if name != "log_probs"}
    return TokenColumns(
        log_probs=changes.get("log_probs", new),
        entropy=torch.tensor([1.0, 2.0, 3.0], requires_grad=True),
        columns={name: value for name, value in table.items() if value is not None},
        sample_of_row=torch.tensor([0, 0, 1]),
        total_lengths=[5, 4],
        response_lengths=[2, 1],
        normaliser=2.0,
    )


def test_clipped_surrogate_and_its_metrics():
    t = columns()
    loss, sums, maxima = policy_loss(flags(), t)
    # token 0: r = 2, A = 1: max(-2, -1.3) = -1.3, clipped; token 2: r = 0.5, A = -1: max(0.5, 0.8) = 0.8, clipped
    assert loss.item() == pytest.approx((-1.3 + 0.8) / 2)
    assert sums["pg_clipfrac"].item() == pytest.approx(1.0)
    assert sums["ppo_kl"].item() == pytest.approx((math.log(0.5) + math.log(2)) / 2, abs=1e-6)
    assert sums["entropy_loss"].item() == pytest.approx(2.0)
    assert sums["train_rollout_logprob_abs_diff"].item() == pytest.approx(math.log(2) / 2)
    assert maxima["train_rollout_logprob_abs_diff_max"].item() == pytest.approx(math.log(2))
    loss.backward()
    assert t.log_probs.grad.tolist() == [0.0, 0.0, 0.0]  # every counted token is clipped


def test_without_old_log_probs_the_ratio_is_one_and_the_gradient_is_the_policy_gradient():
    t = columns(old_log_probs=None)
    loss, sums, _ = policy_loss(flags(), t)
    assert loss.item() == pytest.approx(0.0)
    assert sums["pg_clipfrac"].item() == 0.0
    loss.backward()
    torch.testing.assert_close(t.log_probs.grad, torch.tensor([-0.5, 0.0, 0.5]))
    assert t.entropy.grad is None


def test_dual_clip_bounds_the_loss_of_bad_tokens():
    t = columns(
        log_probs=torch.log(torch.tensor([0.2, 0.1, 0.9])),
        old_log_probs=torch.log(torch.tensor([0.2, 0.1, 0.1])),
    )
    loss, _, _ = policy_loss(flags(eps_clip_c=3.0), t)
    # r = 9 with A = -1 would cost 9; the dual clip stops at 3.
    assert loss.item() == pytest.approx((-1.0 + 3.0) / 2)


def test_entropy_and_kl_terms_enter_with_their_coefficients():
    t = columns()
    loss, sums, _ = policy_loss(
        flags(entropy_coef=0.1, use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k2"), t
    )
    kl = (math.log(4) ** 2 / 2 + 0.0) / 2
    assert sums["kl_loss"].item() == pytest.approx(kl)
    assert loss.item() == pytest.approx(-0.25 - 0.1 * 2.0 + 0.5 * kl)
    loss.backward()
    torch.testing.assert_close(t.entropy.grad, torch.tensor([-0.05, 0.0, -0.05]))


def test_unbiased_kl_weighs_by_the_ratio():
    _, sums, _ = policy_loss(flags(use_kl_loss=True, use_unbiased_kl=True), columns())
    assert sums["kl_loss"].item() == pytest.approx(2 * math.log(4) / 2)


def test_gspo_uses_one_ratio_a_sequence():
    t = columns(
        loss_masks=torch.tensor([1, 1, 1], dtype=torch.int32),
        loss_denominators=torch.tensor([4.0, 4.0, 2.0]),
    )
    loss, sums, _ = policy_loss(flags(advantage_estimator="gspo", eps_clip_high=10.0), t)
    # sample 0: exp((log 2 + log 5) / 2) = sqrt(10); sample 1: 0.5, A = -1, clipped at 0.8
    assert loss.item() == pytest.approx((-math.sqrt(10) + 0.8) / 2, rel=1e-6)
    assert sums["ppo_kl"].item() == pytest.approx((-math.log(10) / 2 + math.log(2)) / 2, rel=1e-5)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    t = columns()
    loss, _, _ = policy_loss(flags(advantage_estimator="cispo"), t)
    assert loss.item() == pytest.approx((-1.3 * math.log(0.4) + 0.8 * math.log(0.2)) / 2, rel=1e-5)
    loss.backward()
    torch.testing.assert_close(t.log_probs.grad, torch.tensor([-0.65, 0.0, 0.4]))


def test_tis_multiplies_by_the_truncated_weight():
    loss, sums, _ = policy_loss(flags(use_tis=True, tis_clip=1.5), columns())
    # weights: exp(old - rollout) = 2 -> 1.5, and 1
    assert loss.item() == pytest.approx((-1.3 * 1.5 + 0.8) / 2)
    assert sums["tis"].item() == pytest.approx(1.5)
    assert sums["tis_clipfrac"].item() == pytest.approx(0.5)
    assert sums["tis_abs"].item() == pytest.approx(0.5)
    assert sums["ois"].item() == pytest.approx((2 + 0.5) / 2)


def test_mismatch_metrics_do_not_change_the_loss():
    loss, sums, _ = policy_loss(flags(get_mismatch_metrics=True, tis_clip=1.5), columns())
    assert loss.item() == pytest.approx(-0.25)
    assert sums["tis"].item() == pytest.approx(1.5)


def test_opsm_drops_bad_samples_that_moved_far():
    loss, sums, _ = policy_loss(flags(use_opsm=True), columns())
    # Sample 1 has A < 0, and its sequence KL log 2 exceeds 0.1.
    assert loss.item() == pytest.approx(-1.3 / 2)
    assert sums["opsm_clipfrac"].item() == pytest.approx(0.5)


def test_use_rollout_logprobs_compares_with_the_present_policy():
    t = columns(old_log_probs=columns()["rollout_log_probs"])
    _, sums, _ = policy_loss(flags(use_rollout_logprobs=True), t)
    assert sums["train_rollout_logprob_abs_diff"].item() == pytest.approx((math.log(4) + math.log(2)) / 2)


SEEN = []


def tis_hook(
    *, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths
):
    assert [len(x) for x in train_log_probs] == response_lengths == [2, 1]
    assert total_lengths == [5, 4]
    assert rollout_log_probs[1].tolist() == pytest.approx([math.log(0.4)])
    SEEN.append(args)
    masks = [loss_masks[0], torch.zeros_like(loss_masks[1])]
    return 10 * pg_loss, masks, {"my_metric": torch.tensor([1.0, 7.0, 3.0])}


def test_custom_tis_masks_numerators_only():
    loss, sums, _ = policy_loss(
        flags(use_tis=True, custom_tis_function_path=f"{__name__}.tis_hook"), columns()
    )
    assert loss.item() == pytest.approx(10 * -1.3 / 2)
    assert sums["my_metric"].item() == pytest.approx(2.0)


def test_custom_tis_gets_the_args_of_the_run():
    given = flags(use_tis=True, custom_tis_function_path=f"{__name__}.tis_hook")
    policy_loss(given, columns())
    assert vars(SEEN[-1]) == vars(given.namespace())
    args = given.namespace(of_a_hook=1)
    policy_loss(given, replace(columns(), view=HookView([2, 1], args=args)))
    assert SEEN[-1] is args


def reducer_hook(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    assert calculate_per_token_loss is False
    mask = torch.cat(loss_masks)
    return lambda pg: (pg * mask).sum() / 100


def test_custom_reducer_gets_per_token_losses_and_is_divided_by_the_batch():
    path = f"{__name__}.reducer_hook"
    loss, _, _ = policy_loss(flags(custom_pg_loss_reducer_function_path=path), columns())
    assert loss.item() == pytest.approx((-1.3 + 0.8) / 100 / 2)


def test_hooked_and_fused_paths_agree():
    generator = torch.Generator().manual_seed(0)
    new, old, advantages = (torch.randn(3, generator=generator) for _ in range(3))
    for c in (None, 1.5):
        mine, clipped = surrogates.compute_policy_loss(old - new, advantages, 0.2, 0.3, c)
        t = columns(
            log_probs=new,
            old_log_probs=old,
            advantages=advantages,
            loss_masks=torch.ones(3),
            loss_denominators=torch.ones(3),
        )
        loss, sums, _ = policy_loss(flags(eps_clip_c=c), t)
        assert loss.item() == pytest.approx(mine.sum().item(), rel=1e-6)
        assert sums["pg_clipfrac"].item() == clipped.sum().item()


def test_sft_is_the_mean_negative_log_likelihood():
    loss, sums, maxima = sft_loss(columns())
    assert loss.item() == pytest.approx(-(math.log(0.4) + math.log(0.2)) / 2)
    assert sums["loss"].item() == pytest.approx(loss.item())
    assert maxima == {}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", math.log(2)),
        ("k2", math.log(2) ** 2 / 2),
        ("k3", 0.5 - 1 + math.log(2)),
        ("low_var_kl", 0.5 - 1 + math.log(2)),
    ],
)
def test_approx_kl_names_that_plugins_use(kind, expected):
    new, base = torch.log(torch.tensor([0.4])), torch.log(torch.tensor([0.2]))
    assert ppo.compute_approx_kl(new, base, kind).item() == pytest.approx(expected, rel=1e-5)
    weighted = ppo.compute_approx_kl(new, base, kind, importance_ratio=torch.tensor([3.0]))
    assert weighted.item() == pytest.approx(3 * expected, rel=1e-5)


def test_low_variance_kl_is_clamped_after_the_weight():
    new, base = torch.tensor([-9.0]), torch.tensor([-1.0])
    assert ppo.compute_approx_kl(new, base, "low_var_kl").item() == 10.0
    assert ppo.compute_approx_kl(new, base, "k3").item() == pytest.approx(math.exp(8) - 1 - 8, rel=1e-5)


def test_log_probs_and_entropy_from_logits():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25]]))
    log_probs, entropy = ppo.calculate_log_probs_and_entropy(
        logits, torch.tensor([1]), None, with_entropy=True
    )
    assert log_probs.item() == pytest.approx(math.log(0.25))
    assert entropy.item() == pytest.approx(1.5 * math.log(2))
    assert ppo.calculate_log_probs_and_entropy(logits, torch.tensor([0]), None)[1] is None
