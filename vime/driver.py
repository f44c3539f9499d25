"""`vime train`: turns argv into a configuration, starts the actors and runs slime.loop. Owns the order in which a run
starts and ends.

    driver (this process)      reads the flags, runs the loop, watches the engines
    rollout manager            prompts, generation, rewards, train data          one Ray actor
    trainer ranks              Megatron                                          one Ray actor each
    engine servers             the rollout backend's, behind a router            one subprocess each

All parts end with the driver, in reverse order, also on Ctrl-C, SIGTERM and SIGHUP (which nohup ignores).
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ray.exceptions import RayTaskError

from slime import loop
from slime.cluster import calls, placement, ray_start, rollout_actor, trainers
from slime.cluster.faults.renewal import describe_memory, find_engine_nodes
from slime.cluster.memory_watch import MemoryWatch
from slime.cluster.ray_watch import RayWatch, leave, parts
from slime.cluster.watchdog import Watchdog, remove
from slime.config import Config
from slime.config.secrets import mask_command
from slime.data.drawing.mixing import data_sets
from slime.data.files import prompt_files
from slime.environments.process import close_processes
from slime.memory.host import RAY_THRESHOLD
from slime.operators import headline
from slime.protocols import EnginePool, WeightSource
from slime.roles.groups import step_lines
from slime.roles.served import POLICY
from slime.rollout.straw.flags import STRAW
from slime.rollout.straw.folder import folder_for
from slime.system.disk_space import DiskSpaceGuard
from slime.system.waiting import Wait, report_wait
from slime.tracking import StepLine, make_trackers, write_environment
from slime.tracking.console import choose_columns
from slime.tracking.events import Events
from slime.tracking.report import Reporter
from slime.tracking.run_record import record_error, recorded
from slime.tracking.run_summary import run_summary
from slime.tracking.start_times import StartTimes, process_age
from slime.user_code import add_location
from vime.backends import make_pools
from vime.members.control_socket import ControlSocket
from vime.memory.failure import explained, full_host
from vime.pool.pool import ServerPool
from vime.pool.process import tail
from vime.run import interrupts, surroundings
from vime.run.announced import announce
from vime.run.interrupts import by, catch_signals, exit_code
from vime.run.late_end import end_late
from vime.run.lock import lock_all, written_folders
from vime.run.prompts import with_data
from vime.run.temporary import SHARED_MEMORY, keep_ray_logs, make_folder, make_weights_folder, use_folder
from vime.start.checks import Inputs, check_run, lacks_gpu, read_inputs, weights_parent
from vime.start.dry_reward import check_reward
from vime.start.fork_call import run_in_fork
from vime.start.run_start import finished, resume_flags, start_line
from vime.vllm.cpu.engine import WAIT_VARIABLE

LOG_LINES = 15
BEFORE_RAY = 0.01
"""Share of a host's memory. In a cluster that the run has joined, Ray kills workers above its threshold. vime ends the
run this share earlier."""


@dataclass(frozen=True)
class HostWork:
    """The work of a rollout host: the source of its engines' weights, and the function that runs after its start."""

    source: WeightSource
    serve: Callable[[Config, rollout_actor.RolloutGroup, EnginePool], None]


def main(argv: Sequence[str], host: HostWork | None = None) -> int:
    """Runs one training job, or the work of a rollout host.

    Returns exit code 0, or 1 for a failure, whose last line is the error, or 128 + the number of the signal that
    interrupted the run. Raises ValueError for an error that the user can correct before anything runs.
    """
    catch_signals()
    surroundings.prepare(os.environ)
    config = check_run(argv, _read, download=True)
    close_processes()  # the checks have listed the tasks of environments; the rollout manager runs the episodes
    run_dir = config.logging.run_dir
    for note in config.notes:
        print(f"note: {note}", file=sys.stderr)
    print(start_line(config), flush=True)
    if finished(config):
        end_late(Path(run_dir))
        print(f"all {config.data.num_rollout} rollouts are done; --num-rollout or --num-epoch adds more")
        return 0
    if config.cluster.device == "cpu":
        # For trainers and engines, which share the cores: idle threads sleep instead of spinning.
        os.environ.setdefault(WAIT_VARIABLE, "passive")
    try:
        run(config, argv, host)
    except KeyboardInterrupt as interrupt:
        line = f"interrupted{by(interrupt)}: everything that was started has been stopped{_resumes(config, argv)}"
        with contextlib.suppress(OSError):  # after SIGHUP, the terminal is closed
            _record(line, Path(run_dir).resolve() / "logs" / "driver.log")
        print(line, file=sys.stderr)
        return leave(exit_code(interrupt))
    # border of the run: the error is recorded in the run directory and printed in one line
    except Exception as error:
        if isinstance(error, ValueError) and not isinstance(error, RayTaskError):
            raise
        print(_describe_error(error, Path(run_dir).resolve() / "logs"), file=sys.stderr)
        return leave(1)
    return leave(0)


