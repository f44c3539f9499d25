"""Writes a run directory as a run with an engine and a trainer rank writes it, for the tests of `vime.view`."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from slime.tracking.events import Events
from slime.tracking.run_record import recorded


def write_metrics(run_dir: Path, rollouts: range, shift: float = 0.0) -> None:
    with (run_dir / "metrics.jsonl").open("a", encoding="utf-8") as file:
        for step in rollouts:
            of_rollout = {
                "rollout/raw_reward": 0.1 * step + shift,
                "perf/step_tokens_per_sec": 1000.0 + 100 * step,
                "perf/step_time": 2.0 + shift,
                "rollout/staleness/token_mean": 0.5,
            }
            trained = {"train/loss": None if step == 1 else 0.5 - 0.1 * step, "train/grad_norm": 1.0}
            for key, values in (("rollout/step", of_rollout), ("train/step", trained)):
                file.write(json.dumps({"step_key": key, "step": step, "time": 1.0, **values}) + "\n")


def write_config(run_dir: Path, **flags: object) -> None:
    sections = {"data": {"num_rollout": 4, "seed": 1}, "logging": {"run_dir": str(run_dir)}}
    for name, value in flags.items():
        (sections["data"] if name != "lr" else sections.setdefault("megatron", {}))[name] = value
    (run_dir / "config.json").write_text(json.dumps(sections), encoding="utf-8")


def begin(engines: Events) -> None:
    engines.add("control_socket", socket="s", host="h", pid=1)
    engines.add(
        "engine", model="policy", engine="engine-0", state="starting", address="http://a:1", place="gpu 0"
    )
    engines.add("engine", model="policy", engine="engine-0", state="serving", version=None)
    engines.add("weights", model="policy", engines=["engine-0"], version=0)
    engines.add("load", model="policy", engine="engine-0", running=12, waiting=3, kv_cache=0.42)


def rollout(number: int, driver: Events, manager: Events, trainer: Events, engines: Events) -> None:
    """Writes one rollout of two groups, the second of which is dropped."""
    groups = [2 * number, 2 * number + 1]
    with manager.phase("rollout", rollout=number):
        manager.add("drawn", groups=groups, version=number)
        manager.add("ended", groups=groups[:1], sample=8 * number, seconds=1.25 + number, tokens=77)
        manager.add("kept", groups=groups[:1])
        manager.add("ended", groups=groups[1:], sample=8 * number + 4, seconds=0.5, tokens=9)
        manager.add("dropped", groups=groups[1:], reason="zero_std")
        manager.add("batch", rollout=number, groups=groups[:1], over_limit=0)
    with driver.phase("train", rollout=number), trainer.phase("train", device="cuda:0", rollout=number):
        with trainer.phase("log_probs", device="cuda:0", rollout=number):
            pass
        with trainer.phase("actor_train", device="cuda:0", rollout=number):
            pass
    engines.add("part", model="policy", version=number + 1, part=0, bytes=1024, seconds=0.001)
    engines.add("weights", model="policy", engines=["engine-0"], version=number + 1)
    driver.add("step", rollout=number, train_s=0.5)


def write_run(run_dir: Path, rollouts: int = 2, error: BaseException | None = None, **flags: object) -> Path:
    """Writes a run of four rollouts that has ended after `rollouts`; `error` ended it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    manager, trainer, engines = (Events(name, str(run_dir)) for name in ("rollout", "trainer-0", "engines"))
    write_config(run_dir, **flags)
    with contextlib.ExitStack() as stack:
        if error is not None:
            stack.enter_context(contextlib.suppress(type(error)))
        with recorded(run_dir, rollouts=4) as driver:
            driver.add("start", rollout=0)
            begin(engines)
            for number in range(rollouts):
                rollout(number, driver, manager, trainer, engines)
            driver.add("evaluation", rollout=rollouts, scores={"tiny": 0.5})
            manager.add(
                "warning", logger="slime.some", text="\x1b[31mgroup 3 is\x1b[0m\nlate \x1b]0;title\x07"
            )
            for events in (manager, trainer, engines):
                events.close()
            if error is not None:
                raise error
    write_metrics(run_dir, range(rollouts))
    return run_dir
