"""The trainer's state leaves its device and comes back with every byte; readers meanwhile get the right values.

The device is the host here. tests/gpu/test_offload_gpu.py tests a GPU and the speed.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from rank_processes import on_ranks
from safetensors.torch import load_file
from torch import Tensor
from trainer_cases import exported, make_config, make_samples, rank_data, train

from slime.megatron_backend.step.out_of_memory import missing_bytes
from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.megatron_backend.storages import iter_gradients, iter_parameters, iter_states

AWAY = {"colocate": True, "offload_train": True}
MIXED = {"fp32": False, "bf16": True}
REFERENCE = {"use_kl_loss": True, "kl_loss_coef": 0.1}


def publish(trainer: MegatronTrainer, version: int) -> dict[str, Tensor]:
    """Publishes a version and returns the tensors that engines get."""
    update = trainer.next_weights(version, {})
    assert trainer.next_weights(version, {}) is None
    return load_file(update.info["path"])


def run(trainer: MegatronTrainer, rollouts: int = 3) -> tuple[list[Any], list[dict[str, Tensor]]]:
    steps, weights = [], [publish(trainer, 0)]
    for i in range(rollouts):
        steps.append(train(trainer, i, seed=i)[0].steps)
        weights.append(publish(trainer, i + 1))
    return steps, weights


def assert_same(got: list[dict[str, Tensor]], wanted: list[dict[str, Tensor]]) -> None:
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert a.keys() == b.keys()
        for name, tensor in b.items():
            assert torch.equal(a[name], tensor), name


@pytest.mark.parametrize(
    "flags",
    [
        {},
        REFERENCE | {"ref_update_interval": 1},
        MIXED | REFERENCE,
        MIXED | {"use_distributed_optimizer": False},
        {"use_distributed_optimizer": False, "overrides": {"overlap_grad_reduce": True}},
        MIXED | {"overrides": {"grad_reduce_in_fp32": False}},
        {"check_weight_update_equal": True},
    ],
    ids=[
        *("fp32", "moving-reference", "bf16-reference", "bf16-plain", "fp32-plain-overlap", "bf16-gradients"),
        "checksums",  # numpy has seen the weights
    ],
)
def test_training_is_bit_for_bit_that_of_a_trainer_that_stays(build, flags):
    steps, weights = run(build(**flags))
    trainer = build(**flags, **AWAY)
    assert trainer.policy.residence.away == {
        "parameters",
        "gradients",
        "optimizer",
    }  # before any engine starts
    got_steps, got_weights = run(trainer)
    assert got_steps == steps
    assert_same(got_weights, weights)
    # The training changed it.
    assert not torch.equal(*(w["model.norm.weight"] for w in (weights[0], weights[3])))
    assert trainer.policy.residence.away == {"parameters", "gradients", "optimizer"}


@pytest.mark.parametrize("flags", [{}, MIXED, MIXED | {"use_distributed_optimizer": False}])
def test_all_of_the_state_leaves(build, flags):
    """Only step counts keep bytes, and the sizes of the three parts are as calculated."""
    trainer = build(**flags, **REFERENCE, **AWAY)
    models = [trainer.policy.model, trainer.models["reference"]]
    tensors = [*iter_parameters(models), *iter_gradients(models), *iter_states(trainer.policy.optimizer)]
    assert sum(t.untyped_storage().nbytes() for t in tensors) == 0
    numbers = sum(p.numel() for p in trainer.policy.model.parameters())
    size = 2 if flags else 4
    # Megatron pads the flat buffers; torch may round up a storage.
    assert trainer.policy.residence.nbytes("parameters") == pytest.approx(2 * size * numbers, rel=0.02)
    assert trainer.policy.residence.nbytes("gradients") == pytest.approx(4 * numbers, rel=0.02)
    assert trainer.policy.residence.nbytes("optimizer") == pytest.approx(
        (12 if flags else 8) * numbers, rel=0.02
    )
    trainer.policy.residence.bring("gradients")
    assert all(not t.any() for t in iter_gradients(models))
    trainer.policy.residence.bring("parameters", "optimizer")
    assert sum(t.untyped_storage().nbytes() for t in tensors) > 0 and not trainer.policy.residence.away


@pytest.mark.parametrize("part", ["gradients", "parameters", "optimizer"])
def test_parts_are_separate(build, part):
    steps, weights = run(build())
    trainer = build(**AWAY, offload_train_parts=[part])
    assert trainer.policy.residence.away == {part}
    got_steps, got_weights = run(trainer)
    assert got_steps == steps
    assert_same(got_weights, weights)


def test_when_a_part_is_where(build):
    trainer = build(**AWAY)
    seen = []
    trainer._train = lambda *args, real=trainer._train: (
        seen.append(trainer.policy.residence.away) or real(*args)
    )
    train(trainer)
    assert seen == [frozenset()]
    assert trainer.policy.residence.away == {"gradients", "optimizer"}
    trainer.next_weights(1, {})
    assert trainer.policy.residence.away == {"gradients", "optimizer"}
    trainer.next_weights(1, {})
    assert trainer.policy.residence.away == {"gradients", "optimizer", "parameters"}


def test_an_engine_that_comes_back_reads_the_host_copy(build):
    trainer = build(**AWAY)
    train(trainer)
    wanted = exported(trainer)
    assert_same([load_file(trainer.weights_file().info["path"])], [wanted])  # between training and publishing
    publish(trainer, 1)
    assert "parameters" in trainer.policy.residence.away
    assert_same([load_file(trainer.weights_file().info["path"])], [wanted])
    assert trainer.policy.residence.away == {
        "gradients",
        "optimizer",
        "parameters",
    }  # nothing had to come back


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, MIXED, MIXED | {"use_distributed_optimizer": False}])
def test_a_run_that_is_saved_while_its_state_is_away_goes_on_as_if_never_ended(build, tmp_path, root, flags):
    saving = {"save": str(tmp_path / "save"), "save_hf": str(tmp_path / "hf")}
    trainer = build(**flags, **AWAY, **saving)
    train(trainer, 0)
    publish(trainer, 1)
    trainer.save(0)
    assert trainer.policy.residence.away == {"gradients", "optimizer", "parameters"}
    saved = load_file(tmp_path / "hf" / "model.safetensors")
    assert_same([saved], [publish(trainer, 1)])
    train(trainer, 1, seed=1)
    wanted = publish(trainer, 2)
    resumed = build(**flags, **AWAY, load=saving["save"])
    assert resumed.start_rollout_id == 1
    train(resumed, 1, seed=1)
    assert_same([publish(resumed, 2)], [wanted])


def test_times_and_speed_are_reported(build):
    trainer = build(**AWAY)
    publish(trainer, 0)
    train(trainer)
    publish(trainer, 1)
    second = train(trainer, 1)[0].perf
    for name in (
        "offload_time",
        "onload_time",
        "weights_offload_time",
        "offload_gib_per_s",
        "onload_gib_per_s",
    ):
        assert second[f"perf/{name}"] > 0
    moved = second["perf/onload_gib_per_s"] * second["perf/onload_time"] * 2**30
    assert moved == pytest.approx(
        sum(trainer.policy.residence.nbytes(part) for part in ("parameters", "optimizer"))
    )
    assert not any("load_" in name for name in train(build())[0].perf)


def run_out(*args: Any) -> None:
    """A hook that allocates more memory than the host has."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 EiB.")


