"""Plans the launch scripts of slime. slime_launches.json has the arguments that they pass, and config.json of a similar
checkpoint with its quantisation.

Small stand-ins replace checkpoints, prompt files and hooks. A conversation for SFT has an answer.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from make_model import build_tokenizer, save_tokenizer

from slime.config import Config
from vime.backends import parse_config
from vime.cli import main

LAUNCHES: dict[str, dict] = {
    row["name"]: row
    for row in json.loads(Path(__file__).with_name("slime_launches.json").read_text(encoding="utf-8"))
}
REFUSED = {
    "examples/delta_weight_sync/run-glm4.7-30B-A3B-delta.sh": "got 2 stages for 47 layers; change the number of stages",
    "scripts/run-deepseek-r1.sh": "got 18432 rows / 64 = 288 in model.layers.0.mlp.gate_proj; use 16",
    "scripts/run-glm5-744B-A40B.sh": "got 'glm_moe_dsa'; docs/adding-a-model.md shows how to add a family",
    "scripts/run-kimi-k2-Instruct.sh": "--hf-checkpoint must be given (a Hugging Face checkpoint directory), got none",
}
"""Script -> part of the error. slime does not start the first script either, because Megatron divides layers equally.
For DeepSeek-R1, SGLang computes dense layers on one rank (--sglang-moe-dense-tp-size). vLLM splits them over 64 ranks.
The last script lacks a backslash, so it passes only five arguments."""
QUANTISED = {
    "scripts/low_precision/run-kimi-k2-Thinking-int4.sh": "int4 in groups of 32",
    "scripts/low_precision/run-moonlight-16B-A3B-int4.sh": "int4 in groups of 32",
    "scripts/low_precision/run-qwen3-30B-A3B-int4.sh": "int4 in groups of 32",
    "scripts/low_precision/run-qwen3-30b-a3b-fp8.sh": "fp8 in blocks of 128 x 128",
    "scripts/run-kimi-k2-Thinking.sh": "int4 in groups of 32",
}
CONVERSATION = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
ROW = {
    **dict.fromkeys(("prompt", "question", "text", "input", "problem"), "1+1?"),
    **{"label": "2", "answer": "2", "messages": CONVERSATION, "index": "0", "instance_id": "a"},
    **{"metadata": {"a": 1}, "tools": ["a"], "reward_model": {"ground_truth": {"target": ["2"]}}},
}


def write_checkpoint(folder: Path, hf_config: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config))


def write_converted(folder: Path) -> None:
    (folder / "release").mkdir(parents=True, exist_ok=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    (folder / "release" / ".metadata").touch()


def write_prompts(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pa.parquet.write_table(pa.Table.from_pylist([ROW] * 512), file)
    else:
        file.write_text((json.dumps(ROW) + "\n") * 512)


def write_hook(folder: Path, path: str) -> None:
    *modules, function = path.split(".")
    file = folder.joinpath(*modules).with_suffix(".py")
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as module:
        module.write(f"async def {function}(args, sample, *rest, **more):\n    return sample\n")


def prepare(name: str, root: Path) -> list[str]:
    """Returns the arguments of a script over stand-ins in `root`."""
    launch = LAUNCHES[name]
    argv = [re.sub(r"^(\./|/)(?=\w)", f"{root}/", word) for word in launch["argv"].split()]
    for flag, value in itertools.pairwise(argv):
        if flag == "--hf-checkpoint":
            write_checkpoint(Path(value), launch["hf_config"])
        elif flag in ("--ref-load", "--opd-teacher-load"):
            write_converted(Path(value))
        elif re.fullmatch(r"--(custom-.*|.*-function|.*-filter)-path", flag) and not value.startswith(
            "slime."
        ):
            write_hook(root / "hooks", value)
    for word in argv:
        if word.startswith(str(root)) and Path(word).suffix in (".jsonl", ".parquet"):
            write_prompts(Path(word))
    return argv


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch):
    """Makes the modules of `write_hook` importable, and removes them from this process afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path / "hooks"))
    yield
    folder = str(tmp_path / "hooks")
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
            del sys.modules[name]


def read(name: str, root: Path) -> Config:
    return parse_config(prepare(name, root))


@pytest.mark.parametrize("name", QUANTISED)
def test_a_quantized_checkpoint_keeps_its_scheme(name, tmp_path, hooks):
    config = read(name, tmp_path)
    (note,) = [note for note in config.notes if "keep the weights of --hf-checkpoint in" in note]
    assert note.startswith(
        f"the engines keep the weights of --hf-checkpoint in {QUANTISED[name]}, and the trainer has"
    )
    assert ("; --use-tis weights the loss" in note) is not config.off_policy.use_tis


def test_training_in_fp8_is_noted_for_a_model_with_experts(tmp_path, hooks):
    config = read("scripts/low_precision/run-qwen3-30b-a3b-fp8.sh", tmp_path)
    (note,) = [note for note in config.notes if "--fp8-format" in note]
    assert note == (
        "--transformer-impl transformer_engine, --fp8-format e4m3, --fp8-recipe blockwise: without effect for a model "
        "with experts, whose layers are the trainer's own; it computes in bfloat16, which is more exact than fp8 and "
        "slower"
    )
    assert not {"transformer_impl", "fp8", "fp8_recipe"} & config.megatron.overrides.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_the_other_scripts_are_refused_with_a_reason(name, tmp_path, hooks):
    with pytest.raises(ValueError) as error:
        read(name, tmp_path)
    assert REFUSED[name] in str(error.value)


@pytest.mark.parametrize("name", [name for name in LAUNCHES if name not in REFUSED | QUANTISED])
def test_the_flags_of_a_script_are_accepted_as_they_stand(name, tmp_path, hooks):
    assert read(name, tmp_path).rollout.hf_checkpoint


@pytest.mark.slow
def test_25_of_29_launch_scripts_are_planned_as_they_stand(tmp_path, hooks, capsys):
    refused = {}
    for name in LAUNCHES:
        prepare(name, tmp_path)
    for config in tmp_path.rglob("config.json"):
        save_tokenizer(build_tokenizer(300, 260), config.parent, 4096)
    for name in LAUNCHES:
        if main(["plan", *prepare(name, tmp_path)]) != 0:
            refused[name] = capsys.readouterr().err
    assert not {n: t[-300:] for n, t in refused.items() if n not in REFUSED}
    assert refused.keys() == REFUSED.keys()
    assert len(LAUNCHES) - len(refused) == 25
    assert not [text for text in refused.values() if "Traceback" in text]
