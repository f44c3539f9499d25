"""Compares losses over top-k ids with numbers by hand: centred scores, forward KL and Jensen-Shannon."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from test_policy_loss import columns, flags

from slime.algo.distillation import NOWHERE, distillation_term, forward_kl, jensen_shannon, with_tail
from slime.algo.estimators import surrogate_for
from slime.algo.policy_loss import policy_loss
from slime.algo.surrogates import CENTRED
from slime.algo.surrogates.reinforce import centering

P, Q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.6, 0.3, 0.1]])
ALL = torch.ones(1, 3, dtype=torch.bool)


def coefficients(p, q, known=None, **fields):
    """Returns each log-prob's factor in the centering term, which is its gradient."""
    log_p = p.log().requires_grad_()
    known = torch.ones_like(p, dtype=torch.bool) if known is None else known
    centering(flags(**fields).off_policy, log_p, q.log(), known).sum().backward()
    return log_p.grad[0].tolist()


def test_centering_by_hand():
    # For the first two ids, the tails are 0.1 and 0.25, and rho = 0.4: 0.6 - 0.4 * 0.5 and 0.3 - 0.4 * 0.25.
    assert coefficients(P[:, :2], Q[:, :2]) == pytest.approx([0.4, 0.2])
    # With TIS both weights are 5/6, so w q = p; the tail's 1 / rho = 2.5 is clipped to 2: alpha = 0.8.
    assert coefficients(P[:, :2], Q[:, :2], use_tis=True) == pytest.approx([0.1, 0.05], rel=1e-5)
    # With IcePop 2.5 is out of bounds, so the tail has no weight.
    masked = {"use_tis": True, "tis_mode": "mask", "tis_clip_low": 0.5}
    assert coefficients(P[:, :2], Q[:, :2], **masked) == pytest.approx([0.5, 0.25])
    # A missing id counts as a part of the tail.
    one = torch.tensor([[True, False]])
    assert coefficients(P[:, :2], Q[:, :2], one) == pytest.approx([0.6 - 0.4 / 0.5 * 0.5, 0.0])


def test_on_policy_scores_stay_as_they_are():
    assert coefficients(P[:, :2], P[:, :2]) == pytest.approx([0.0, 0.0], abs=1e-6)


def test_over_all_ids_the_expectation_is_exact():
    """d/dlogits of the term equals that of E_q[log p], and the mean of the loss over q has no gradient."""
    logits = torch.tensor([[0.3, -0.2, 0.9]], requires_grad=True)
    log_p = torch.log_softmax(logits, 1)
    (found,) = torch.autograd.grad(
        centering(flags().off_policy, log_p, Q.log(), ALL).sum(), logits, retain_graph=True
    )
    (exact,) = torch.autograd.grad((Q * log_p).sum(), logits, retain_graph=True)
    torch.testing.assert_close(found, exact)
    mean = (Q * log_p).sum() - centering(flags().off_policy, log_p, Q.log(), ALL).sum()
    (gradient,) = torch.autograd.grad(mean, logits)
    torch.testing.assert_close(gradient, torch.zeros_like(logits), rtol=0, atol=1e-6)


def top_columns(**more):
    """Returns the tokens of `columns` with two ids each, and their p and q."""
    p = torch.tensor([[0.4, 0.1], [0.5, 0.2], [0.2, 0.3]])
    q = torch.tensor([[0.3, 0.2], [0.5, 0.2], [0.4, 0.1]])
    found = columns(
        rollout_top_ids=torch.tensor([[3, 4], [3, 4], [5, 6]], dtype=torch.int32),
        rollout_top_log_probs=q.log(),
        **more,
    )
    return replace(found, of_ids=p.log().requires_grad_())


def test_the_loss_of_a_batch_by_hand():
    t = top_columns()
    given = flags(use_score_centering=True)
    assert surrogate_for(given.algorithm) is CENTRED and CENTRED.name == "reinforce"
    loss, sums, _ = policy_loss(given, t)
    loss.backward()
    # Token 0 has equal tails, 0.3 - 0.4 and 0.2 - 0.1; token 2 too, 0.4 - 0.2 and 0.1 - 0.3. The advantages are 1 and
    # -1.
    terms = -0.1 * math.log(0.4) + 0.1 * math.log(0.1), 0.2 * math.log(0.2) - 0.2 * math.log(0.3)
    wanted = (-(math.log(0.4) - terms[0]) + (math.log(0.2) - terms[1])) / 2
    assert loss.item() == pytest.approx(wanted) and sums["pg_loss"].item() == pytest.approx(wanted)
    torch.testing.assert_close(t.log_probs.grad, torch.tensor([-0.5, 0.0, 0.5]))
    torch.testing.assert_close(t.of_ids.grad, torch.tensor([[-0.05, 0.05], [0.0, 0.0], [-0.1, 0.1]]))


