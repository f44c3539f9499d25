"""Compares every family on two processes with transformers: log-probs, gradients and the bytes of weights, with
tensor (and sequence), pipeline and expert parallelism.

Two worker processes run all layouts and models in turn and write their results; the tests compare.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import CASES
from family_record import note
from megatron_cases import (
    assert_gradients_equal,
    hf_gradients,
    hf_logits,
    make_config,
    sequences,
    tiny_checkpoint,
    trained,
)
from rank_processes import on_ranks
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from slime.megatron_backend.conformance.computed import compute_model, shift_tokens
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.models import family_for, read_decoder

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp": {"pipeline_model_parallel_size": 2},
    # With the distributed optimizer, a data-parallel rank would have only its part of the gradients.
    "ep": {"expert_model_parallel_size": 2, "use_distributed_optimizer": False},
}
BATCH = [*sequences(0), torch.tensor([1, 2, 3])]
"""Lengths with a sum of 32 tokens, because sequence parallelism needs a multiple of the ranks."""


def fits(directory: Path, layout: str) -> bool:
    return layout != "ep" or read_decoder(load_hf_config(directory)).experts is not None


def predicted(directory: Path, names: Iterable[str]) -> set[str]:
    hf_config = load_hf_config(directory)
    return set(family_for(hf_config).prediction_names(names, hf_config))


def work(rank: int, root: Path) -> None:
    out: dict[tuple[str, str], dict[str, Any]] = {}
    for layout, sizes in LAYOUTS.items():
        config = make_config(**sizes)
        info = init_parallel(rank, 2, config, init_method=f"file://{root}/store-{layout}", local_rank=rank)
        for name in CASES:
            if fits(root / name, layout):
                out[name, layout] = one_model(root / name, config, info, steps=layout != "pp")
        destroy_parallel()
    torch.save(out, root / f"rank{rank}.pt")


def one_model(directory: Path, config: Any, info: Any, *, steps: bool) -> dict[str, Any]:
    return vars(compute_model(directory, config, info, BATCH, gradients=steps))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Returns the directory of the tiny models, and transformers' models."""
    root = tmp_path_factory.mktemp("families")
    return root, {name: tiny_checkpoint(root / name, case.kind, **case.shape) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def two(models):
    root, _ = models
    on_ranks(work, root, ranks=2)
    return [torch.load(root / f"rank{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_weights_are_put_together_bitwise(models, two, name, layout):
    original = load_file(models[0] / name / "model.safetensors")
    for rank in two:
        if (found := rank.get((name, layout))) is None:
            assert layout == "ep" and not fits(models[0] / name, layout)
            return
        assert found["weights"].keys() == trained(original, models[0] / name).keys()
        assert all(torch.equal(tensor, original[n]) for n, tensor in found["weights"].items())
    note(name, f"{layout}_bits", 1)


@pytest.mark.parametrize("name", CASES)
def test_log_probs_and_gradients(models, two, name):
    root, hfs = models
    expected = of_transformers(hfs[name], root / f"{name}-gradients")
    for layout in ("tp", "ep"):
        if not fits(root / name, layout):
            continue
        for rank, of_rank in enumerate(two):
            found = of_rank[name, layout]
            mine = range(len(BATCH))[rank::2] if layout == "ep" else range(len(BATCH))
            wanted = torch.cat([expected["log_probs"][i] for i in mine])
            torch.testing.assert_close(found["log_probs"], wanted, rtol=0, atol=1e-5)
            note(name, f"{layout}_log_probs", (found["log_probs"] - wanted).abs().max())
            for key, gradient in found["gradients"].items():
                if not key.endswith("e_score_correction_bias"):
                    error = assert_gradients_equal(gradient, expected["gradients"][key], f"{layout} {key}")
                    note(name, f"{layout}_gradients", error)


def of_transformers(hf: Any, directory: Path) -> dict[str, Any]:
    log_probs = [
        hf_logits(hf, [tokens]).log_softmax(-1).gather(1, tokens.roll(-1)[:, None])[:, 0] for tokens in BATCH
    ]
    logits = torch.cat([hf(tokens[None]).logits[0] for tokens in BATCH])
    cross_entropy(logits, shift_tokens(BATCH)).backward()
    return {"log_probs": log_probs, "gradients": hf_gradients(hf, directory)}
