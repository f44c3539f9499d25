"""Checks the Hugging Face directories, other than --hf-checkpoint, from which the models of a run read their weights.

Each directory has its own `quantization_config`: a quantised --ref-load may come with a plain --hf-checkpoint, and the
reverse.
"""

from __future__ import annotations

from pathlib import Path

from slime.checkpoints.checkpoint_dir import holds_hf_weights, latest, released
from slime.checkpoints.hf_config import check_checkpoint_shapes, read_hf_config, with_own_quantization
from slime.config.problems import require_value
from slime.config.schema import Config
from slime.models import family_for
from slime.records.errors import FlagError
from slime.roles import POLICY, Role, Source, get_roles


def check_sources(c: Config) -> None:
    """Checks the headers of quantised directories for shapes and scales. The trainer checks plain weights when it
    loads them. Nothing is checked for a directory that `check_directories` reports."""
    if c.debug.debug_rollout_only:
        return
    checked = {Path(require_value(c.rollout.hf_checkpoint)).resolve()}
    for role, source in _hf_sources(c):
        directory = Path(source.directory)
        described = with_own_quantization(read_hf_config(role.shape(c)), directory)
        if directory.resolve() in checked or not described.get("quantization_config"):
            continue
        checked.add(directory.resolve())
        flag = "--ref-load" if source.directory == c.checkpoint.ref_load else source.flag
        try:
            family_for(described).scheme(described)
        except FlagError as error:
            raise error.after(f"{flag} {directory}: ") from error
        check_checkpoint_shapes(directory, described, flag)


def _hf_sources(c: Config) -> list[tuple[Role, Source]]:
    """Returns the Hugging Face files that the run reads at its start, as `load_weights` finds them. A model that
    resumes reads its checkpoint instead. With adapters, the policy still reads their base."""
    try:
        found = [
            (role, role.source(c))
            for role in get_roles(c)
            if not role.of_base(c) and (role.resumes(c) is None or (role is POLICY and c.lora.lora_rank))
        ]
        return [(role, source) for role, source in found if _has_hf_weights(source)]
    except ValueError:  # an unreadable checkpoint, which another rule reports
        return []


def _has_hf_weights(source: Source) -> bool:
    plain = source.iteration is None and latest(source.directory) is None
    return plain and released(source.directory) is None and holds_hf_weights(source.directory)
