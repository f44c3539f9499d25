"""Console output: one line per rollout step, and progress bars. Prints existing metrics and computes none.

Lines go to stdout in aligned columns, with colours on a terminal. Bars go to stderr, on a terminal only.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

from tqdm import tqdm

from slime.tracking.metrics import LOGPROB_DIFF, LOGPROB_DIFF_MAX

if TYPE_CHECKING:
    from rich.text import Text

HEADER_EVERY = 20

# header, metric names (the first one present is shown), format, width
_COLUMNS: tuple[tuple[str, tuple[str, ...], str, int], ...] = (
    ("reward", ("rollout/raw_reward",), ".3f", 6),
    ("length", ("rollout/response_len/mean",), ".1f", 6),
    ("loss", ("train/loss",), ".1e", 8),
    ("kl_ref", ("train/kl_loss",), ".1e", 8),
    ("kl_old", ("train/ppo_kl",), ".1e", 8),
    ("dlogp", (LOGPROB_DIFF,), ".1e", 7),
    ("max", (LOGPROB_DIFF_MAX,), ".1e", 7),
    ("grad", ("train/grad_norm",), ".3g", 7),
    ("fast", ("rl_kernel/fast",), ".0%", 4),
    ("tok/s/gpu", ("perf/tokens_per_gpu_per_sec",), ",.0f", 9),
    ("roll_s", ("perf/rollout_time",), ".1f", 6),
    ("train_s", ("perf/train_time", "perf/actor_train_time"), ".1f", 7),
    ("sync_s", ("perf/update_weights_time",), ".1f", 6),
)


class StepLine:
    """Prints one aligned line per rollout step, with a header every 20 lines.

    length: response tokens. kl_ref: KL to the reference model. kl_old: KL to the policy that sampled. dlogp and max:
    mean and largest absolute difference between the trainer's and the engine's log-probs (nats). grad: gradient norm.
    fast: share of an operator's calls that ran its fast implementation, averaged over operators (0 on a CPU). The
    last three columns are seconds. `-` marks a metric that the step does not have. On a terminal, the reward's colour
    shows its change (green or red), and values that are not finite are highlighted.
    """

    def __init__(self, total: int | None = None, stream: TextIO | None = None) -> None:
        self._total = total
        self._stream = sys.stdout if stream is None else stream
        self._lines = 0
        self._last_reward: float | None = None

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of rollout `step`, with its logged number. `metrics` may hold more metrics than are shown."""
        position = f"{step}/{self._total}" if self._total is not None else str(step)
        width = max(5, 2 * len(str(self._total)) + 1 if self._total is not None else 0)
        if self._lines % HEADER_EVERY == 0:
            header = [f"{'step':>{width}}"] + [f"{name:>{size}}" for name, _, _, size in _COLUMNS]
            self._print([(cell, "bold") for cell in header])
        self._lines += 1
        cells = [(f"{position:>{width}}", "bold")]
        for name, sources, spec, size in _COLUMNS:
            value = next((metrics[source] for source in sources if source in metrics), None)
            text = "-" if value is None else format(value, spec)
            cells.append((f"{text:>{size}}", self._style(name, value)))
        self._print(cells)
        self._last_reward = metrics.get("rollout/raw_reward", self._last_reward)

    def show_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print one line with the eval/ metrics of `step`. Names are printed without the prefix."""
        values = [f"{name.removeprefix('eval/')} {value:.4g}" for name, value in metrics.items()]
        self._print([(f"eval at step {step}:", "bold"), ("  ".join(values), "cyan")])

    def show_warning(self, text: str) -> None:
        """Print a warning about the run, on a line of its own."""
        self._print([(f"warning: {text}", "bold yellow")])

    def _style(self, name: str, value: float | None) -> str:
        if value is None:
            return "dim"
        if not math.isfinite(value):
            return "bold white on red"
        last = self._last_reward
        if name == "reward" and last is not None and value != last:
            return "green" if value > last else "red"
        return "dim" if name.endswith("_s") else ""

    def _print(self, cells: list[tuple[str, str]]) -> None:
        with tqdm.external_write_mode(file=self._stream):  # hides running bars meanwhile
            if self._stream.isatty():
                _print_coloured(cells, self._stream)
            else:
                self._stream.write("  ".join(cell for cell, _ in cells) + "\n")
            self._stream.flush()


def _print_coloured(cells: list[tuple[str, str]], stream: TextIO) -> None:
    from rich.console import Console
    from rich.text import Text

    line: Text = Text("  ").join(Text(cell, style=style) for cell, style in cells)
    Console(file=stream, highlight=False).print(line, soft_wrap=True)


def progress(desc: str, unit: str, stream: TextIO | None = None) -> tqdm:
    """A progress bar as a context manager. The caller sets its `n` and `total`.

    The bar is cleared at the end, so that only the step lines stay. It prints nothing if `stream` (stderr) is not a
    terminal. Ray actors have no terminal, so bars belong in the driver.
    """
    stream = sys.stderr if stream is None else stream
    return tqdm(
        desc=desc,
        unit=unit,
        leave=False,
        file=stream,
        disable=not stream.isatty(),
        dynamic_ncols=True,
    )
