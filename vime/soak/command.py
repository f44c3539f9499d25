"""`vime soak`: runs the user's own flags under seeded faults, and proves from the ledger that nothing was lost."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime.checkpoints.checkpoint_dir import first_rollout, resumed_iteration
from slime.checkpoints.checkpoint_files import iterations
from slime.config import Config
from slime.config.near_names import nearest
from slime.records.errors import FlagError
from slime.tracking.kinds import EVENTS_FILE
from vime.backends import parse_config
from vime.run import interrupts
from vime.soak.faults import FAULTS, KILLS, OTHERS, Fault
from vime.soak.page import format_page
from vime.soak.parts import Descendants, find_absent
from vime.soak.plan import RECOVERY_STEPS, Planned, choose_faults
from vime.soak.proxy import Proxy
from vime.soak.record import SoakSettings, make_record, write_record
from vime.soak.replies import FUNCTION_FILE, GENERATE, soak_folder
from vime.soak.runner import BrokenRunError, Job, Runner
from vime.start.run_start import resume_flags

SMALL_DISK_GIB = 4.0
"""A soak fills only a disk of at most this size, which holds nothing but the run directory."""
USAGE = """vime soak --config mine.yaml --steps 60 --kill engine,router,trainer --every 10

A soak is a real run of your flags in a new run directory, with --num-rollout as --steps sets it. The soak kills one
process in each --every steps: which part and when depends on --fault-seed only. If a fault ends the run, the same
command starts again and resumes from its newest checkpoint. The exit code is 0 if the ledger of the run proves that no
group was lost or trained twice and no sample was too old, and if the run recovered from every fault."""


def main(argv: Sequence[str]) -> int:
    """Returns exit code 0 if the soak passed, 1 if it failed, or 128 + the number of the signal that interrupted it.
    Raises ValueError for an error that the user can correct before the run starts."""
    options, words = _parser().parse_known_args(list(argv))
    kinds = [*_names("--kill", options.kill, KILLS), *_names("--faults", options.faults, OTHERS)]
    _check_numbers(options)
    config, words = _read(words, options.steps)
    staleness = config.rollout.max_staleness
    _check_run(config, kinds, options.steps)
    plan = choose_faults(
        kinds,
        steps=options.steps - options.quiet_steps,
        every=options.every,
        staleness=staleness,
        seed=options.fault_seed,
    )
    settings = SoakSettings(
        command=list(argv),
        first=_first(config),
        steps=options.steps,
        every=options.every,
        quiet_steps=options.quiet_steps,
        kinds=kinds,
        seed=options.fault_seed,
        staleness=staleness,
        samples=config.data.rollout_batch_size * config.data.n_samples_per_prompt,
        median_s=options.median_s,
        worst_s=options.worst_s,
        note=options.note,
    )
    return _soak(config, words, settings, plan, options.stall_s)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vime soak",
        usage="vime soak FLAGS OF vime train [--steps N] [--kill PARTS] [--faults NAMES] [--every N] ...",
        description=USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=60, help="number of rollouts to train (default 60)")
    parser.add_argument(
        "--kill",
        default="engine,router,trainer",
        metavar="PARTS",
        help=f"parts to kill, with commas: {', '.join(KILLS)} (default engine,router,trainer)",
    )
    parser.add_argument(
        "--faults", default="", metavar="NAMES", help=f"further faults, with commas: {', '.join(OTHERS)}"
    )
    parser.add_argument("--every", type=int, default=10, help="one fault in each so many steps (default 10)")
    parser.add_argument(
        "--quiet-steps",
        type=int,
        default=0,
        help="last steps without faults, which show the memory (default 0)",
    )
    parser.add_argument(
        "--fault-seed", type=int, default=0, help="decides the faults and their steps (default 0)"
    )
    parser.add_argument("--median-s", type=float, help="longest median recovery that passes (default: any)")
    parser.add_argument("--worst-s", type=float, help="longest recovery that passes (default: any)")
    parser.add_argument(
        "--stall-s", type=float, default=900.0, help="seconds without a step that end the soak (default 900)"
    )
    parser.add_argument("--note", default="", help="a text for the report, such as other load of the machine")
    return parser


def _names(flag: str, text: str, known: Mapping[str, Fault]) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            near = nearest(name, known)
            raise FlagError(
                flag, f"name some of {', '.join(known)}", f"{name}{near}", "separate them with commas"
            )
    return list(dict.fromkeys(names))


def _check_numbers(options: argparse.Namespace) -> None:
    if options.every < 1:
        raise FlagError("--every", "be at least 1", options.every, "give the number of steps of one fault")
    if options.quiet_steps < 0:
        raise FlagError("--quiet-steps", "not be below 0", options.quiet_steps, "leave it out")
    if options.steps - options.quiet_steps < options.every:
        raise FlagError(
            "--steps",
            "be at least --every plus --quiet-steps",
            f"{options.steps}, {options.every} and {options.quiet_steps}",
            "train more steps, or cause faults more often",
        )


def _read(words: list[str], steps: int) -> tuple[Config, list[str]]:
    """Returns the configuration of the run, and the words of its command, which name the run directory."""
    first = _first(parse_config([*words, "--num-rollout", str(steps)], download=True))
    words = [*words, "--num-rollout", str(first + steps)]
    config = parse_config(words, download=True)
    return config, [*words, "--run-dir", config.logging.run_dir]


def _first(config: Config) -> int:
    """Returns the first rollout of the run."""
    iteration = resumed_iteration(config)
    return (config.data.start_rollout_id or 0) if iteration is None else first_rollout(config, iteration)


def _check_run(config: Config, kinds: Sequence[str], steps: int) -> None:
    """Raises ValueError if the run cannot have these faults, or if a soak would change the records of another run."""
    if not kinds:
        raise FlagError(
            "--kill", "name a part if --faults names nothing", "none", f"name some of {', '.join(KILLS)}"
        )
    if config.debug.debug_rollout_only:
        raise FlagError(
            "--debug-rollout-only", "be left out of a soak", True, "a soak follows the trained steps"
        )
    fewest = RECOVERY_STEPS + config.rollout.max_staleness + 1
    if steps <= fewest:
        raise FlagError(
            "--steps", f"be above {fewest}", steps, "the recovery from the last fault needs steps"
        )
    for kind in kinds:
        part = kind if kind in KILLS else "engine" if kind != "full-disk" else "driver"
        if (reason := find_absent(config, part)) is not None:
            flag = "--kill" if kind in KILLS else "--faults"
            raise FlagError(flag, "name parts that the run starts", f"{kind}, but {reason}", "leave it out")
    run_dir = Path(config.logging.run_dir)
    if (run_dir / EVENTS_FILE).exists():
        raise FlagError(
            "--run-dir", "be a new folder for a soak", f"{run_dir} with a run", "name another folder"
        )
    _check_checkpoints(config, find_resuming(config, kinds), steps)
    if "full-disk" in kinds:
        _check_disk(run_dir)


def find_resuming(config: Config, kinds: Sequence[str]) -> list[str]:
    """Returns the faults that may end the run. The run restarts its trainer itself, unless a flag forbids it."""
    ends = config.fault_tolerance.max_trainer_restarts == 0
    return [kind for kind in kinds if FAULTS[kind].may_end_run or (kind == "trainer" and ends)]


def _check_checkpoints(config: Config, resuming: Sequence[str], steps: int) -> None:
    """Checks that the run saves checkpoints early enough for the faults that may end it, into an empty folder."""
    save, interval = config.checkpoint.save, config.checkpoint.save_interval
    if save is not None and (saved := iterations(Path(save))):
        raise FlagError(
            "--save",
            "be a folder without checkpoints for a soak",
            f"{save} with iteration {saved[-1]}",
            "name another",
        )
    if not resuming:
        return
    if save is None:
        raise FlagError(
            "--save", f"be given for the faults {', '.join(resuming)}", "none", "name an empty folder"
        )
    if config.checkpoint.finetune:
        raise FlagError(
            "--finetune", f"be left out for the faults {', '.join(resuming)}", True, "give --ref-load"
        )
    most = steps - RECOVERY_STEPS - config.rollout.max_staleness - 1
    if interval is None or interval > most:
        raise FlagError(
            "--save-interval",
            f"be at most {most} for the faults {', '.join(resuming)} and --steps {steps}",
            "none" if interval is None else interval,
            "a run that was ended by a fault resumes from a checkpoint",
        )


def _check_disk(run_dir: Path) -> None:
    """Checks that the run directory is a separate small disk, because the fault fills this disk."""
    import shutil

    if run_dir.is_dir() and run_dir.is_mount() and shutil.disk_usage(run_dir).total <= SMALL_DISK_GIB * 2**30:
        return
    raise FlagError(
        "--run-dir",
        f"be the mount point of a disk of at most {SMALL_DISK_GIB:g} GiB for --faults full-disk",
        run_dir,
        "mount one there: mount -t tmpfs -o size=256m tmpfs DIR",
    )


def _soak(
    config: Config, words: list[str], settings: SoakSettings, plan: list[Planned], stall_s: float
) -> int:
    """Runs the soak, and writes its record and its page."""
    run_dir = Path(config.logging.run_dir)
    folder = soak_folder(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    proxy = None
    if any(FAULTS[kind].hits_replies for kind in settings.kinds):
        path = config.rollout.custom_generate_function_path
        (folder / FUNCTION_FILE).write_text(path or "", encoding="utf-8")
        proxy, words = Proxy(folder), [*words, "--custom-generate-function-path", GENERATE]

    command = [sys.executable, "-P", "-m", "vime", "train", *words]

    def resume() -> list[str] | None:
        added = resume_flags(config)
        return None if added is None else [*command, *added]

    job = Job(
        command=command,
        resume=resume,
        resuming=find_resuming(config, settings.kinds),
        run_dir=run_dir,
        log=folder / "output.log",
        first=settings.first,
        steps=settings.steps,
        staleness=settings.staleness,
        stall_s=stall_s,
    )
    print(
        f"soak: {len(plan)} faults in {settings.steps} steps; run directory {run_dir}, output {job.log}",
        flush=True,
    )
    interrupts.catch_signals()
    started = Descendants()
    runner = Runner(job, list(plan), started, proxy, settings.seed)
    broken, code = None, None
    try:
        runner.finish()
    except BrokenRunError as error:
        broken = str(error)
    except KeyboardInterrupt as interrupt:
        broken, code = f"interrupted{interrupts.by(interrupt)}", interrupts.exit_code(interrupt)
    finally:
        runner.close()
        started.end()
        if proxy is not None:
            proxy.close()
    if not (run_dir / EVENTS_FILE).is_file():
        print(f"vime soak: {broken}", file=sys.stderr)
        return code or 1
    seen = runner.observed
    record = make_record(run_dir, settings, seen.strikes, seen.readings, seen.starts, runner.plan, broken)
    write_record(record, folder / "soak.json")
    page = format_page(record)
    (folder / "report.md").write_text(page, encoding="utf-8")
    print(page)
    print(f"{folder}/report.md, soak.json, output.log")
    return code or (1 if record["failures"] else 0)
