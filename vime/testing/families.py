"""Checks of a model family: one folder with a small checkpoint, in the trainer, in transformers and in vLLM."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from slime.checkpoints.hf_config import read_hf_config
from slime.checkpoints.hf_files import Files, write_tensors
from slime.config.schema import Config
from slime.hooks import Hook
from slime.megatron_backend.conformance.computed import compute_model, publish_versions, shift_tokens
from slime.megatron_backend.conformance.diagnosis import explain_difference
from slime.megatron_backend.conformance.reference import (
    compute_layer_outputs,
    compute_reference_gradients,
    compute_reference_logits,
    find_frequencies,
    load_reference,
    read_table_tensors,
)
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.models import FAMILIES, family_for
from slime.models.decoder import Hf
from slime.models.family import Family
from slime.plan.model_shape import Shape
from slime.protocols import WeightUpdate
from slime.records.errors import FlagError
from slime.weight_sync.file_channel import FileChannel
from vime.testing.ranks import run_ranks
from vime.vllm.cpu.offline import ENVIRONMENT, OfflineEngine

LENGTHS = (5, 9, 3, 12, 3)
"""Lengths of the sequences. Their sum is even, because two tensor-parallel ranks share the tokens."""
LONGEST = 2 * sum(LENGTHS)
"""Longest sequence of the engine, whose cache is small."""
LOG_PROBS, GRADIENTS = 1e-5, 1e-4
"""Largest differences: of a log-prob in nats, and of a gradient's element, divided by the gradient's largest value."""
LARGEST = 100_000_000
"""Most elements of a checkpoint. The check computes it several times in float32 on a CPU."""
ROUNDING = 1e-7
"""Difference of a gradient that rounding makes where a whole gradient is tiny."""
ROUNDED = 0.02
"""Largest mean difference between engine and trainer in bfloat16, in nats."""
_WHEN = {"before": "as loaded", "after": "after an update", "again": "with the first weights again"}
_UNTRAINED = "e_score_correction_bias"
"""End of the names of tensors that no gradient reaches and that files hold."""
_RANKS: dict[str, tuple[int, dict[str, object]]] = {
    "one rank": (1, {}),
    "two tensor-parallel ranks": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
}


Numbers: TypeAlias = Any
"""Measured tensors by their names, or a list with such records."""


@dataclass(frozen=True)
class FamilyReport:
    """The largest differences that `check_family` measured. `engine` is None if no engine ran."""

    log_probs: dict[str, float]
    """Ranks -> difference from transformers, in nats."""
    gradients: dict[str, float]
    """Ranks -> difference from transformers, divided by the largest value of the gradient."""
    engine: dict[str, float] | None
    """"before" and "after" an update, and "again" with the first weights -> mean difference from the trainer."""
    parameters: int
    """Elements of the matrices, as in the files and in the plan."""


def check_family(
    folder: Path | str,
    *,
    family: str | None = None,
    reference: nn.Module | None = None,
    engine: Mapping[str, object] | None = {},
    limit: float = LOG_PROBS,
    trust_remote_code: bool = False,
) -> FamilyReport:
    """Compares a small checkpoint in the trainer with transformers and with vLLM, on a CPU in float32.

    Args:
        folder: a Hugging Face folder with at most `LARGEST` elements.
        family: the path of a `Family` that replaces that of vime, such as "my_models.my_family.MY_FAMILY".
        reference: transformers' model of the folder. Default: `AutoModelForCausalLM`, or the class in config.json.
        engine: arguments of `vllm.LLM`, such as `{"dtype": "bfloat16"}`. None leaves the engine out.
        limit: largest difference of a log-prob in nats.
        trust_remote_code: code in the folder may run.

    Raises AssertionError for the first difference: the bytes of an export, log-probs and gradients on one rank and on
    two tensor-parallel ranks, the plan's number of parameters, and the engine's log-probs before and after an update.
    """
    folder = Path(folder)
    register_family(family)
    hf = read_hf_config(folder)
    stored = read_trained(folder)
    if (count := sum(tensor.numel() for tensor in stored.values())) > LARGEST:
        raise FlagError("folder", f"have at most {LARGEST} elements", f"{count} in {folder}", "cut its sizes")
    generator = torch.Generator().manual_seed(0)
    batch = [torch.randint(0, hf["vocab_size"], (length,), generator=generator) for length in LENGTHS]
    model = (
        reference if reference is not None else load_reference(folder, trust_remote_code=trust_remote_code)
    )
    wanted = describe_reference(model, batch, hf)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        torch.save({**wanted, "batch": batch, "limit": limit}, work / "wanted.pt")
        dtype = None if engine is None else str(engine.get("dtype", "float32"))
        _run(compute_ranks, 2, (folder, work, family, dtype), "the trainer")
        found = {ranks: _load(work / f"{size}.pt") for ranks, (size, _) in _RANKS.items()}
        pairs = {
            ranks: compare(hf, ranks, of_ranks, stored, wanted, limit) for ranks, of_ranks in found.items()
        }
        parameters = check_plan(folder, hf, found["one rank"]["gradients"])
        served = None
        if engine is not None:
            settings = {"max_model_len": LONGEST, **engine, "trust_remote_code": trust_remote_code}
            _run(serve, 1, (folder, work, settings), "vLLM")
            served = compare_engine(work, str(dtype), limit)
    return FamilyReport(
        {ranks: pair[0] for ranks, pair in pairs.items()},
        {ranks: pair[1] for ranks, pair in pairs.items()},
        served,
        parameters,
    )


def register_family(path: str | None) -> None:
    """Makes this process read the `Family` at a path instead of the family of vime with its model_type."""
    if path is None:
        return
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name, None) if module else None
    if not isinstance(found, Family):
        raise FlagError(
            "family", "be the path of a Family", repr(path), "such as my_models.my_family.MY_FAMILY"
        )
    FAMILIES[found.model_type] = found


def read_trained(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of the files that the trainer of a text run builds."""
    hf, files = read_hf_config(folder), Files(folder)
    family, names = family_for(hf), files.names()
    others = {*family.prediction_names(names, hf), *family.tower_names(names, hf)}
    return {name: files.get(name)[...].clone() for name in sorted(names - others)}