def test_out_of_memory_names_peaks_and_flags(build):
    trainer = build(colocate=True, custom_megatron_before_train_step_hook_path="test_residence.run_out")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train(trainer, 4)
    text = str(pickle.loads(pickle.dumps(caught.value)))  # as Ray sends it to the driver
    assert text.startswith(
        "out of device memory while training rollout 4: CUDA out of memory. Tried to allocate 2.00"
    )
    for words in (
        "\nthis rank keeps, by its shapes: weights ",
        "peaks so far, GiB: none measured on this device; the estimate of a step was 0.0",
        "\nwhat lowers it: ",
    ):
        assert words in text, text


def nccl_runs_out(*args: Any) -> None:
    """A hook that fails as NCCL does on a full card."""
    raise RuntimeError(
        "NCCL error in: ProcessGroupNCCL.cpp:3, unhandled cuda error\nCuda failure 2 'out of memory'"
    )


def other_fault(*args: Any) -> None:
    raise RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:3, remote process exited")


def test_a_full_card_in_nccl_is_explained_and_other_faults_are_not(build):
    trainer = build(colocate=True, custom_megatron_before_train_step_hook_path="test_residence.nccl_runs_out")
    with pytest.raises(torch.OutOfMemoryError, match="while training rollout 2: NCCL error in"):
        train(trainer, 2)
    trainer = build(colocate=True, custom_megatron_before_train_step_hook_path="test_residence.other_fault")
    with pytest.raises(RuntimeError, match="^NCCL error in: .*, remote process exited$"):
        train(trainer, 2)


@pytest.mark.parametrize(
    ("said", "gib"),
    [
        ("CUDA out of memory. Tried to allocate 3.50 GiB. GPU 0 has", 3.5),
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has", 2),
        ("Cuda failure 2 'out of memory'", 2),
        ("Tried to allocate 2.00 EiB.", 1024),
    ],
)
def test_what_was_missing_is_read_from_the_error(said, gib):
    assert missing_bytes(said) == gib * 2**30


def work(rank: int, root: Any) -> None:
    out = {}
    for layout, flags in LAYOUTS.items():
        for name, more in (("stays", {}), ("leaves", AWAY)):
            key = f"{layout}-{name}"
            flags_of_run = {"actor_num_gpus_per_node": 2, **flags, **more}
            config = make_config(root, weight_dir=str(root / f"weights-{key}"), **flags_of_run)
            trainer = MegatronTrainer(
                config, rank, 2, init_method=f"file://{root}/store-{key}", local_rank=rank
            )
            info, path = trainer.info, None
            for i in range(2):
                data = rank_data(config, make_samples(i), info.dp_rank, info.dp_size)
                result = trainer.train(i, data)
                path = trainer.next_weights(i + 1, {}).info.get("path")
                assert trainer.next_weights(i + 1, {}) is None
            again = trainer.weights_file().info.get("path")
            files = [] if path is None else [load_file(path), load_file(again)]
            out[layout, name] = {
                "steps": result.steps,
                "files": files,
                "away": set(trainer.policy.residence.away),
            }
            trainer.close()
    torch.save(out, root / f"offload-rank{rank}.pt")


LAYOUTS = {
    "dp": MIXED,
    "tp": {"tensor_model_parallel_size": 2},
    "pp": {"pipeline_model_parallel_size": 2},
}


def test_two_ranks(root):
    """Moments are sharded, a tensor-parallel export gathers shards, and there are stages. Results equal those of a
    run without offload, and files come from the host."""
    on_ranks(work, root, ranks=2)
    found = [torch.load(root / f"offload-rank{rank}.pt") for rank in range(2)]
    for layout in LAYOUTS:
        for rank in range(2):
            stays, leaves = found[rank][layout, "stays"], found[rank][layout, "leaves"]
            assert leaves["steps"] == stays["steps"]
            assert leaves["away"] == {"parameters", "gradients", "optimizer"} and not stays["away"]
            assert_same(leaves["files"], stays["files"])
        assert len(found[0][layout, "leaves"]["files"]) == 2
