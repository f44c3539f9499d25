"""Writes a Hugging Face checkpoint of a known shape with random weights, for smoke runs, benchmarks and learning
curves.

    python scripts/make_model.py --arch qwen3-4b --random OUT_DIR
    python scripts/make_model.py --arch qwen3-50m --random --arithmetic OUT_DIR

    python scripts/make_model.py --arch qwen3-50m --random --quantize fp8 OUT_DIR

write these files to OUT_DIR: config.json, safetensors files (with an index if there are several), a fast tokenizer with
a chat template, generation_config.json, and make_model.json, which describes the model. With --arithmetic, they also
write OUT_DIR/arithmetic (see arithmetic.py). The shapes are rows of architectures.py. --layers makes a model with fewer
layers and no other difference. --quantize stores the linear layers in fp8 or int4 (see quantize.py).

Nothing is downloaded, so the script makes a tokenizer. It has one token per byte, the special tokens at the ids of the
published model, and an invented word for every other id up to vocab_size. Therefore every token of a random model is
text.

transformers initialises the weights in their stored dtype, on the GPU if the machine has a GPU. On the host, the
weights need host memory once; on a GPU, they need host memory for one file. The same seed gives the same bytes on
the same kind of device (a CPU, or one model of GPU) with the same libraries. OUT_DIR appears only when it is complete.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import string
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from architecture import NOT_IN_TRANSFORMERS, STACKED, STORED_AS
from architectures import ARCHITECTURES
from arithmetic import write_data
from quantize import SCHEMES, find_routers, quantization_config, quantize_checkpoint
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from vision_architectures import VISION_ARCHITECTURES

from slime.checkpoints.hf_files import write_tensors
from slime.models import FAMILIES
from slime.models.renaming import rename

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant")
MAX_FILE_BYTES = 2**30
NOTE_FILE = "make_model.json"
"""File that describes the model, for reports of measurements: {arch, layers, of, weights}."""

# Qwen's turn markers without its default system turn: "12+34=" becomes 14 tokens.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_config(arch: str, dtype: str | None = None, layers: int | None = None) -> PretrainedConfig:
    """Returns config.json of an architecture. `dtype` and `layers` replace the values of the table."""
    row = {**ARCHITECTURES, **VISION_ARCHITECTURES}[arch]
    given = {"dtype": dtype, "num_hidden_layers": layers}
    changed = {name: value for name, value in given.items() if value is not None}
    if layers is not None and "layers_block_type" in row.more:
        changed["layers_block_type"] = row.more["layers_block_type"][:layers]
    family, _ = NOT_IN_TRANSFORMERS.get(row.family, (row.family, ""))
    return AutoConfig.for_model(family, **row.config_fields(**changed))


def word(number: int) -> str:
    """Returns word 0, 1, ... for the unused ids: a space and four letters, never a digit of an answer."""
    letters = (string.ascii_lowercase[number // 26**place % 26] for place in (3, 2, 1, 0))
    return "Ġ" + "".join(letters)  # Ġ is the byte-level spelling of a space


def build_tokenizer(vocab_size: int, first_special: int) -> Tokenizer:
    """Builds a tokenizer with one token per byte, so that every text round-trips. Each role name is one token.

    The special tokens and roles have the ids from `first_special` on. The other ids, up to `vocab_size`, are words. No
    text is split into these words, because there are no merges.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    named = [END_OF_TEXT, TURN_START, TURN_END, *ROLES]
    unused = (word(number) for number in range(vocab_size))
    tokens = alphabet + [next(unused) for _ in range(first_special - len(alphabet))] + named
    tokens += [next(unused) for _ in range(vocab_size - len(tokens))]
    assert len(tokens) == len(set(tokens)) == vocab_size, f"{vocab_size} ids hold {len(set(tokens))} tokens"
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT, TURN_START, TURN_END])
    tokenizer.add_tokens([AddedToken(role, normalized=False) for role in ROLES])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json. Every transformers release reads the general class name."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START, TURN_END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def build_model(config: PretrainedConfig, seed: int, device: str) -> PreTrainedModel:
    """Builds a model with random weights from `seed` in config.dtype. The caller's random state does not change.

    transformers initialises the weights: normal matrices with standard deviation initializer_range, biases 0, norms 1.
    The exception is the padding token's embedding, which is random here; transformers sets it to zeros. An untrained
    model also samples that token, and the backward of a norm divides by the length of its input. On the device "meta",
    the model has shapes and no weights.
    """
    on_gpu = device == "cuda"
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if on_gpu else []), torch.device(device):
        # torch.manual_seed would also seed the GPUs if the model is made on the CPU.
        (torch.cuda.manual_seed if on_gpu else torch.default_generator.manual_seed)(seed)
        model = AutoModelForCausalLM.from_config(config)
        torch.nn.init.normal_(
            model.get_input_embeddings().weight[config.pad_token_id], std=config.initializer_range
        )
    model.config.architectures = [type(model).__name__]
    return model


