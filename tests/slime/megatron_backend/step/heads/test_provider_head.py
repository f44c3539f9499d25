"""Tests the head of a provider on one rank: a step compared with the native head's step, the provider's inputs, its
fallback."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_cases import VOCAB
from torch import Tensor
from trainer_cases import make_checkpoints, make_config, make_samples, rank_data, train

from slime.algo.selected_log_probs import SelectedLogprobProviderUnavailable
from slime.megatron_backend.step.trainer import MegatronTrainer

OURS = "rl_kernel.integrations.vime.linear_logp.provider"
FLAGS = {
    "clip_grad": 0.0,
    "use_rollout_logprobs": True,
    "use_kl_loss": True,
    "kl_loss_type": "k3",
    "kl_loss_coef": 0.3,
    "entropy_coef": 0.05,
    "rollout_temperature": 0.7,
}
REQUESTS: list[Any] = []
PRODUCTS: list[Tensor | None] = []
"""The products of hidden states and weight per request, computed before the optimizer changed the weight."""


def recording(request):
    """Records the request and calls this project's provider with the logits only."""
    REQUESTS.append(request)
    given = request.hidden is not None
    PRODUCTS.append((request.hidden @ request.lm_head_weight.T).detach() if given else None)
    from rl_kernel.integrations.vime.linear_logp import provider

    return provider(replace(request, hidden=None, lm_head_weight=None))


def without_gradients(request):
    """Raises SelectedLogprobProviderUnavailable for logits that need a gradient."""
    if request.logits.requires_grad:
        raise SelectedLogprobProviderUnavailable("it has no backward")
    return recording(request)


def wrong(request):
    return SimpleNamespace(
        **vars(recording(request)) | {"selected_logprobs": torch.zeros(len(request.logits))}
    )


def detached(request):
    found = recording(request)
    return replace(found, selected_logprobs=found.selected_logprobs.detach())


@pytest.fixture(autouse=True)
def no_requests():
    REQUESTS.clear()
    PRODUCTS.clear()


def step(trainer: MegatronTrainer) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Returns a step's metrics and its gradients."""
    result, _ = train(trainer)
    named = trainer.policy.model.named_parameters()
    return result.steps[0], {name: parameter.main_grad.clone() for name, parameter in named}


def assert_same(got: tuple[dict, dict], wanted: tuple[dict, dict]) -> None:
    assert got[0] == pytest.approx(wanted[0], rel=1e-5, abs=1e-6)
    assert max(g.abs().max() for g in wanted[1].values()) > 0.01
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(got[1][name], gradient, rtol=0, atol=1e-6, msg=name)


@pytest.fixture(scope="module")
def native(root, tmp_path_factory):
    """Returns a step of the native head."""
    folder = tmp_path_factory.mktemp("native")
    config = make_config(root, weight_dir=str(folder / "weights"), rlk_fast="off", **FLAGS)
    trainer = MegatronTrainer(config, 0, 1, init_method=f"file://{folder}/store")
    found = step(trainer)
    trainer.close()
    return found


@pytest.mark.parametrize("mode", ["auto", "strict"])
@pytest.mark.parametrize("path", [OURS, f"{__name__}.recording"])
def test_a_step_equals_the_native_heads(build, native, path, mode):
    trainer = build(**FLAGS, selected_logprob_provider=path, selected_logprob_provider_mode=mode)
    assert_same(step(trainer), native)


def test_what_a_provider_gets(build):
    trainer = build(**FLAGS, selected_logprob_provider=f"{__name__}.recording")
    train(trainer)
    scored = [r for r in REQUESTS if not r.logits.requires_grad]
    trained = [r for r in REQUESTS if r.logits.requires_grad]
    assert scored and trained, "the reference's pass, and the loss"
    rows = sum(sample.response_length for sample in make_samples())
    assert sum(len(r.logits) for r in scored) == sum(len(r.logits) for r in trained) == rows
    for r, product in zip(REQUESTS, PRODUCTS, strict=True):
        assert r.logits.dtype == torch.float32 and r.temperature == 0.7 and r.real_vocab_size == VOCAB
        torch.testing.assert_close(r.logits[:, :VOCAB], product[:, :VOCAB] / 0.7)
        assert (r.logits[:, r.real_vocab_size :] < -1e29).all()
        assert r.global_vocab_size == r.logits.shape[1] and r.vocab_start_index == 0
        assert (r.context_parallel.world_size, r.context_parallel.layout) == (1, "single")
        assert r.tensor_parallel_group is None and r.log_prob_keep_mask is None
    assert not any(r.with_entropy for r in scored) and all(r.with_entropy_grad for r in trained)


