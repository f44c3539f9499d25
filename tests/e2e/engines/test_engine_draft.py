"""A real vLLM on CPUs drafts with MiMo's layers of multi-token prediction, which the trainer has trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import ENGINE_SHAPE
from family_engine import with_remote_config
from megatron_cases import make_config, tiny_checkpoint
from offline_engine import offline_engine, plain_matrices
from rank_processes import on_ranks

from slime.weight_sync.file_channel import FileChannel
from slime.weight_sync.slices import whole_slices

pytestmark = pytest.mark.e2e

PROMPT = [3, 7, 50, 21, 9]


def publish(_: int, root: Path) -> None:
    """Publishes two versions of the weights with the trained layers, in a child process. The second version has other
    layers of multi-token prediction and the same decoder."""
    from slime.checkpoints.hf_config import read_hf_config
    from slime.megatron_backend.checkpoint.weights import export_hf, load_hf
    from slime.megatron_backend.model.gpt import build_model, unwrap
    from slime.megatron_backend.parallel import init_parallel

    config = make_config()
    init_parallel(0, 1, config, init_method=f"file://{root}/store")
    model = build_model(read_hf_config(root / "hf"), config, predicts=True)
    load_hf(model, root / "hf")
    channel = FileChannel(root / "weights")
    updates = []
    for version in (0, 1):
        updates.append(channel.publish(whole_slices(export_hf(model)), version, checksums=True))
        with torch.no_grad():
            for parameter in unwrap(model).mtp.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    torch.save(updates, root / "updates.pt")


def drafted(engine: Any) -> tuple[list[int], dict[str, torch.Tensor]]:
    from vllm import SamplingParams

    engine._llm.reset_prefix_cache()
    settings = SamplingParams(max_tokens=24, temperature=0.0, detokenize=False, ignore_eos=True)
    (out,) = engine._llm.generate({"prompt_token_ids": PROMPT}, settings, use_tqdm=False)
    return list(out.outputs[0].token_ids), out.outputs[0].spec_decode_metrics


def check_log_probs(engine: Any) -> None:
    """Each sampled token's log-prob is the model's, for greedy and random requests in one batch, with drafts accepted
    and rejected."""
    from vllm import SamplingParams

    engine._llm.reset_prefix_cache()
    each = [
        SamplingParams(max_tokens=24, temperature=t, seed=seed, logprobs=0, detokenize=False, ignore_eos=True)
        for seed, t in enumerate((0.0, 1.0, 1.0, 1.0))
    ]
    outs = engine._llm.generate([{"prompt_token_ids": PROMPT}] * len(each), each, use_tqdm=False)
    for out in outs:
        tokens = list(out.outputs[0].token_ids)
        given = [found[token].logprob for token, found in zip(tokens, out.outputs[0].logprobs, strict=True)]
        expected = engine.log_probs(PROMPT + tokens)[len(PROMPT) - 1 :]
        assert (torch.tensor(given) - expected).abs().max() < 1e-5


@pytest.fixture(params=[False, True], ids=["packed", "plain"])
def plain(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Yields whether updates can write weights directly into the parameters of model and draft."""
    with plain_matrices(monkeypatch) if request.param else nullcontext():
        yield request.param


@pytest.mark.slow
def test_the_draft_gets_the_trained_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: bool
) -> None:
    shape = {**ENGINE_SHAPE, "tie_word_embeddings": False}
    tiny_checkpoint(tmp_path / "hf", "mimo", **shape)
    with_remote_config(tmp_path / "hf", "mimo")
    on_ranks(publish, tmp_path, ranks=1)
    first, second = torch.load(tmp_path / "updates.pt", weights_only=False)
    settings = {
        "trust_remote_code": True,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
        "per_request_spec_decode_metrics": "summary",
        "logprobs_mode": "processed_logprobs",
    }
    with offline_engine(tmp_path / "hf", tmp_path / "weights", monkeypatch, **settings) as engine:
        tokens, counts = drafted(engine)
        assert counts.num_draft_tokens > 0
        check_log_probs(engine)
        engine.take(first)
        assert drafted(engine)[0] == tokens
        engine.take(second)  # this compares every live tensor, those of the draft included
        assert drafted(engine)[0] == tokens  # the draft changes the speed, not the tokens
        with pytest.raises(RuntimeError, match="live weights must equal .*mtp_layers"):
            engine.take(first, load=False)
        if plain:
            places = engine.worker.weight_transfer_engine.views
            assert any("mtp_layers" in name for name, found in places._found.items() if found)
            engine.take(first)
            assert drafted(engine)[0] == tokens