def _resumes(config: Config, argv: Sequence[str]) -> str:
    """Returns the command that resumes the run, for the last line of a run that its user has ended."""
    with contextlib.suppress(OSError, ValueError):  # the folder of checkpoints may be gone or damaged
        added = resume_flags(config)
        replaced = config.checkpoint.overwrite and run_summary(Path(config.logging.run_dir)).saved is None
        if added is None or replaced:  # the checkpoint belongs to an earlier run
            return ""
        command = shlex.join(["vime", "train", *argv, *added])
        if mask_command(argv) != list(argv):
            command = f"the same command{''.join(f' {word}' for word in added)}"
        return f"; resume it with: {command}"
    return ""


def _starting(config: Config) -> str:
    """Describes the parts of a run that start together."""
    parts = [] if config.debug.debug_rollout_only else ["the trainer"]
    parts += ["the rollout manager", *(["the engines"] if config.num_engines else [])]
    return f"starting {', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else f"starting {parts[0]}"


def _read(config: Config) -> Inputs:
    """Reads all data, as a run does."""

    def read() -> Inputs:
        return read_inputs(
            config, lambda c: with_data(c, check_reward).data.num_rollout, tokenizer=not lacks_gpu(config)
        )

    # in a separate process, because the driver does not need the imports later: transformers, datasets, pandas
    with report_wait("reading the prompts"):
        return run_in_fork(read, "reading the prompts")


def _describe_error(error: Exception, logs: Path) -> str:
    """Describes an error for a person: an actor's last log lines first, and the file with the traceback."""
    shown = ""
    if isinstance(error, calls.ActorError):
        log, details, message = error.log, error.details, str(error)
        if lines := tail(str(log), LOG_LINES):
            shown = f"the last lines of {log}:\n{lines}\n"
    else:
        cause = error.cause if isinstance(error, RayTaskError) else error
        log, details, message = logs / "driver.log", "".join(traceback.format_exception(error)), str(cause)
        # the text of other types may be unclear without the type
        if not isinstance(cause, ValueError | RuntimeError):
            message = f"{type(cause).__name__}: {message}"
        message = add_location(message, str(error)) if isinstance(error, RayTaskError) else message
    try:
        _record(details, log)
    except OSError as full:  # a full disk may have ended the run
        return f"{shown}{details}\nvime train: {message}\n{log} cannot be written: {full.strerror}"
    return f"{shown}vime train: {message}\nmore in {log}"


def _record(text: str, log: Path) -> None:
    log.parent.mkdir(exist_ok=True)
    with open(log, "a", encoding="utf-8") as file:
        file.write(text + "\n")


def _inputs(config: Config) -> list[Path]:
    """Returns the files whose content affects the training, except the weights, which are too large to read twice."""
    data = [file for one in data_sets(config.data) for file in prompt_files(one.path)]
    return [*data, Path(config.rollout.hf_checkpoint) / "config.json"]


