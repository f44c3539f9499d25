"""Compares two and four trainer ranks over gloo with one: the same metrics, weights and published file.

The worker processes run every layout in turn and write their results; the tests compare them with a single rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_cases as cases
from rank_processes import on_ranks
from safetensors.torch import load_file
from torch import Tensor
from trainer_cases import exported, make_config, make_samples, rank_data

from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.types import Sample

POLICY_FLAGS = {
    # There are two optimizer steps, with every term of the loss that crosses ranks.
    "global_batch_size": 4,
    "max_tokens_per_gpu": 24,
    "balance_data": True,
    "use_kl_loss": True,
    "kl_loss_type": "low_var_kl",
    "kl_loss_coef": 0.1,
    "entropy_coef": 0.01,
    "normalize_advantages": True,
    "use_tis": True,
}
CUSTOM_FLAGS = {"loss_type": "custom_loss", "custom_loss_function_path": "trainer_cases.reinforce_loss"}
GSPO_FLAGS = POLICY_FLAGS | {"advantage_estimator": "gspo", "use_opsm": True}
SEQUENCE_LOSS = POLICY_FLAGS | {
    "loss_type": "custom_loss",
    "custom_loss_function_path": "sequence_loss.loss",
}
MISMATCH_FLAGS = POLICY_FLAGS | {
    "custom_tis_function_path": "mismatch_correction.correct",
    "custom_pg_loss_reducer_function_path": "fixed_length.reducer",
    "custom_megatron_init_path": "trainer_cases.read_mismatch_settings",
}
MISMATCH_GSPO = MISMATCH_FLAGS | {"advantage_estimator": "gspo"}
SAPO_FLAGS = POLICY_FLAGS | {
    "pg_loss_type": "sapo",
    "use_rs": True,
    "rs_type": "k3",
    "rs_upper_bound": 0.05,
    "tis_mode": "mask",
    "get_mismatch_metrics": True,
    "use_dr_grpo": True,
    "rollout_max_response_len": 16,
}
SHELF: dict[str, dict[str, Any]] = {
    "sapo": SAPO_FLAGS,
    "gmpo": POLICY_FLAGS
    | {
        "pg_loss_type": "gmpo",
        "use_rs": True,
        "rs_level": "sequence",
        "tis_level": "turn",
        "rs_upper_bound": 1.5,
    },
    "gspo_token": POLICY_FLAGS | {"pg_loss_type": "gspo_token", "tis_level": "geometric"},
    "clip_cov": POLICY_FLAGS
    | {"pg_loss_type": "clip_cov", "clip_cov_ratio": 0.1, "clip_cov_lb": 0.01, "clip_cov_ub": 9.0},
    "kl_cov": POLICY_FLAGS | {"pg_loss_type": "kl_cov", "kl_cov_ratio": 0.1},
    "reinforce": POLICY_FLAGS | {"pg_loss_type": "reinforce", "tis_mode": "mask", "tis_clip_low": 0.5},
    "rloo": POLICY_FLAGS | {"advantage_estimator": "rloo"},
    "pass_at_k": POLICY_FLAGS | {"advantage_estimator": "pass_at_k"},
}
"""Estimators, policy losses and corrections, which run on one rank and on two, in each kind of layout."""
ONE_SAMPLE_FLAGS = POLICY_FLAGS | {"use_dynamic_batch_size": False, "micro_batch_size": 1}
TENSOR = {"tensor_model_parallel_size": 2}
SEQUENCE = TENSOR | {"sequence_parallel": True}
CONTEXT = {"context_parallel_size": 2}
STAGES = {"pipeline_model_parallel_size": 2}
NATIVE = {"rlk_fast": "off"}
FULL_RECOMPUTE = {
    "overrides": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
}
OVERLAP = {"overrides": {"overlap_grad_reduce": True}}
PROVIDER = {"selected_logprob_provider": "rl_kernel.integrations.vime.linear_logp.provider"}
PROVIDER["selected_logprob_provider_mode"] = "strict"
TWO: dict[str, dict[str, Any]] = {
    "dp": POLICY_FLAGS,
    "dp-per-token": POLICY_FLAGS | {"calculate_per_token_loss": True, "use_distributed_optimizer": False},
    "tp": POLICY_FLAGS | TENSOR,
    "sp": POLICY_FLAGS | SEQUENCE,
    "tp-custom": CUSTOM_FLAGS | TENSOR,
    "dp-native": POLICY_FLAGS | NATIVE,
    "tp-native": POLICY_FLAGS | TENSOR | NATIVE,
    "sp-native": POLICY_FLAGS | SEQUENCE | NATIVE,
    "sp-linear_logp": POLICY_FLAGS | SEQUENCE | {"rl_kernel_ops": ["linear_logp"]},
    "sp-logp": POLICY_FLAGS | SEQUENCE | {"rl_kernel_ops": ["logp"]},
    "sp-provider": POLICY_FLAGS | SEQUENCE | PROVIDER,
    "sp-custom-provider": CUSTOM_FLAGS | SEQUENCE | PROVIDER,
    "cp": POLICY_FLAGS | CONTEXT,
    "cp-provider": POLICY_FLAGS | CONTEXT | PROVIDER,
    "cp-empty-provider": ONE_SAMPLE_FLAGS | CONTEXT | PROVIDER,
    "cp-native": POLICY_FLAGS | CONTEXT | NATIVE,
    "cp-logp": POLICY_FLAGS | CONTEXT | {"rl_kernel_ops": ["logp"]},
    "cp-gspo": GSPO_FLAGS | CONTEXT,
    "cp-custom": CUSTOM_FLAGS | CONTEXT,
    "cp-sequence": SEQUENCE_LOSS | CONTEXT,
    "cp-mismatch": MISMATCH_FLAGS | CONTEXT,
    "cp-mismatch-gspo": MISMATCH_GSPO | CONTEXT,
    "cp-empty": ONE_SAMPLE_FLAGS | CONTEXT,
    "cp-empty-native": ONE_SAMPLE_FLAGS | CONTEXT | NATIVE,
    "cp-empty-overlap": ONE_SAMPLE_FLAGS | CONTEXT | OVERLAP,
    "cp-recompute": POLICY_FLAGS | CONTEXT | FULL_RECOMPUTE | {"cp_comm_type": "all_gather"},
    "pp": POLICY_FLAGS | STAGES,
    "pp-overlap": POLICY_FLAGS | STAGES | OVERLAP,
    "pp-native": POLICY_FLAGS | STAGES | NATIVE,
    "pp-gspo": GSPO_FLAGS | STAGES,
    "pp-custom": CUSTOM_FLAGS | STAGES,
    **{
        f"{kind}-{name}": flags | layout
        for name, flags in SHELF.items()
        for kind, layout in {"dp": {}, "tp": TENSOR, "cp": CONTEXT, "pp": STAGES}.items()
    },
}
FOUR: dict[str, dict[str, Any]] = {
    "cp4-empty": ONE_SAMPLE_FLAGS | {"context_parallel_size": 4},
    "cp-sp": POLICY_FLAGS | CONTEXT | SEQUENCE,
    "cp-sp-empty": ONE_SAMPLE_FLAGS | CONTEXT | SEQUENCE,
    "cp-tp": POLICY_FLAGS | CONTEXT | TENSOR,
    "cp-dp": POLICY_FLAGS | CONTEXT,
    "pp-sp": POLICY_FLAGS | STAGES | SEQUENCE,
    "pp-cp": POLICY_FLAGS | STAGES | CONTEXT,
    "pp-cp-gspo-native": GSPO_FLAGS | STAGES | CONTEXT | NATIVE,
    "pp-dp": POLICY_FLAGS | STAGES,
}
SAVED = ("one-policy", "pp", "cp", "pp-cp", "pp-sp")
"""Layouts that save a checkpoint after their rollout. They and a single rank continue it with another rollout."""

RESUMED = {"pp": 2, "cp": 2, "pp-cp": 4, "pp-sp": 4}
"""Layouts that also start from the checkpoint of a single rank."""

PLUG_INS = {"cp-sequence", "cp-mismatch"}
"""Examples of hooks that gather and slice over context parallelism (examples/plugins)."""

SHORT = {"dp", "tp-custom", "cp", "cp-empty", "pp", "pp-gspo", "pp-sp"} | PLUG_INS
SHORT |= {"sp-provider", "cp-provider", "tp-sapo", "cp-gmpo", "dp-clip_cov", "dp-kl_cov", "pp-rloo"}
"""The layouts of the short suite: every kind of parallelism, alone and with another kind; the others run with --all."""


def layouts(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow, id=name) for name in names]


LAYOUTS = layouts((*TWO, *FOUR))
SINGLE = {
    "policy": POLICY_FLAGS,
    "per-token": TWO["dp-per-token"],
    "custom": CUSTOM_FLAGS,
    "gspo": GSPO_FLAGS,
    "empty": ONE_SAMPLE_FLAGS,
    "sequence": SEQUENCE_LOSS,
    "mismatch-gspo": MISMATCH_GSPO,
    "mismatch": MISMATCH_FLAGS,
    **SHELF,
}


def same_as(layout: str) -> str:
    """Returns the one-rank run that a layout is compared with; it uses the one-pass operator if the loss allows it."""
    return max((name for name in SINGLE if name in layout), key=len, default="policy")


def samples_of(layout: str) -> list[Sample]:
    """Returns a layout's samples. In "empty", one rank predicts some responses alone, and a response of 3 tokens has
    fewer tokens than runs."""
    samples = make_samples()
    if "empty" in layout:
        for i, sample in enumerate(samples):
            response = 1 + i % 3
            sample.tokens = [*range(1, 1 + 2 * (i % 8)), *range(40, 42 + response)]
            sample.response_length = response
            sample.loss_mask = sample.loss_mask[:response]
            sample.rollout_log_probs = sample.rollout_log_probs[:response]
    return samples


def run(name: str, flags: dict[str, Any], root: Path, rank: int, ranks: int) -> dict[str, Any]:
    """Trains one rollout with all its steps, and returns the rank's metrics, weights and published file."""
    config = make_config(
        root,
        check_weight_update_equal=True,
        actor_num_gpus_per_node=ranks,
        **{"weight_dir": str(root / f"weights-{name}"), "save": str(root / f"save-{name}"), **flags},
    )
    trainer = MegatronTrainer(config, rank, ranks, init_method=f"file://{root}/store-{name}", local_rank=rank)
    info = trainer.info
    data = rank_data(config, samples_of(name), info.dp_rank, info.dp_size)
    samples = len(data["tokens"])
    batches = [trainer.batches.pack(data, places, training=False) for places in data["micro_batch_indices"]]
    result = trainer.train(0, data)
    update = trainer.next_weights(1, {})
    assert trainer.next_weights(1, {}) is None
    out = {
        "steps": result.steps,
        "perf": result.perf,
        "progress": trainer.progress,
        "micro_batches": len(batches),
        "rollout": result.rollout,
        "samples": samples,
        "rows": [len(batch.rows) for batch in batches],
        "tokens": [len(batch.part.tokens) for batch in batches],
        "held": sum(data["total_lengths"]),
        "weights": exported(trainer),
        "path": update.info.get("path"),
        "checksums": update.info.get("checksums"),
    }
    if name in SAVED:
        trainer.save(0)
        trainer.train(1, rank_data(config, make_samples(1), info.dp_rank, info.dp_size))
        out["next"] = exported(trainer)
    trainer.close()
    return out


