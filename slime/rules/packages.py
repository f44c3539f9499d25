"""Checks packages that only some flags need. A missing package is an error at start-up, before the models are loaded.
Only wandb may be missing, because the run's own record is complete.

It searches for a package without importing it. The trainers check Transformer Engine, because only an import shows that
it fits their torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from slime.config.problems import Problems
from slime.config.sections.reward import reward_names
from slime.records.errors import FlagError
from slime.system.imports import is_installed
from slime.tracking.trackers import TRACKERS

if TYPE_CHECKING:
    from slime.config.schema import Config

_COMPARED_AS_MATHEMATICS = ("math", "deepscaler", "dapo")


def check_packages(c: Config) -> None:
    """Raises ValueError with the flag, its missing package and the command that installs the package."""
    needed = []
    for kind in TRACKERS:
        if kind.asked(c.logging) and not kind.optional:
            needed.append((kind.flag, kind.module, kind.package))
    names = [name.removeprefix("boxed_") for name in reward_names(c.reward.rm_type)]
    if c.reward.custom_rm_path is None and any(name in _COMPARED_AS_MATHEMATICS for name in names):
        needed.append((f"--rm-type {c.reward.rm_type}", "math_verify", "math-verify"))
    if c.reward.custom_rm_path is None and "ifbench" in names:
        needed.append((f"--rm-type {c.reward.rm_type}", "if_verifiable", "if-verifiable"))
    if c.logging.otlp_traces_endpoint is not None:
        flag = "--otlp-traces-endpoint"
        needed.append((flag, "opentelemetry.sdk.trace", "opentelemetry-sdk"))
        needed.append((flag, "opentelemetry.exporter.otlp.proto.http", "opentelemetry-exporter-otlp"))
    problems = Problems()
    for flag, module, package in needed:
        if not is_installed(module):
            problems.add(
                FlagError(
                    flag,
                    f"have the package {package}",
                    "none installed",
                    f"pip install {package}, or leave the flag out",
                )
            )
    problems.report()


def package_notes(c: Config) -> Iterator[str]:
    """Yields a note for an optional tracker without its package (--use-wandb): the run's own record is complete without
    it."""
    for kind in TRACKERS:
        if kind.optional and kind.asked(c.logging) and not is_installed(kind.module):
            yield (
                f"{kind.flag}: the package {kind.package} is not installed, so metrics go to metrics.jsonl of the run "
                f"directory alone (`vime plot` draws them); pip install {kind.package} to send them, too"
            )
