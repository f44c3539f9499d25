"""Tests make_model.py: published shapes, checkpoints that load, a tokenizer for every id, bytes that a seed fixes."""

from __future__ import annotations

import hashlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES
from hybrid_shapes import TEXT_ONLY
from make_model import (
    build_config,
    build_model,
    build_tokenizer,
    main,
    save_model,
    save_settings,
    stored_tensors,
    word,
)
from published_sizes import EXACT, LATENT, SHALLOW, SPARSE
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from slime.checkpoints.hf_config import check_checkpoint_shapes, largest_token_id, read_hf_config
from slime.config.config_file import split_argv
from slime.config.megatron_flags import MODEL_ARGS
from slime.megatron_backend.model.model_config import check_hf_config
from slime.models import family_for, read_decoder
from slime.plan.model_shape import Shape
from slime.rules.model_args import check_model_args

ROOT = Path(__file__).resolve().parents[2]


def make(folder: Path, *flags: str, arch: str = "qwen3-tiny") -> Path:
    main(["--arch", arch, "--device", "cpu", *flags, str(folder)])
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """Returns the folder of qwen3-50m with its data, as the command writes it."""
    return make(tmp_path_factory.mktemp("models") / "50m", "--random", "--arithmetic", arch="qwen3-50m")


@pytest.fixture(scope="module")
def big(tmp_path_factory) -> Path:
    """Returns the folder of a Qwen3-4B without its weights."""
    return make(tmp_path_factory.mktemp("models") / "4b", "--no-weights", arch="qwen3-4b")


@pytest.mark.parametrize("arch", EXACT)
def test_parameters_are_as_published(arch):
    model = build_model(build_config(arch), 0, "meta")
    parameters = model.num_parameters()
    embeddings = {m.weight for m in (model.get_input_embeddings(), model.get_output_embeddings())}
    body = parameters - sum(weight.numel() for weight in embeddings)
    assert parameters == EXACT[arch]
    for count, published in zip((parameters, body), ARCHITECTURES[arch].published or (), strict=False):
        digits = len(published.partition(".")[2])
        assert f"{count / 1e9:.{digits}f}" == published


def test_our_own_are_mostly_body():
    sizes = [("qwen3-50m", 30e6, 60e6), ("qwen3-tiny", 1e6, 2e6)]
    tiny = (
        "qwen3-moe",
        "qwen3-moe-blocks",
        "glm-moe",
        "llama",
        "mistral",
        "glm4",
        "minimax-m2",
        "qwen2-moe",
        "deepseek",
    )
    tiny += ("gemma2", "gemma3", "gpt-oss", "glm-5", "mimo", "olmo3", "seed-oss", "qwen3-5", "qwen3-next")
    tiny += ("nemotron-h",)
    sizes += [(f"{arch}-tiny", 1e6, 3e6) for arch in tiny]
    for arch, low, high in sizes:
        model = build_model(build_config(arch), 0, "meta")
        assert low < model.num_parameters() < high
        assert model.get_input_embeddings().weight.numel() < 0.06 * model.num_parameters()
    inexact = {"glm-4.5-air", "glm-4.5-355b", "glm-4-32b", "mimo-7b", "minimax-m2", *LATENT, *TEXT_ONLY}
    assert set(ARCHITECTURES) == {*EXACT, *inexact, *(arch for arch, _, _ in sizes)}
    assert all(row.source for row in ARCHITECTURES.values())


@pytest.mark.parametrize("arch", SPARSE)
def test_experts_are_known(arch):
    config = json.loads(build_config(arch).to_json_string(use_diff=False))
    check_hf_config(config)
    assert read_decoder(config).experts.count == ARCHITECTURES[arch].experts[0]
    dense = config.get("first_k_dense_replace", 0)
    assert list(read_decoder(config).sparse) == [False] * dense + [True] * (
        config["num_hidden_layers"] - dense
    )