def test_unavailable_for_the_loss_alone(build, native, caplog):
    path = f"{__name__}.without_gradients"
    trainer = build(**FLAGS, selected_logprob_provider=path)
    assert_same(step(trainer), native)
    assert REQUESTS, "it served the reference's pass"
    assert sum("it has no backward" in message for message in caplog.messages) == 1
    strict = build(**FLAGS, selected_logprob_provider=path, selected_logprob_provider_mode="strict")
    with pytest.raises(RuntimeError, match="must be available in mode strict.*it has no backward"):
        train(strict)


def test_no_module_falls_back(build, native):
    assert_same(step(build(**FLAGS, selected_logprob_provider="no_such_module.provider")), native)


@pytest.mark.parametrize(
    ("name", "mode", "message"),
    [
        ("wrong", "auto", "return selected_logprobs of shape"),
        ("wrong", "strict", "return selected_logprobs of shape"),
        ("detached", "strict", "autograd can follow"),
    ],
)
def test_a_wrong_result_ends_the_step(build, name, mode, message):
    trainer = build(
        **FLAGS, selected_logprob_provider=f"{__name__}.{name}", selected_logprob_provider_mode=mode
    )
    with pytest.raises(ValueError, match=message):
        train(trainer)


def test_a_provider_in_a_file_of_the_user(build, native, tmp_path, monkeypatch):
    """The provider is plain PyTorch, and its result is a mapping."""
    (tmp_path / "my_provider.py").write_text(
        "import torch\n"
        "def provide(request):\n"
        "    log_p = request.logits.log_softmax(-1)\n"
        "    entropy = -(log_p.exp() * log_p).sum(-1) if request.with_entropy else None\n"
        "    return {'selected_logprobs': log_p.gather(1, request.target_ids[:, None]), 'entropy': entropy,\n"
        "            'backend_id': 'torch', 'contract_id': 'mine/1', 'provenance': {}}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_provider", raising=False)
    flags = {
        "selected_logprob_provider": "my_provider.provide",
        "selected_logprob_provider_mode": "strict",
    }
    assert_same(step(build(**FLAGS, **flags)), native)


def test_ids_that_sampling_kept(build):
    """The provider gets columns; the log-probs equal those of the native head over the same ids."""
    flags = {"clip_grad": 0.0, "replay_kept_tokens": 4, "rollout_top_p": 0.9}

    def kept(trainer: MegatronTrainer) -> dict[str, float]:
        samples = make_samples()
        for sample in samples:
            answer = sample.tokens[-sample.response_length :]
            rows = [[token, (token + 1) % 90] if i % 3 else [] for i, token in enumerate(answer)]
            sample.rollout_top_p_token_ids = [token for row in rows for token in row]
            offsets = [0]
            for row in rows:
                offsets.append(offsets[-1] + len(row))
            sample.rollout_top_p_token_offsets = offsets
        return trainer.train(0, rank_data(trainer.config, samples)).steps[0]

    wanted = kept(build(**flags, rlk_fast="off"))
    got = kept(build(**flags, selected_logprob_provider=f"{__name__}.recording"))
    masks = [r.log_prob_keep_mask for r in REQUESTS]
    assert all(mask is not None and mask.dtype == torch.bool for mask in masks)
    counts = torch.cat([mask.sum(1) for mask in masks])
    assert set(counts.tolist()) == {2, REQUESTS[0].logits.shape[1]}
    assert got == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_a_soft_cap_leaves_the_layer_out(build, tmp_path):
    """The logits of Gemma 2 are not hidden states times the weight."""
    make_checkpoints(tmp_path, "gemma2")
    files = {name: str(tmp_path / "policy") for name in ("hf_checkpoint", "load")}
    files |= {"ref_load": str(tmp_path / "reference"), "clip_grad": 0.0}
    wanted = step(build(**files, rlk_fast="off"))
    got = step(build(**files, selected_logprob_provider=f"{__name__}.recording"))
    assert REQUESTS and all(r.hidden is None and r.lm_head_weight is None for r in REQUESTS)
    assert_same(got, wanted)