def describe_reference(model: nn.Module, batch: Sequence[Tensor], hf: Hf) -> dict[str, object]:
    """Returns transformers' log-probs, gradients, rotary frequencies and hidden states."""
    table = compute_reference_logits(model, batch).log_softmax(-1)
    return {
        "log_probs": table.gather(1, shift_tokens(batch)[:, None])[:, 0],
        "frequencies": find_frequencies(model),
        "outputs": compute_layer_outputs(model, batch),
        "gradients": compute_reference_gradients(model, batch, hf),
    }


def _run(work: Hook, ranks: int, values: tuple[object, ...], what: str) -> None:
    try:
        run_ranks(work, ranks, values)
    except RuntimeError as error:
        raise AssertionError(
            f"the checkpoint must run in {what}, got an error; correct the family or the checkpoint: {error}"
        ) from error


def _load(file: Path) -> Numbers:
    found: Numbers = torch.load(file, weights_only=True)  # ok: tensors and numbers only
    return found


def compute_ranks(rank: int, folder: Path, work: Path, family: str | None, dtype: str | None) -> None:
    """Computes the checkpoint as one of two processes: first the first process alone, then both. It writes the numbers
    of rank 0, and publishes weights for an engine with `dtype`."""
    register_family(family)
    wanted, hf = _load(work / "wanted.pt"), read_hf_config(folder)
    for size, flags in _RANKS.values():
        if rank >= size:
            continue
        info = init_parallel(
            rank, size, make_trainer_config(**flags), init_method=f"file://{work}/store-{size}"
        )
        config = make_trainer_config(**flags)
        made = compute_model(folder, config, info, wanted["batch"])
        (gradients := work / f"gradients-{size}").mkdir(exist_ok=True)
        if rank == 0:
            write_tensors(
                {n: x.contiguous() for n, x in made.gradients.items()}, gradients / "model.safetensors"
            )
            found = {
                "weights": made.weights,
                "log_probs": made.log_probs,
                "gradients": read_table_tensors(gradients, hf),
                "reason": "",
            }
            assert made.log_probs is not None
            if size == 1 and (made.log_probs - wanted["log_probs"]).abs().max() > wanted["limit"]:
                found["reason"] = explain_difference(
                    *(folder, config, info, wanted["batch"]),
                    wanted=wanted["log_probs"],
                    frequencies=wanted["frequencies"],
                    outputs=wanted["outputs"],
                    limit=wanted["limit"],
                )
            elif size == 1 and dtype is not None:
                channel = FileChannel(work / "weights")
                tokens = torch.cat(wanted["batch"])
                versions = publish_versions(folder, make_trainer_config(params_dtype=dtype), channel, tokens)
                torch.save(
                    [(x, {"version": u.version, "channel": u.channel, "info": u.info}) for x, u in versions],
                    work / "versions.pt",
                )
            torch.save(found, work / f"{size}.pt")
        destroy_parallel()


def make_trainer_config(**flags: object) -> Config:
    defaults: dict[str, object] = {"params_dtype": "float32", "distributed_timeout_minutes": 5}
    return Config.from_flat({**defaults, "seed": 1, "global_batch_size": len(LENGTHS), **flags})