def resumed(name: str, saved: str, root: Path, rank: int, ranks: int) -> dict[str, Tensor]:
    """Returns the weights of layout `name` after rollout 1, from the checkpoint that `saved` wrote."""
    flags = (SINGLE | TWO | FOUR)[name]
    store = f"file://{root}/store-{name}-from-{saved}"
    config = make_config(
        root, actor_num_gpus_per_node=ranks, **(flags | {"load": str(root / f"save-{saved}")})
    )
    trainer = MegatronTrainer(config, rank, ranks, init_method=store, local_rank=rank)
    assert trainer.start_rollout_id == 1
    trainer.train(1, rank_data(config, make_samples(1), trainer.info.dp_rank, trainer.info.dp_size))
    weights = exported(trainer)
    trainer.close()
    return weights


def work(rank: int, root: Path, ranks: int, chosen: set[str]) -> None:
    layouts = {name: flags for name, flags in {2: TWO, 4: FOUR}[ranks].items() if name in chosen}
    out = {name: run(name, flags, root, rank, ranks) for name, flags in layouts.items()}
    if ranks == 2:
        out["tp-custom"]["logits"] = cases.CALLS[0][2]
    for name in (name for name, count in RESUMED.items() if count == ranks and name in chosen):
        out[name]["resumed"] = resumed(name, "one-policy", root, rank, ranks)
    torch.save(out, root / f"rank{rank}-of-{ranks}.pt")