def test_the_weight_of_a_token_is_not_counted_twice():
    """The present policy's ratios to the engine are 4 and 0.5, clipped to 2 and 0.5."""
    t = top_columns()
    policy_loss(flags(use_score_centering=True, use_tis=True), t)[0].backward()
    torch.testing.assert_close(t.log_probs.grad, torch.tensor([-0.5 * 2, 0.0, 0.5 * 0.5]))


def test_divergences_by_hand():
    teacher, policy = torch.tensor([[0.5, 0.3]]), torch.tensor([[0.2, 0.6]])
    known = torch.ones(1, 2, dtype=torch.bool)
    t, p = with_tail(teacher.log(), known), with_tail(policy.log(), known)
    torch.testing.assert_close(t.exp(), torch.tensor([[0.5, 0.3, 0.2]]))
    wanted = 0.5 * math.log(0.5 / 0.2) + 0.3 * math.log(0.3 / 0.6)  # both tails are 0.2
    assert forward_kl(t, p).item() == pytest.approx(wanted, rel=1e-5)
    m = [0.25 * a + 0.75 * b for a, b in ((0.5, 0.2), (0.3, 0.6), (0.2, 0.2))]
    of_teacher = 0.5 * math.log(0.5 / m[0]) + 0.3 * math.log(0.3 / m[1])
    of_policy = 0.2 * math.log(0.2 / m[0]) + 0.6 * math.log(0.6 / m[1])
    assert jensen_shannon(t, p, 0.25).item() == pytest.approx(0.25 * of_teacher + 0.75 * of_policy, rel=1e-5)
    torch.testing.assert_close(jensen_shannon(t, p, 0.25), jensen_shannon(p, t, 0.75))
    for same in (forward_kl(t, t), jensen_shannon(t, t, 0.5)):
        assert same.item() == pytest.approx(0.0, abs=1e-6)


def test_the_gradient_of_the_forward_kl_is_the_difference_of_probabilities():
    """The gradient is in the logits of the given ids; the other ids share the rest, in the policy's proportions."""
    logits = torch.tensor([[0.3, -0.2, 0.9, 0.1]], requires_grad=True)
    log_p = torch.log_softmax(logits, 1)
    teacher = torch.tensor([[0.5, 0.3]])
    known = torch.ones(1, 2, dtype=torch.bool)
    forward_kl(with_tail(teacher.log(), known), with_tail(log_p[:, :2], known)).sum().backward()
    p = log_p.exp().detach()
    tail = 0.2 * p[:, 2:] / p[:, 2:].sum()
    torch.testing.assert_close(logits.grad, p - torch.cat([teacher, tail], 1))


OPD = {"use_opd": True, "opd_loss_type": "forward_kl", "opd_loss_coef": 0.5}


def opd(**fields):
    return flags(**{**OPD, **fields}).distillation


def test_the_term_in_the_policy_loss():
    ids = torch.tensor([[3, -1], [3, 4], [5, 6]], dtype=torch.int32)
    log_t = torch.tensor([[0.5, 1.0], [0.5, 0.2], [0.5, 0.3]]).log()
    t = replace(
        columns(teacher_top_ids=ids, teacher_top_log_probs=log_t),
        of_ids=torch.tensor([[0.4, 1.0], [0.1, 0.2], [0.2, 0.6]]).log().masked_fill(ids < 0, -torch.inf),
    )
    assert distillation_term(opd(opd_loss_type="reverse_kl"), t) is None
    assert distillation_term(opd(use_opd=False), t) is None
    found = distillation_term(opd(), t)
    # Token 0 has one id: its classes are 0.5 and 0.5, compared with 0.4 and 0.6.
    first = 0.5 * math.log(0.5 / 0.4) + 0.5 * math.log(0.5 / 0.6)
    third = 0.5 * math.log(0.5 / 0.2) + 0.3 * math.log(0.3 / 0.6)
    assert found[0].item() == pytest.approx(first, rel=1e-4)
    assert found[2].item() == pytest.approx(third, rel=1e-4)
    loss, sums, _ = policy_loss(flags(pg_loss_type="reinforce", **OPD), t)
    assert sums["opd_loss"].item() == pytest.approx((first + third) / 2, rel=1e-4)
    assert loss.item() == pytest.approx(sums["pg_loss"].item() + 0.5 * sums["opd_loss"].item())


def test_nothing_is_infinite_where_the_rest_is_nothing():
    """The cases are a policy or teacher whose top-k has all of the probability, and rows without an id."""
    known = torch.tensor([[True, True], [False, False]])
    log_p = torch.tensor([[0.6, 0.4], [1.0, 1.0]]).log().requires_grad_()
    log_t = torch.tensor([[0.3, 0.3], [1.0, 1.0]]).log()
    t, p = with_tail(log_t, known), with_tail(log_p, known)
    assert t[1, 0] == NOWHERE
    for value in (forward_kl(t, p), jensen_shannon(t, p, 0.5), forward_kl(p, t)):
        assert value.isfinite().all() and value[1].item() == pytest.approx(0.0, abs=1e-6)
        (gradient,) = torch.autograd.grad(value.sum(), log_p, retain_graph=True)
        assert gradient.isfinite().all() and not gradient[1].any()
