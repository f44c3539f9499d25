"""Writes run directories for tests of the page, with the code that writes them in a run."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from slime.tracking.events import Events
from slime.tracking.run_record import born
from slime.tracking.samples import write_samples, write_trained
from slime.tracking.trackers import JsonlTracker
from slime.types import Sample

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
WORDS = ("The", " sum", " of", " two", " numbers", " is", " 12", "\n", " and", " then", " so", " 7")


def make_run(
    run_dir: Path, steps: int = 3, state: str = "finished", lr: float = 1e-3, pid: int | None = None
) -> Path:
    """Writes a run with `steps` steps, one engine and one trainer rank. `state`: finished, running, failed. `pid`:
    the driver's."""
    run_dir.mkdir(parents=True)
    driver, engines, trainer, rollouts = (
        Events(name, str(run_dir)) for name in ("driver", "engines", "trainer-0", "rollout")
    )
    pid = pid or os.getpid()
    driver.add("run", host=socket.gethostname(), pid=pid, born=born(pid), rollouts=steps + 2)
    engines.add(
        "engine", model="policy", engine="engine-0", state="starting", address="http://x", place="host"
    )
    engines.add("engine", model="policy", engine="engine-0", state="serving", version=None)
    driver.add("start", rollout=0)
    tracker = JsonlTracker(run_dir / "metrics.jsonl", {})
    for step in range(steps):
        with rollouts.phase("rollout", rollout=step):
            rollouts.add("dropped", groups=[step], reason="zero_std")
        own = {"device": "cpu", "rollout": step}
        with trainer.phase("train", **own), trainer.phase("actor_train", **own):
            pass
        engines.add("weights", model="policy", engines=["engine-0"], version=step + 1)
        tracker.log({"rollout/raw_reward": step / steps}, step, "rollout/step")
        tracker.log({"train/loss": float("nan") if step == 1 else 1 / (step + 1)}, step, "train/step")
        trainer.close()
        rollouts.close()
        driver.add("step", rollout=step)
    tracker.close()
    if state == "finished":
        driver.add("end", state="finished")
    if state == "failed":
        driver.add(
            "error", type="DivergedError", text="the loss must be finite, got nan", log="logs/driver.log"
        )
    for events in (driver, engines):
        events.close()
    (run_dir / "config.json").write_text(json.dumps({"optimizer": {"lr": lr}, "train": {"seed": 1}}))
    (run_dir / "environment.json").write_text(
        json.dumps({"packages": {"torch": "2.11.0"}, "git": {"commit": "abc"}})
    )
    return run_dir


def make_samples(
    run_dir: Path, rollout: int, prompts: Sequence[str], tokens: int = 6, trained: bool = True
) -> None:
    """Writes samples of a rollout, in which each response's second half comes from a tool."""
    samples = []
    for place, prompt in enumerate(prompts):
        ids = [(place + i) % len(WORDS) for i in range(tokens)]
        samples.append(
            Sample(
                group_index=rollout * 100 + place // 2,
                index=place,
                prompt=prompt,
                tokens=[0, 1, *ids],
                response="".join(WORDS[i] for i in ids),
                response_length=tokens,
                reward=float(place % 2),
                loss_mask=[int(i < (tokens + 1) // 2) for i in range(tokens)],
                weight_versions=[rollout],
                rollout_log_probs=[-0.1 * (i + 1) for i in range(tokens)],
                status=Sample.Status.COMPLETED,
            )
        )
    write_samples(run_dir, rollout, samples, range(len(samples)), lambda id_: WORDS[id_])
    if trained:
        lines = []
        for place in range(len(samples)):
            log_probs = [-0.1 * (i + 1) - 0.01 * place for i in range(tokens)]
            lines.append({"place": place, "advantage": 0.5 - place % 2, "log_probs": log_probs})
        write_trained(run_dir, rollout, 0, lines)