def stored_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the parameters as checkpoints have them, and then the stored buffers (the biases of routers)."""
    spelled = STORED_AS.get(model.config.model_type, {})
    family = FAMILIES.get(model.config.model_type)
    aliases = () if family is None else family.aliases
    for name, tensor in one_per_expert(model):
        for ours, theirs in spelled.items():
            name = name.replace(ours, theirs)
        yield rename(name, aliases), tensor


def one_per_expert(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields parameters and stored buffers with one tensor per expert, or per layer as in transformers (`STACKED`)."""
    stored = model.state_dict()
    stacked = model.config.model_type in STACKED
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in stored]
    for name, parameter in [*model.named_parameters(), *buffers]:
        layer, fused, kind = name.rpartition(".experts.")
        if not fused or stacked:
            yield name, parameter
            continue
        parts = ("gate", "up") if kind == "gate_up_proj" else (kind.removesuffix("_proj"),)
        for expert, weight in enumerate(parameter):
            for part, piece in zip(parts, weight.chunk(len(parts)), strict=True):
                yield f"{layer}.experts.{expert}.{part}_proj.weight", piece


def save_model(model: PreTrainedModel, folder: Path, max_file_bytes: int = MAX_FILE_BYTES) -> int:
    """Writes the weights in the model's order, in files of at most `max_file_bytes` (more if one tensor is larger).

    Returns the number of files. A tied head is not written: without lm_head.weight, a loader ties it, as with the
    published Qwen models.
    """
    files: list[dict[str, torch.Tensor]] = [{}]
    room = max_file_bytes
    for name, parameter in stored_tensors(model):
        if files[-1] and parameter.nbytes > room:
            files.append({})
            room = max_file_bytes
        files[-1][name] = parameter.detach().contiguous()
        room -= parameter.nbytes
    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
        places = {tensor: name for name, file in zip(names, files, strict=True) for tensor in file}
        total = sum(tensor.nbytes for file in files for tensor in file.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2) + "\n", encoding="utf-8"
        )
    for name, file in zip(names, files, strict=True):
        write_tensors(file, folder / name)
    return len(files)


def save_settings(model: PreTrainedModel, folder: Path) -> None:
    """Writes config.json, generation_config.json and the tokenizer."""
    config = model.config
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id).save_pretrained(
        folder
    )
    tokenizer = build_tokenizer(config.vocab_size, first_special=config.pad_token_id)
    save_tokenizer(tokenizer, folder, config.max_position_embeddings)


