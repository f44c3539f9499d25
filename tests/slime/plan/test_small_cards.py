"""A launcher adds flags so that a card of 24 GB is enough for the 0.5B, the 1.7B and, with adapters, the 4B."""

from pathlib import Path

import plan_examples
import pytest

from slime.checkpoints.hf_config import read_hf_config
from slime.config import Config
from vime.memory.choose import PLAN, light_config, main
from vime.memory.lines import whole_fit
from vime.memory.sizes import for_gpus, machine_sizes, take_sizes

ONE = "--device cuda --actor-num-gpus-per-node 1 --num-gpus-per-node 1"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def chosen(folder: Path, capsys, file: str, user: list[str], layout: str = "") -> tuple[str, float, Config]:
    """Returns the flags that the launcher adds, the bytes that still do not fit, and the configuration."""
    model = plan_examples.write_model(file.partition("/")[0], folder)
    argv = [*plan_examples.flags(plan_examples.EXAMPLES / file, model), *ONE.split(), *layout.split()]
    assert main([PLAN, *argv, "--", *user]) == 0
    found = capsys.readouterr().out.strip()
    flags, sizes = take_sizes([*argv, *found.split(), *user])
    c = light_config(for_gpus(flags, sizes.gpu))
    return found, whole_fit(c, read_hf_config(str(model)), machine_sizes(c, sizes)).over, c


@pytest.mark.parametrize("size", ["--gpu-memory-gib 24", "--gpu rtx4090", "--gpu l4", "--gpu a10"])
@pytest.mark.parametrize("model", ["qwen2.5-0.5b", "qwen3-1.7b"])
def test_full_training_fits_a_card_of_24_gb(tmp_path, capsys, model, size):
    """The responses have 8192 tokens. A host of 64 GiB is enough."""
    user = [*size.split(), "--host-memory-gib", "64"]
    found, over, c = chosen(tmp_path, capsys, f"{model}/colocated.yaml", user)
    assert over <= 0 and c.data.max_tokens_per_gpu >= c.rollout.rollout_max_response_len == 8192
    assert (RECOMPUTE in found) == ("--optimizer-cpu-offload" in found) == (model == "qwen3-1.7b")


def test_the_4b_fits_with_adapters(tmp_path, capsys):
    for size in ("--gpu-memory-gib 24", "--gpu rtx4090"):
        user = [*size.split(), "--host-memory-gib", "32"]
        found, over, c = chosen(tmp_path, capsys, "qwen3-4b/lora.yaml", user)
        assert over <= 0 and c.lora.lora_rank == 32 and "--optimizer-cpu-offload" not in found


def test_recomputation_and_offloading_are_the_last_choices_and_the_users_stay(tmp_path, capsys):
    on_card = ["--gpu-memory-gib", "24", "--host-memory-gib", "64"]
    small, file = [*on_card, "--no-optimizer-cpu-offload"], "qwen3-1.7b/colocated.yaml"
    assert chosen(tmp_path, capsys, file, [*on_card, "--recompute-granularity", "selective"])[0] == ""
    assert chosen(tmp_path, capsys, file, small)[0] == ""
    kept, over, _ = chosen(tmp_path, capsys, file, on_card, layout="--no-offload-train")
    assert "--offload-train --recompute" in kept and over <= 0
    assert "--offload-train" not in chosen(tmp_path, capsys, file, [*on_card, "--no-offload-train"])[0]
    large = ["--gpu", "h200", "--host-memory-gib", "500"]
    assert chosen(tmp_path, capsys, file, large, layout="--no-offload-train")[0] == ""
    share = [*on_card, "--vllm-gpu-memory-utilization", "0.5"]
    parts = chosen(tmp_path, capsys, file, share, layout="--offload-train-parts gradients")
    assert (
        "--offload-train --offload-train-parts gradients parameters optimizer" in parts[0] and parts[1] <= 0
    )