@pytest.fixture(scope="module")
def chosen(request):
    """Returns the layouts to run: those of the short suite, unless a test marked slow runs."""
    return {*TWO, *FOUR} if any(item.get_closest_marker("slow") for item in request.session.items) else SHORT


@pytest.fixture(scope="module")
def one(root, chosen):
    names = {same_as(layout) for layout in chosen}
    return {name: run(f"one-{name}", flags, root, 0, 1) for name, flags in SINGLE.items() if name in names}


@pytest.fixture(scope="module")
def several(root, one, chosen):
    """Returns each rank's results, by layout."""
    found: dict[str, list[dict[str, Any]]] = {}
    for ranks in (2, 4):
        on_ranks(work, root, ranks, chosen, ranks=ranks)
        parts = [torch.load(root / f"rank{rank}-of-{ranks}.pt") for rank in range(ranks)]
        found |= {layout: [part[layout] for part in parts] for layout in parts[0]}
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_ranks_train_as_one(one, several, layout):
    wanted = one[same_as(layout)]
    for got in several[layout]:
        assert len(got["steps"]) == len(wanted["steps"])
        for a, b in zip(got["steps"], wanted["steps"], strict=True):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
        assert got["rollout"] == pytest.approx(wanted["rollout"], rel=1e-4, abs=1e-6)
        for name, tensor in wanted["weights"].items():
            torch.testing.assert_close(got["weights"][name], tensor, rtol=0, atol=1e-5, msg=name)
            assert torch.equal(got["weights"][name], several[layout][0]["weights"][name]), name


