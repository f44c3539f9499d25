"""Tests `vime audit` without an engine: its inputs, its errors, the replay, the table, the picture."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import matplotlib.image
import pytest
import torch
import transformers

from slime.megatron_backend.step.replay import replay_log_probs
from slime.rollout.debug_data import save_debug_rollout_data
from slime.rollout.facts import run_facts
from slime.rules.resolve import resolve
from slime.types import Sample
from vime.audit.command import DECODE, PREFILL, TRAINING, table_rows, trainer_layouts
from vime.audit.report import LogProbDifference, active, as_json, compare, draw, table
from vime.audit.source import find_weights, one_rank, read_source, saved_rollouts
from vime.cli import main

VOCAB = 99


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Qwen3Config(vocab_size=VOCAB, num_key_value_heads=2, head_dim=16, **shape)
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    return directory


def make_samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for index in range(8):
        tokens = torch.randint(0, VOCAB, (6 + index,), generator=generator).tolist()
        samples.append(
            Sample(
                index=index,
                group_index=index // 2,
                tokens=tokens,
                response_length=4,
                loss_mask=[1, 0, 1, 1],
                rollout_log_probs=[-1.0] * 4,
                weight_versions=[0],
                reward=float(index % 2),
                status=Sample.Status.COMPLETED,
            )
        )
    return samples


@pytest.fixture
def run(checkpoint, tmp_path):
    """Makes a run directory with the configuration of 4 x 2 samples per rollout, in rows of two samples."""
    values = {
        "hf_checkpoint": str(checkpoint),
        "run_dir": str(tmp_path),
        "save_debug_rollout_data": str(tmp_path / "rollouts" / "{rollout_id}.pt"),
        "device": "cpu",
        "fp32": True,
        "actor_num_gpus_per_node": 1,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "num_rollout": 4,
        "rollout_num_gpus": 1,
    }

    def make(samples=None, rollout_id=0, **changes):
        config = resolve(values | changes)
        config.save_json(tmp_path / "config.json")
        samples = make_samples() if samples is None else samples
        facts = run_facts(config)
        save_debug_rollout_data(config.debug.save_debug_rollout_data, rollout_id, [samples], facts=facts)
        return config

    return make


def test_the_rows_of_training_are_the_start(run, tmp_path):
    source = read_source(tmp_path, run(), None, 3)
    assert (source.rollout_id, source.version, source.left_out) == (0, 0, Counter())
    assert [s.index for s in source.samples] == [0, 1, 2, 3] and source.micro_batches == [[0, 1], [2, 3]]
    assert len(read_source(tmp_path, run(), None, 1).micro_batches) == 2, "layouts need two rows"
    assert len(read_source(tmp_path, run(), None, 99).samples) == 8


def test_samples_of_other_weights_are_left_out(run, tmp_path):
    samples = make_samples()
    for s in samples:
        s.weight_versions = [3]
    samples[1].weight_versions, samples[2].weight_versions = [2], [2, 3]
    source = read_source(tmp_path, run(samples), None, 99)
    assert source.version == 3 and source.left_out == {"weight_version": 6}
    assert [s.index for s in source.samples] == [0, 3, 4, 5, 6, 7]
    assert source.micro_batches == [[0], [1], [2, 3], [4, 5]]


def test_a_rollout_of_which_nothing_can_be_compared_is_refused(run, tmp_path):
    config = run(rollout_top_p=0.9)
    with pytest.raises(ValueError, match=r"rollout 0 must have samples .* got none \(top_p: 24 tokens\)"):
        read_source(tmp_path, config, None, 99)


def test_saved_rollouts_and_kept_batches_are_found(run, tmp_path):
    config = run(rollout_id=1)
    save_debug_rollout_data(str(tmp_path / "audit" / "{rollout_id}.pt"), 3, [make_samples()])
    assert list(saved_rollouts(tmp_path, config)) == [1, 3]
    trained_on = {
        "save_debug_rollout_data": None,
        "load_debug_rollout_data": config.debug.save_debug_rollout_data,
    }
    assert list(saved_rollouts(tmp_path, config.with_values(**trained_on))) == [1, 3]
    assert read_source(tmp_path, config, None, 99).rollout_id == 1
    with pytest.raises(ValueError, match=r"--rollout must be one of the saved \[1, 3\], got 2"):
        read_source(tmp_path, config, 2, 99)


def test_what_is_missing_is_said_with_what_to_add(run, tmp_path, capsys):
    assert main(["audit", str(tmp_path / "nothing")]) == 2
    assert "RUN_DIR must be a run directory of vime train, got no" in capsys.readouterr().err
    config = run()
    Path(config.debug.save_debug_rollout_data.format(rollout_id=0)).unlink()
    assert main(["audit", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "RUN_DIR must have saved rollouts" in said
    assert "--run-dir DIR of its own and --save-debug-rollout-data DIR/rollouts/{rollout_id}.pt" in said
    run()
    assert main(["audit", str(tmp_path), "--samples", "0"]) == 2
    assert "--samples must be at least 1, got 0" in capsys.readouterr().err


def test_weights_of_a_version(run, tmp_path, checkpoint):
    config = run(save=str(tmp_path / "save"), save_hf=str(tmp_path / "hf-{rollout_id}"))
    assert find_weights(config, 0, tmp_path) == str(checkpoint)
    other = config.with_values(ref_load=str(tmp_path / "other"))  # a trainer starts there, and no engine
    assert find_weights(other, -1, tmp_path) == str(checkpoint)
    with pytest.raises(
        ValueError, match=r"version 2 of the weights .* got no checkpoint 1 .* run again with --save-hf"
    ):
        find_weights(config, 2, tmp_path)
    (tmp_path / "hf-1").mkdir()
    (tmp_path / "hf-1" / "config.json").write_text("{}")
    assert find_weights(config, 2, tmp_path) == str(tmp_path / "hf-1")


def test_weights_of_another_version_are_never_taken(run, tmp_path, capsys):
    samples = make_samples()
    for s in samples:
        s.weight_versions = [1]
    run(samples, rollout_id=1)
    assert main(["audit", str(tmp_path)]) == 2
    assert "version 1 of the weights (after rollout 0) must be at hand" in capsys.readouterr().err


def test_the_replay_gives_the_log_probs_of_transformers_in_every_layout(run, tmp_path, checkpoint):
    config = run(rollout_temperature=0.7)
    samples = make_samples()
    layouts = trainer_layouts([[0, 1, 2], [3, 4], [5, 6, 7]])
    found = replay_log_probs(one_rank(config), str(checkpoint), samples, layouts)
    assert list(found) == list(layouts) and len(layouts) == 5
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    for values in found.values():
        for s, got in zip(samples, values, strict=True):
            tokens = torch.tensor(s.tokens)
            with torch.no_grad():
                logits = model(tokens[None]).logits[0, -5:-1] / 0.7
            wanted = torch.log_softmax(logits, -1).gather(-1, tokens[-4:, None])[:, 0]
            torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-5)


def test_layouts_pack_the_same_samples_differently():
    rows = [[0, 1, 2, 3], [4], [5, 6]]
    layouts = trainer_layouts(rows)
    assert layouts[TRAINING] == rows
    assert layouts["trainer, each sample alone"] == [[i] for i in range(7)]
    assert layouts["trainer, rows reordered"] == [[3, 2, 1, 0], [4], [6, 5]]
    assert layouts["trainer, rows split in half"] == [[0, 1], [2, 3], [4], [5], [6]]
    mixed = layouts["trainer, mixed over rows"]
    assert [len(row) for row in mixed] == [4, 1, 2] and sorted(i for row in mixed for i in row) == list(
        range(7)
    )
    assert set(mixed[0]) != {0, 1, 2, 3}


def test_a_pair_by_hand():
    a, b = torch.tensor([-1.0, -2.0, -3.0, -4.0]), torch.tensor([-1.0, -2.25, -2.5, -4.0])
    pair = compare("part", ("a", a), ("b", b))
    assert pair == LogProbDifference(
        "part", "a", "b", tokens=4, mean=0.1875, p99=0.5, max=0.5, bitwise_equal=2
    )


def test_masked_tokens_are_in_no_row():
    values = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0])]
    assert active(values, [[1, 0, 1], None]).tolist() == [1.0, 3.0, 4.0]


def made_pairs(prefill: bool = True) -> list[LogProbDifference]:
    base = -torch.arange(1.0, 101.0)
    trainer = {TRAINING: base, "trainer, each sample alone": base.clone()}
    engine = {PREFILL: base + 0.25, "engine prefill, one by one": (base + 0.25)[:10]}
    return table_rows(trainer, engine if prefill else {}, base + 0.375)


def test_the_difference_is_split():
    found = {(p.first, p.second): p for p in made_pairs()}
    assert found[TRAINING, DECODE].mean == pytest.approx(0.375)
    assert found[TRAINING, PREFILL].mean == pytest.approx(0.25)
    assert found[PREFILL, DECODE].mean == pytest.approx(0.125)
    assert found["engine prefill, one by one", PREFILL].tokens == 10
    without = made_pairs(prefill=False)
    assert [p.first for p in without] == [TRAINING, "trainer, each sample alone"]


def test_table_record_and_picture(tmp_path):
    pairs = made_pairs()
    lines = table(pairs).splitlines()
    assert lines[1] == "what training sees" and lines[3] == "its parts"
    assert lines[2].split()[-6:] == ["100", "3.8e-01", "3.8e-01", "3.8e-01", "0", "(0%)"]
    assert lines[7].split()[-2:] == ["100", "(100%)"]
    assert len({line.rindex("   ") for line in lines if line.startswith("  ")}) == 1, "columns are aligned"
    record = json.loads(json.dumps(as_json(pairs, rollout_id=3)))
    assert record["rollout_id"] == 3 and record["pairs"][0]["max"] == pytest.approx(0.375)
    draw(pairs, "title", tmp_path / "x.png")
    image = matplotlib.image.imread(tmp_path / "x.png")
    assert image.shape[1] > 800 and math.isfinite(float(image.mean())) and float(image.std()) > 0.01