@pytest.mark.parametrize("arch", SHALLOW)
def test_tensors_are_those_of_the_weight_table(arch):
    """One layer without weights has the names and shapes that the trainer expects for such a config.json."""
    config = build_config(arch, layers=1)
    stored = {name: tensor.shape for name, tensor in stored_tensors(build_model(config, 0, "meta"))}
    said = json.loads(config.to_json_string(use_diff=False)) | {"model_type": ARCHITECTURES[arch].family}
    family, decoder = family_for(said), read_decoder(said)
    numbers = [{"i": 0, "e": e} for e in range(decoder.experts.count if decoder.experts else 1)]
    table = {name.format(**n) for row in family.rows for name in row.hf for n in numbers}
    assert stored.keys() <= table
    missing = {re.sub(r"\d+", "N", name) for name in table - stored.keys()}
    optional = ("bias", "lm_head.weight")
    assert all(name.endswith(optional) for name in missing)
    matrices = sum(shape.numel() for shape in stored.values() if len(shape) == 2)
    assert matrices == Shape.from_decoder(decoder).params


@pytest.mark.parametrize("arch", ["qwen3-tiny", "qwen3-moe-tiny", "glm-moe-tiny"])
def test_every_token_has_an_embedding(arch):
    """If the padding token's embedding were zero, the gradients of an answer with it would be thousands of times
    larger."""
    weight = build_model(build_config(arch), 0, "cpu").get_input_embeddings().weight.detach()
    lengths = weight.float().norm(dim=-1)
    assert lengths.min() > 0.5 * lengths.mean()


@pytest.mark.parametrize(("arch", "layers"), [("qwen3-moe-tiny", 2), ("glm-moe-tiny", 1)])
def test_experts_are_written_one_by_one(tmp_path, arch, layers):
    model = build_model(build_config(arch), 5, "cpu")
    save_settings(model, tmp_path)
    assert save_model(model, tmp_path, max_file_bytes=2**20) > 5
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    experts = [name for name in index["weight_map"] if ".experts." in name]
    assert len(experts) == layers * 8 * 3 and "model.layers.1.mlp.experts.7.down_proj.weight" in experts
    biases = [name for name in index["weight_map"] if name.endswith("gate.e_score_correction_bias")]
    assert len(biases) == (arch == "glm-moe-tiny")
    assert index["metadata"]["total_size"] == 4 * (model.num_parameters() + 8 * len(biases))
    check_checkpoint_shapes(tmp_path, read_hf_config(tmp_path))
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    for (name, ours), (_, theirs) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


SCRIPTS = {path.stem.lower(): path for path in (ROOT / "scripts" / "models").glob("*.sh")}