def run(config: Config, argv: Sequence[str], host: HostWork | None = None) -> None:
    """Starts everything, trains or does the work of a host, and stops everything."""
    run_dir = Path(config.logging.run_dir)
    start_times = StartTimes(process_age())
    start_times.end("checks")
    with ExitStack() as stack:
        lock_all(written_folders(config), stack)
        journal = stack.enter_context(
            recorded(run_dir, config.data.num_rollout, config.fault_tolerance.rollout_session_id)
        )
        memory = _watch_memory(config, stack)
        temporary, private = make_folder(), _private_weight_dir(config, stack)
        stored = _memory_dir(config, stack)
        stack.callback(remove, [str(temporary)])  # also if the watchdog does not start
        watchdog = Watchdog([str(folder) for folder in (temporary, private, stored) if folder is not None])
        stack.callback(watchdog.dismiss)
        use_folder(temporary, stack)
        config = _use_private(config, stack, weight_dir=private, memory_dir=stored)
        with DiskSpaceGuard("--run-dir", run_dir, "the records of a run"):
            config.save_json(run_dir / "config.json")
            write_environment(run_dir, ["vime", "train", *argv], files=_inputs(config))
        logs = run_dir.resolve() / "logs"
        stack.push(functools.partial(_keep_ray_logs, temporary, logs / "ray"))
        with report_wait("starting or joining Ray"):
            allow = config.cluster.allow_unauthenticated_ray
            ray_start.connect(allow_unauthenticated=allow, temporary=temporary)
        catch_signals()  # Ray has installed a handler that ends the process
        watch = stack.enter_context(RayWatch(watchdog, functools.partial(_gives_up, journal, logs)))
        watch.watch(parts())
        placed = placement.reserve_devices(config)
        watch.watch(parts(find_engine_nodes(placed)))  # trainer ranks of other nodes may start elsewhere
        watch.callback(placed.release)
        start_times.end("Ray")
        if note := describe_memory(config, placed):
            print(f"note: {note}", file=sys.stderr)
        trainer = None
        if not config.debug.debug_rollout_only:
            trainer = trainers.Trainers(config, placed)
            watch.callback(trainer.stop)
        with report_wait(_starting(config)) as wait:
            source = trainer if host is None else host.source
            pool, rollout = _start_engines(config, placed, watch, trainer, wait, source, start_times)
        if trainer is not None:
            _describe_trainer(config, trainer)
        if host is not None:
            host.serve(config, rollout, pool)
            return
        start = trainer.start_rollout_id if trainer is not None else config.data.start_rollout_id or 0
        with report_wait("reading the data position of --load"):
            rollout.load(start)
        shown = StepLine(total=config.data.num_rollout, columns=choose_columns(config))
        report = Reporter(config, make_trackers(config, run_dir, start), shown, memory, start_times)
        stack.push(functools.partial(_close, report))
        print(f"run directory {run_dir}: metrics.jsonl, config.json, logs/", flush=True)
        if trainer is None:
            loop.generate_only(config, rollout, pool, report)
        else:
            with interrupts.asks_first(*_saved_first(config)):
                first = loop.run(config, rollout, trainer, pool, report, interrupts.stop)
            _end_by_signal(config, start, first)


def _describe_trainer(config: Config, trainer: trainers.Trainers) -> None:
    """Prints the trainer's decisions at its start."""
    print(f"operators: {headline(config)}")
    for decision in trainer.decisions:
        print(f"  {decision if config.logging.verbose else decision.short}")
    print(*step_lines(config), sep="\n")
    for line in trainer.memory:
        print(f"memory: {line}")
    for remark in trainer.remarks:
        print(remark)


def _watch_memory(config: Config, stack: ExitStack) -> MemoryWatch:
    """Measures memory until `stack` ends, and explains errors that lack of memory may have caused."""
    threshold = RAY_THRESHOLD - (BEFORE_RAY if os.environ.get("RAY_ADDRESS") else 0)
    watch = stack.enter_context(MemoryWatch(config.logging.run_dir, full_host(config), threshold=threshold))
    stack.enter_context(explained(config, watch))
    return watch


def _gives_up(journal: Events, logs: Path, lost: Exception) -> None:
    """Records the error. The process ends after this call, without the rest of the run."""
    record_error(journal, logs.parent, lost)
    print(_describe_error(lost, logs), file=sys.stderr, flush=True)