@pytest.mark.parametrize("layout", layouts(RESUMED))
def test_checkpoints_fit_other_layouts(root, one, several, layout):
    """Several ranks continue one rank's checkpoint, and the reverse. All equal one rank without a stop."""
    by_one = resumed("policy", layout, root, 0, 1)
    for name, wanted in one["policy"]["next"].items():
        for got in (by_one, several[layout][0]["next"], several[layout][-1]["resumed"]):
            torch.testing.assert_close(got[name], wanted, rtol=0, atol=1e-5, msg=name)


def test_the_steps_moved_the_weights(root, one):
    """The weights moved by far more than the tolerance of the comparison above."""
    start = load_file(root / "policy/model.safetensors")
    for result in one.values():
        assert all((t - start[n]).abs().max() > 1e-4 for n, t in result["weights"].items() if t.dim() > 1)


def test_data_parallel_ranks_share_the_samples(one, several):
    assert one["policy"]["samples"] == 9
    assert min(r["samples"] for r in several["dp"]) >= 3
    parts = {"dp": 1, "tp": 2, "cp": 2, "pp": 2, "cp-dp": 2, "pp-dp": 2, "pp-cp": 4}
    for layout, each in ((layout, parts[layout]) for layout in parts if layout in several):
        assert sum(r["samples"] for r in several[layout]) == 9 * each, layout


def test_context_parallel_ranks_share_the_rows(one, several):
    """Each response token belongs to one rank. The ranks have similar work, and a rank without work is intended."""
    sizes = {"cp": 2, "cp-empty": 2, "cp4-empty": 4}
    for layout, ranks in ((layout, sizes[layout]) for layout in sizes if layout in several):
        single = one[same_as(layout)]
        for kind, wanted in (("rows", sum(single["rows"])), ("tokens", single["held"])):
            assert sum(sum(r[kind]) for r in several[layout]) == wanted, (layout, kind)
        assert len(several[layout]) == ranks
    for first, second in zip(*(r["tokens"] for r in several["cp"]), strict=True):
        assert abs(first - second) <= 0.1 * (first + second)
    assert min(min(r["rows"]) for r in several["cp-empty"]) == 0
    if "cp4-empty" in several:
        assert min(min(r["tokens"]) for r in several["cp4-empty"]) == 0


