"""`vime doctor [--json] [--device cpu|cuda|auto]`: runs every check of the table and prints the findings.

The exit status is 1 if a run would fail here, else 0. The command is the health check of the containers. It takes
seconds and leaves no process behind.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from vime.doctor import gpus, host, network, packages, patches, quantization
from vime.doctor.finding import Finding, WantedRun, one_line, warning
from vime.doctor.machine import Machine
from vime.doctor.post_mortem import check_end, verdict
from vime.doctor.records import check_groups

Check = Callable[[Machine, WantedRun], list[Finding]]

CHECKS: tuple[Check, ...] = (
    packages.check_python,
    packages.check_versions,
    packages.check_torchvision,
    packages.check_plugin,
    gpus.check_driver,
    gpus.check_gpus,
    gpus.check_torch_cuda,
    gpus.check_peer_access,
    gpus.check_delta_nets,
    quantization.check_quantization,
    host.check_cores,
    host.check_numa,
    host.check_memory,
    host.check_shared_memory,
    host.check_disk,
    host.check_writable,
    host.check_descriptors,
    host.check_processes,
    host.check_clock,
    host.check_compiler,
    host.check_sandboxes,
    network.check_loopback,
    network.check_ray,
    network.check_rdma,
)


def main(argv: Sequence[str]) -> int:
    """Prints one line per finding, or a list with --json. Returns 1 if there is a problem."""
    args = _parser().parse_args(argv)
    if args.patches:
        print("\n".join(patches.lines()))
        return 0
    if args.records is not None:
        ended, groups = check_end(args.records), check_groups(args.records)
        bad = verdict(args.records, ended, groups)
        return _print(ended + groups, args.json, "its records are in order", bad)
    machine = Machine()
    device = args.device
    if device == "auto":
        device = "cuda" if machine.has_driver() else "cpu"
    findings = examine(machine, WantedRun(device, args.run_dir, args.hf_checkpoint))
    return _print(
        *(findings, args.json, f"nothing found that stops a run on {device}"),
        f"a run on {device} would fail",
    )


def _print(findings: list[Finding], as_json: bool, good: str, bad: str) -> int:
    if as_json:
        print(json.dumps([finding.to_json() for finding in findings], indent=1))
    else:
        print("\n".join(report(findings, good, bad)))
    return int(any(finding.status == "problem" for finding in findings))


def examine(machine: Machine, wanted: WantedRun) -> list[Finding]:
    """Returns the findings of every check, in the order of the table."""
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings += check(machine, wanted)
        except Exception as error:  # border: one failing check must not stop the other checks
            name = check.__name__.removeprefix("check_").replace("_", " ")
            found = f"could not be checked: {type(error).__name__}: {error}"
            findings.append(
                warning(name, found, "look at it by hand, and report this as a bug of vime doctor")
            )
    return findings


def report(findings: Sequence[Finding], good: str, bad: str) -> list[str]:
    """Returns aligned lines with each finding and its remedy, and the result: `bad` if there is a problem."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        line = f"{finding.status:<8} {one_line(finding.name):<{width}}  {one_line(finding.found)}"
        if finding.remedy and finding.status != "ok":
            line += f"; remedy: {one_line(finding.remedy)}"
        lines.append(line)
    problems = sum(finding.status == "problem" for finding in findings)
    warnings = sum(finding.status == "warning" for finding in findings)
    verdict = bad if problems else good
    counts = f"{problems} problem{'s' * (problems != 1)}, {warnings} warning{'s' * (warnings != 1)}"
    return [*lines, f"{counts}: {verdict}"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vime doctor",
        description="Check whether this machine has what a run needs. Exit status 1: a run would fail.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "records",
        nargs="?",
        type=Path,
        metavar="RUN_DIR",
        help="the directory of a run: say why it ended and check its records, instead of this machine",
    )
    parser.add_argument(
        "--json", action="store_true", help="print a list of findings: name, status, found, remedy"
    )
    parser.add_argument(
        "--patches",
        action="store_true",
        help="print the symbols of other programs that runs replace, and why, instead of checking this machine",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda", "auto"),
        default="auto",
        help="the device of the run; auto is cuda where an NVIDIA driver is found",
    )
    parser.add_argument("--run-dir", type=Path, default=Path("runs"), help="where runs are written")
    parser.add_argument(
        "--hf-checkpoint",
        type=Path,
        help="a model directory: does shared memory hold its weights, and do engines run its scheme?",
    )
    return parser