def _saved_first(config: Config) -> Iterator[signal.Signals]:
    """Yields the signals after which the run saves before it ends: Ctrl-C with --save, SIGTERM with
    --exit-signal-handler."""
    if config.checkpoint.save is not None:
        yield signal.SIGINT
    if config.checkpoint.exit_signal_handler:
        yield signal.SIGTERM


def _end_by_signal(config: Config, start: int, first: int) -> None:
    """Raises KeyboardInterrupt if rollout `first` was not trained because a signal requested the end."""
    if first < config.rollouts:
        done = f"saved the checkpoint of rollout {first - 1}" if first > start else "no rollout was trained"
        print(f"{done}, rollout {first} is the next", flush=True)
        raise interrupts.interrupt_error()


def _close(report: Reporter, kind: type[BaseException] | None, error: object, trace: object) -> None:
    """Closes the trackers with the state of the run: failed, finished or interrupted."""
    failed = kind is not None and issubclass(kind, Exception)
    if not failed:
        with contextlib.suppress(OSError):  # after SIGHUP, the terminal is closed
            report.conclude()
    report.close("failed" if failed else "finished" if kind is None else "interrupted")


def _keep_ray_logs(
    temporary: Path, to: Path, kind: type[BaseException] | None, error: object, trace: object
) -> None:
    """Copies Ray's logs out of the folder that the run removes, for an end that they may explain."""
    if kind is not None and issubclass(kind, Exception) and not issubclass(kind, ValueError):
        with contextlib.suppress(OSError):  # a full disk may have ended the run
            keep_ray_logs(temporary, to)


def _private_weight_dir(config: Config, stack: ExitStack) -> Path | None:
    """Returns the folder for published weights if --weight-dir is not given: a directory of this run, removed at the
    end."""
    if config.weight_update.weight_dir is not None:
        return None
    run_dir = Path(config.logging.run_dir)
    if (parent := weights_parent(config)) != run_dir:
        return make_weights_folder(parent, run_dir, stack)
    return (run_dir / "weights").resolve()


def _use_private(config: Config, stack: ExitStack, **folders: Path | None) -> Config:
    """Returns the configuration with folders of this run, which are removed at the end of `stack`."""
    own = {name: folder for name, folder in folders.items() if folder is not None}
    for folder in own.values():
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return config.with_values(**{name: str(folder) for name, folder in own.items()})


def _memory_dir(config: Config, stack: ExitStack) -> Path | None:
    """Returns the folder of --recover-from memory: a directory of this run, removed at the end."""
    if config.fault_tolerance.recover_from != "memory":
        return None
    return make_weights_folder(SHARED_MEMORY, Path(config.logging.run_dir), stack)


def _start_engines(
    config: Config,
    placed: placement.Placement,
    watch: RayWatch,
    trainer: trainers.Trainers | None,
    wait: Wait,
    source: WeightSource | None,
    start_times: StartTimes,
) -> tuple[EnginePool, rollout_actor.RolloutGroup]:
    """Starts the engines, and the rollout manager that sends them requests. The manager reads its data while they
    start."""
    pool = make_pools(config, placed, source)
    if trainer is not None and config.rollout.rollout_data_transport == STRAW:
        policy = pool.pools[POLICY]
        assert isinstance(policy, ServerPool)
        policy.announce = functools.partial(announce, folder_for(config).weights)
    watch.callback(pool.stop)
    facts = dict(pool.facts)
    rollout = rollout_actor.RolloutGroup(config, pool.client(), config.data_parallel_size, facts)
    watch.callback(rollout.stop)
    control = ControlSocket(config.logging.run_dir, pool.pools, rollout.set_engines)
    watch.callback(control.close)
    logs = Path(config.logging.run_dir) / "logs"

    pool.launch()
    wait.on = f"the trainer and the rollout manager ({logs}/trainer-0.log, rollout.log)"
    rollout_actor.wait_built(config, trainer, rollout, pool.check_launched)
    start_times.end("trainer and rollout manager")
    wait.on = f"the engines ({logs}/engine-*.log)"
    pool.wait_ready()
    start_times.end("engines")
    control.start()
    return pool, rollout