PARTS = (
    "pack",
    "forward",
    "policy_loss",
    "backward",
    "pipeline_wait",
    "reduce_grads",
    "optimizer",
    "step_metrics",
)


@pytest.mark.parametrize("layout", layouts(["dp", "sp", "cp", "pp", "pp-cp"]))
def test_parts_of_training_cover_it_on_every_rank(several, layout):
    """test_timers_trainer.py checks one rank to 2%. Here processes also wait for a core between parts."""
    covered = [
        sum(r["perf"].get(f"perf/{part}_time", 0.0) for part in PARTS) / r["perf"]["perf/actor_train_time"]
        for r in several[layout]
    ]
    assert max(covered) > 0.93 and all(share <= 1 for share in covered), covered


def test_progress_ends_at_the_end(one, several):
    for results in ([one["policy"]], several["dp"], several["cp"], several["pp"]):
        for result in results:
            assert result["progress"] == (result["micro_batches"],) * 2


def test_figures_of_a_pipeline_are_those_of_its_last_stage(several):
    """Rank 0, whose metrics the run reports, has no head. Its stages wait for each other, and this time has a name."""
    for first, last in (several["pp"], several["pp-gspo"]):
        calls = {name: n for name, n in first["perf"].items() if name.startswith("rl_kernel/")}
        assert calls == {name: n for name, n in last["perf"].items() if name.startswith("rl_kernel/")}
        assert calls["rl_kernel/linear_logp/calls"] > 0
        assert "perf/policy_loss_time" in last["perf"] and "perf/policy_loss_time" not in first["perf"]
        assert first["perf"]["perf/pipeline_wait_time"] > 0
    assert "perf/pipeline_wait_time" not in several["cp"][0]["perf"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rank_0_publishes_the_whole_model(several, layout):
    first, *others = several[layout]
    assert all(other["path"] is None for other in others)
    published = load_file(first["path"])
    assert published.keys() == first["checksums"].keys() == first["weights"].keys()
    for name, tensor in first["weights"].items():
        assert torch.equal(published[name], tensor), name


def test_custom_loss_sees_its_part_of_the_vocabulary(several):
    """99 entries are padded to 256 = 2 x 128. The padding has no part in the softmax (compared above)."""
    assert [r["logits"][1] for r in several["tp-custom"]] == [128, 128]


def test_plug_ins_did_what_they_are_for(one):
    """The plug-ins weighted and dropped responses and moved ratios, so the comparison above means something."""
    steps = one["mismatch"]["steps"]
    assert any(0 < step["train/rs_dropped"] < 1 for step in steps)
    assert all(step["train/tis_weight"] != pytest.approx(1.0, abs=1e-3) for step in steps)
    # The second step starts from the same old log-probs, so the loss of sequences differs from that of tokens.
    assert one["sequence"]["steps"][1]["train/loss"] != pytest.approx(
        one["policy"]["steps"][1]["train/pg_loss"]
    )


def test_the_shelf_did_what_it_is_for(one):
    """As above: tokens were dropped, masked and chosen, and the losses differ from GRPO's."""
    plain = one["policy"]["steps"][1]["train/pg_loss"]
    for name in SHELF.keys() & one.keys():
        steps, rollout = one[name]["steps"], one[name]["rollout"]
        assert steps[1]["train/pg_loss"] != pytest.approx(plain, rel=1e-4), name
        assert steps[0].get("train/rs_dropped", 0.1) > 0.01, name
        assert rollout.get("rollout/chosen_tokens", 0.1) > 0.01, name
    assert one["sapo"]["steps"][0]["train/tis_clipfrac"] > 0
    assert 0 < one["sapo"]["rollout"]["rollout/mismatch_ess"] < 1
