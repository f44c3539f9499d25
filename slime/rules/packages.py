"""Packages that only some flags need. A missing package is an error at start-up, before the models are loaded.
Only wandb may be missing: the run's own record is complete.

Looks for a package without importing it. The trainers check Transformer Engine, because only an import shows that it
fits their torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from slime.config.problems import Problems
from slime.imports import is_installed

if TYPE_CHECKING:
    from slime.config.schema import Config

_COMPARED_AS_MATHEMATICS = ("math", "deepscaler", "dapo")


def check_packages(c: Config) -> None:
    """ValueError with the flag, its missing package and the command that installs the package."""
    needed = []
    if c.logging.use_tensorboard:
        needed.append(("--use-tensorboard", "tensorboard", "tensorboard"))
    if (
        c.reward.custom_rm_path is None
        and (c.reward.rm_type or "").removeprefix("boxed_") in _COMPARED_AS_MATHEMATICS
    ):
        needed.append((f"--rm-type {c.reward.rm_type}", "math_verify", "math-verify"))
    if c.logging.otlp_traces_endpoint is not None:
        flag = "--otlp-traces-endpoint"
        needed.append((flag, "opentelemetry.sdk.trace", "opentelemetry-sdk"))
        needed.append((flag, "opentelemetry.exporter.otlp.proto.http", "opentelemetry-exporter-otlp"))
    problems = Problems()
    for flag, module, package in needed:
        if not is_installed(module):
            problems.add(
                f"{flag} must have the package {package}, got none installed; pip install {package}, or leave the "
                "flag out"
            )
    problems.report()


def package_notes(c: Config) -> Iterator[str]:
    """A note for --use-wandb without wandb: the run's own record is complete without it."""
    if c.logging.use_wandb and not is_installed("wandb"):
        yield (
            "--use-wandb: the package wandb is not installed, so metrics go to metrics.jsonl of the run directory "
            "alone (`vime plot` draws them); pip install wandb to send them, too"
        )