def name_family(folder: Path, family: str) -> None:
    """Writes to config.json the model_type of a family that transformers does not have."""
    if family in NOT_IN_TRANSFORMERS:
        file = folder / "config.json"
        named = {"model_type": family, "architectures": [NOT_IN_TRANSFORMERS[family][1]]}
        file.write_text(
            json.dumps(json.loads(file.read_text(encoding="utf-8")) | named, indent=2) + "\n",
            encoding="utf-8",
        )


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line. An unknown architecture, a missing device, or a folder that is not empty is an error."""
    parser = argparse.ArgumentParser(description="Write a Hugging Face checkpoint with random weights.")
    parser.add_argument("folder", type=Path, metavar="OUT_DIR", help="a new or empty folder")
    parser.add_argument("--arch", required=True, help=", ".join(ARCHITECTURES))
    weights = parser.add_mutually_exclusive_group(required=True)
    weights.add_argument("--random", action="store_true", help="random weights")
    weights.add_argument(
        "--no-weights", action="store_true", help="config and tokenizer only, enough for `vime plan`"
    )
    parser.add_argument("--seed", type=int, default=0, help="decides every byte (default 0)")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="dtype of the weights (default: the model's)"
    )
    parser.add_argument(
        "--layers", type=int, help="number of layers, if fewer than the model's, for a small device"
    )
    parser.add_argument(
        "--arithmetic", action="store_true", help="also write addition data to OUT_DIR/arithmetic"
    )
    parser.add_argument(
        "--quantize", choices=sorted(SCHEMES), help="quantise the linear layers, as quantize.py does"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute")
    args = parser.parse_args(argv)
    if args.arch not in ARCHITECTURES:
        parser.error(f"--arch must be one of {', '.join(ARCHITECTURES)}, got {args.arch}")
    if args.quantize and not args.random:
        parser.error(
            f"--quantize must be given with --random, got --no-weights and {args.quantize}; leave it out"
        )
    if args.layers is not None and not 1 <= args.layers <= ARCHITECTURES[args.arch].layers:
        most = ARCHITECTURES[args.arch].layers
        parser.error(f"--layers must lie in [1, {most}], the depth of {args.arch}, got {args.layers}")
    if args.folder.is_file() or (args.folder.is_dir() and any(args.folder.iterdir())):
        parser.error(
            f"OUT_DIR must be a new or empty folder, got {args.folder}; remove it or name another one"
        )
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device must be cpu on a machine without a GPU, got cuda; leave it out to take what is there"
        )
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args


def main(argv: list[str] | None = None) -> None:
    args, start = parse(argv), time.monotonic()
    folder: Path = args.folder.absolute()
    config = build_config(args.arch, args.dtype, args.layers)
    model = build_model(config, args.seed, "meta")
    size, parameters = sum(p.nbytes for p in model.parameters()), model.num_parameters()
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if args.random and size > free:
        raise SystemExit(
            f"OUT_DIR must be on a disk with {size / 1e9:.1f} GB free, got {free / 1e9:.1f} GB at {folder.parent}"
        )
    with ExitStack() as stack:
        partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
        stack.callback(shutil.rmtree, partial, ignore_errors=True)
        partial.mkdir()
        save_settings(model, partial)
        name_family(partial, ARCHITECTURES[args.arch].family)
        depth = ARCHITECTURES[args.arch].layers
        note = {"arch": args.arch, "layers": config.num_hidden_layers, "of": depth}
        note["weights"] = "random" if args.random else None
        (partial / NOTE_FILE).write_text(json.dumps(note) + "\n", encoding="utf-8")
        if args.random:
            save_model(build_model(config, args.seed, args.device), partial)
            if args.quantize:
                plain = partial.rename(partial.with_name(f"{partial.name}-plain"))
                stack.callback(shutil.rmtree, plain)
                quantize_checkpoint(
                    plain, partial, quantization_config(args.quantize, routers=find_routers(plain))
                )
        if args.arithmetic:
            write_data(partial / "arithmetic", args.seed)
        partial.rename(folder)
    what = "no weights"
    if args.random:
        dtype = str(model.dtype).removeprefix("torch.")
        what = f"{size / 1e9:.2f} GB of random {dtype}, made on {args.device} in {time.monotonic() - start:.1f} s"
    shallow = f" with {args.layers} of {depth} layers" if args.layers else ""
    print(f"{args.folder}: {args.arch}{shallow}, {parameters / 1e6:,.1f} M parameters, {what}")


if __name__ == "__main__":
    main()