@pytest.mark.parametrize("arch", sorted(SCRIPTS.keys() & ARCHITECTURES.keys()))
def test_the_trainer_and_model_args_know_the_shape(arch):
    """scripts/models/ has MODEL_ARGS of an architecture, and they agree with its config.json."""
    script = SCRIPTS[arch]
    words = subprocess.run(
        ["bash", "-c", 'source "$0"; printf "%s\\n" "${MODEL_ARGS[@]}"', str(script)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    given = {
        group.name: MODEL_ARGS[group.name].parse(group.values, group.typed) for group in split_argv(words)
    }
    config = json.loads(build_config(arch).to_json_string(use_diff=False))
    shape = (
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "vocab_size",
    )
    assert {*shape, "rotary_base", "norm_epsilon"} <= set(given)
    assert ("untie_embeddings_and_output_weights" in given) != ARCHITECTURES[arch].tied
    qwen3 = config["model_type"].startswith("qwen3")
    assert ("add_qkv_bias" in given) == (not qwen3)
    assert ("qk_layernorm" in given) == config.get("use_qk_norm", qwen3)
    routed = {"num_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_layer_freq"}
    assert routed & set(given) == (routed if arch in SPARSE else set())
    assert ("moe_shared_expert_intermediate_size" in given) == (config["model_type"] == "glm4_moe")
    check_model_args(given, config)
    check_hf_config(config)
    with pytest.raises(ValueError, match="--num-layers is 3"):
        check_model_args(given | {"num_layers": 3}, config)


def test_checkpoint_loads_whole_and_computes(small):
    model, report = AutoModelForCausalLM.from_pretrained(small, output_loading_info=True)
    assert not any(report.values())
    assert (model.config.model_type, model.dtype) == ("qwen3", torch.bfloat16)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    deviations = {n: p.float().std().item() for n, p in model.named_parameters() if p.dim() == 2}
    assert all(0.0195 < value < 0.0205 for value in deviations.values()), deviations
    assert all((p == 1).all() for p in model.parameters() if p.dim() == 1)
    ids = torch.arange(512)[None]
    logits = model(input_ids=ids).logits.float()
    assert 0.3 < logits.std() < 0.6  # 0.02 sqrt(512) = 0.45 on a normalised hidden state
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
    assert abs(loss.item() - math.log(512)) < 0.5
    check_checkpoint_shapes(small, read_hf_config(small))
    settings = GenerationConfig.from_pretrained(small)
    assert (settings.eos_token_id, settings.pad_token_id) == (258, 256)


def test_arithmetic_is_that_of_the_tiny_model(small, tmp_path):
    import make_tiny_model

    make_tiny_model.main([str(tmp_path)])
    ours = digests(small / "arithmetic")
    assert set(ours) == {"train.jsonl", "train.parquet", "test.jsonl", "test.parquet", "sft.jsonl"}
    assert (
        ours.items()
        <= {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in tmp_path.glob("*.*")}.items()
    )


def test_fewer_layers_change_nothing_else(tmp_path, capsys):
    shallow = read_hf_config(make(tmp_path / "a", "--layers", "1", "--no-weights", arch="qwen3-50m"))
    assert "qwen3-50m with 1 of 12 layers" in capsys.readouterr().out
    whole = read_hf_config(make(tmp_path / "b", "--no-weights", arch="qwen3-50m"))
    assert {k for k in whole if whole[k] != shallow.get(k)} <= {
        "num_hidden_layers",
        "layer_types",
        "max_window_layers",
    }
    assert (shallow["num_hidden_layers"], shallow["layer_types"]) == (1, ["full_attention"])
    folder = make(tmp_path / "c", "--layers", "1", "--random")
    check_checkpoint_shapes(folder, read_hf_config(folder))
    note = json.loads((folder / "make_model.json").read_text())
    assert note == {"arch": "qwen3-tiny", "layers": 1, "of": 2, "weights": "random"}
    for layers in ("0", "3"):
        with pytest.raises(SystemExit):
            make(tmp_path / "d", "--layers", layers, "--random")
        assert "--layers must lie in [1, 2], the depth of qwen3-tiny" in capsys.readouterr().err


def test_files_of_limited_size_and_their_index(tmp_path):
    model = build_model(build_config("qwen3-tiny"), 3, "cpu")
    save_settings(model, tmp_path)
    limit = 2**20
    number = save_model(model, tmp_path, max_file_bytes=limit)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [f.name for f in files] == [
        f"model-{i:05d}-of-{number:05d}.safetensors" for i in range(1, number + 1)
    ]
    assert number >= 5 and all(f.stat().st_size < limit + 4096 for f in files)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * model.num_parameters()
    assert list(index["weight_map"]) == [name for name, _ in model.named_parameters()]
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    for (name, ours), (_, theirs) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    check_checkpoint_shapes(tmp_path, read_hf_config(tmp_path))


def test_every_id_of_the_vocabulary_is_text_of_its_own(big):
    tokenizer, config = AutoTokenizer.from_pretrained(big), read_hf_config(big)
    assert not list(big.glob("*.safetensors"))
    assert len(tokenizer) == config["vocab_size"] == 151936 == largest_token_id(str(big)) + 1
    assert (
        (tokenizer.pad_token_id, tokenizer.eos_token_id)
        == (151643, 151645)
        == (
            config["pad_token_id"],
            config["eos_token_id"],
        )
    )
    ids = [*range(256, 151643), *range(151649, 151936)]
    texts = tokenizer.batch_decode([[i] for i in ids])
    assert len(set(texts)) == len(ids)
    assert all(len(t) == 5 and t[0] == " " and t[1:].isalpha() and t.islower() for t in texts)
    assert tokenizer.decode([300, 151645, 151935], skip_special_tokens=True) == texts[44] + texts[-1]


@pytest.mark.parametrize(
    "text", ["12+34=46", "a user\n\tsays: 7", "héllo 日本 \U0001f600", " aaab aaac", "<|im_end|>x", ""]
)
def test_tokenizer_round_trips(big, text):
    tokenizer = AutoTokenizer.from_pretrained(big)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    # The tokenizer reads made-up words but never writes them.
    assert all(i < 256 or 151643 <= i < 151649 for i in ids)


def test_chat_template(big):
    tokenizer = AutoTokenizer.from_pretrained(big)
    turns = [{"role": "user", "content": "12+34="}]
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\n12+34=<|im_end|>\n<|im_start|>assistant\n"
    assert len(tokenizer(prompt)["input_ids"]) == 14


def test_words_are_unlike_and_need_no_digits():
    assert [word(i) for i in (0, 1, 26, 26**4 - 1)] == ["Ġaaaa", "Ġaaab", "Ġaaba", "Ġzzzz"]
    with pytest.raises(AssertionError):
        build_tokenizer(600_000, 256)  # more ids than words


def test_same_seed_same_bytes(tmp_path):
    one, again = (digests(make(tmp_path / name, "--random", "--seed", "7")) for name in ("one", "again"))
    other = digests(make(tmp_path / "other", "--random", "--seed", "8"))
    assert one == again
    assert {name for name in one if one[name] != other[name]} == {"model.safetensors"}


def test_dtype_is_a_choice(tmp_path):
    make(tmp_path / "model", "--random", "--dtype", "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16 and read_hf_config(tmp_path / "model")["dtype"] == "bfloat16"


def test_callers_random_state_is_untouched(tmp_path):
    """OUT_DIR may exist if it is empty."""
    before = torch.random.get_rng_state()
    (tmp_path / "model").mkdir()
    assert (make(tmp_path / "model", "--random") / "model.safetensors").is_file()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_wrong_calls(tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    calls = [
        (
            ["--arch", "qwen3-5b", "--random"],
            "--arch must be one of qwen3-0.6b, qwen3-1.7b, qwen3-4b,",
            "new",
        ),
        (["--arch", "qwen3-tiny", "--random"], "OUT_DIR must be a new or empty folder, got", "full"),
        (["--arch", "qwen3-tiny"], "one of the arguments --random --no-weights is required", "new"),
        (["--random"], "the following arguments are required: --arch", "new"),
    ]
    if not torch.cuda.is_available():
        calls.append(
            (["--arch", "qwen3-tiny", "--random", "--device", "cuda"], "--device must be cpu", "new")
        )
    for flags, message, folder in calls:
        with pytest.raises(SystemExit) as exit:
            main([*flags, str(tmp_path / folder)])
        assert exit.value.code == 2 and message in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["full", "notes"]


@pytest.mark.slow
def test_a_disk_that_fills_up_leaves_nothing(tmp_path):
    """A limit on the size of files simulates the full disk: the tokenizer fits, the 5 MB of weights do not."""
    script = str(ROOT / "scripts" / "make_model.py")
    options = "--arch qwen3-tiny --random --device cpu"
    command = [sys.executable, script, *options.split(), str(tmp_path / "m")]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 1024; exec "$@"', "-", *command], capture_output=True, text=True
    )
    assert done.returncode != 0 and "File too large" in done.stderr
    assert not list(tmp_path.iterdir())