def compare(
    hf: Hf,
    ranks: str,
    found: Numbers,
    stored: Mapping[str, Tensor],
    wanted: Numbers,
    limit: float,
) -> tuple[float, float]:
    """Returns the largest differences of log-probs and gradients on some ranks. Raises AssertionError if one is too
    large."""
    weights = found["weights"]
    if odd := other_names(hf, weights, stored):
        raise AssertionError(
            f"an export on {ranks} must have the tensors of the files, got another set: {odd[:4]}; "
            "check the family's table"
        )
    for name, tensor in weights.items():
        assert torch.equal(tensor, stored[name].to(tensor.dtype)), (
            f"an export on {ranks} must have the bytes of the files, got others in {name}; "
            "check its row in the family's table"
        )
    difference = (found["log_probs"] - wanted["log_probs"]).abs().max().item()
    assert difference <= limit, (
        f"the log-probs on {ranks} must be those of transformers, got a difference of {difference:.3g} nats; "
        f"check the family's table and reader: {found['reason']}"
    )
    mine, theirs = (
        {name: x for name, x in each["gradients"].items() if not name.endswith(_UNTRAINED)}
        for each in (found, wanted)
    )
    if odd := other_names(hf, mine, theirs):
        raise AssertionError(
            f"gradients on {ranks} must be those of the same tensors, got another set: {odd[:4]}; "
            "check the family's table"
        )
    worst = max(((_relative(mine[name], theirs[name]), name) for name in mine), default=(0.0, ""))
    rounded = (mine[worst[1]] - theirs[worst[1]]).abs().max().item() <= ROUNDING
    assert worst[0] <= GRADIENTS or rounded, (
        f"the gradients on {ranks} must be those of transformers, got a difference of {worst[0]:.3g} of the largest "
        f"value in {worst[1]}; check the layer that has this tensor"
    )
    return difference, worst[0]


def other_names(hf: Hf, mine: Iterable[str], theirs: Iterable[str]) -> list[str]:
    """Returns the names that one side lacks. Files may have tensors that the family ignores."""
    more = {name for name in {*theirs} - {*mine} if not family_for(hf).ignores(name)}
    return sorted(more | ({*mine} - {*theirs}))


def _relative(mine: Tensor, theirs: Tensor) -> float:
    """Returns the largest difference, divided by the largest value."""
    difference, largest = (mine - theirs).abs().max().item(), theirs.abs().max().item()
    return difference / largest if largest > ROUNDING else difference / ROUNDING * GRADIENTS


def check_plan(folder: Path, hf: Hf, names: Collection[str]) -> int:
    """Returns the elements of the matrices in the plan. Raises AssertionError if the files have another number. `names`
    are those of the trainer's tensors in the weight table."""
    tensors = (tensor for name, tensor in read_table_tensors(folder, hf).items() if name in names)
    count = sum(tensor.numel() for tensor in tensors if tensor.dim() > 1 and 1 not in tensor.shape)
    planned = Shape.of(hf).params
    assert planned == count, (
        f"the plan must count {count} elements of matrices, as in the files, got {planned}; "
        "correct the sizes in the family's Decoder"
    )
    return planned


def serve(rank: int, folder: Path, work: Path, settings: Mapping[str, object]) -> None:
    """Serves the checkpoint with vLLM, takes both updates, and writes log-probs."""
    os.environ |= ENVIRONMENT | {"VIME_WEIGHT_DIR": str(work / "weights"), "VLLM_LOGGING_LEVEL": "ERROR"}
    (before, first), (after, second) = _load(work / "versions.pt")
    tokens = torch.cat(_load(work / "wanted.pt")["batch"]).tolist()
    with torch.compiler.set_stance("force_eager"):
        engine = OfflineEngine.from_folder(str(folder), **settings)
        found = [(engine.log_probs(tokens) - before).abs()]
        for update, expected in ((second, after), (first, before)):
            engine.take(WeightUpdate(**update))
            found.append((engine.log_probs(tokens) - expected).abs())
    torch.save(found, work / "served.pt")
    engine.stop()


def compare_engine(work: Path, dtype: str, limit: float) -> dict[str, float]:
    """Returns the mean differences of the engine's log-probs from the trainer's."""
    most = limit if dtype == "float32" else ROUNDED
    found = {}
    for when, differences in zip(("before", "after", "again"), _load(work / "served.pt"), strict=True):
        found[when] = differences.mean().item()
        assert found[when] <= most, (
            f"vLLM's log-probs must be those of the trainer {_WHEN[when]}, got a mean difference of "
            f"{found[when]:.3g} nats; check that vLLM has this model, and its settings"
        )
    return found
