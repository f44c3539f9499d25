"""Prints one line per rollout step, and progress bars.

Lines go to stdout in aligned columns, with colours on a terminal. Bars go to stderr, on a terminal only.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from tqdm import tqdm

from slime.protocols import ShownSample
from slime.tracking.console.columns import GAP, LEFT, POLICY, ConsoleColumn, duration, fitting

if TYPE_CHECKING:
    from rich.text import Text

HEADER_EVERY = 20
_NARROWEST = 20
_SHOWN_LINES = 3
"""Maximum number of screen lines for a prompt or a response of a sample."""


class StepLine:
    """Prints one aligned line per rollout step, with a header every 20 lines.

    On a terminal, a line has the columns that fit the terminal's width, which is read for each line. A file gets all
    columns. length: response tokens. kl_ref: KL to the reference model. kl_old: KL to the policy that sampled. dlogp
    and max: mean and largest absolute difference between the trainer's and the engine's log-probs (nats). grad:
    gradient norm. fast: share of an operator's calls that ran its fast implementation, averaged over operators (0 on a
    CPU). roll_s, train_s and sync_s are seconds; left is the time until the end. held_out and held_acc are the loss and
    the accuracy of the first held-out set in the newest evaluation. `-` marks a metric that the step does not have. On
    a terminal, the reward's colour shows its change (green or red), and values that are not finite are highlighted.
    """

    def __init__(
        self,
        total: int | None = None,
        stream: TextIO | None = None,
        columns: Sequence[ConsoleColumn] = POLICY,
    ) -> None:
        self._total = total
        self._stream = sys.stdout if stream is None else stream
        self._columns = tuple(columns)
        self._header: list[ConsoleColumn] = []
        """Columns of the last header."""
        self._lines = 0
        self._last_reward: float | None = None

    @property
    def is_terminal(self) -> bool:
        return self._stream.isatty()

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the line of rollout `step`, with its logged number. `metrics` may hold more metrics than the line
        shows."""
        position = f"{step}/{self._total}" if self._total is not None else str(step)
        first = max(5, 2 * len(str(self._total)) + 1 if self._total is not None else 0)
        width = self._width()
        columns = fitting(self._columns, None if width is None else width - first)
        if self._lines % HEADER_EVERY == 0 or columns != self._header:
            header = [f"{'step':>{first}}"] + [f"{column.title:>{column.width}}" for column in columns]
            self._print([(cell, "bold") for cell in header])
            self._header = columns
        self._lines += 1
        cells = [(f"{position:>{first}}", "bold")]
        for column in columns:
            value = next((metrics[name] for name in column.metrics if name in metrics), None)
            cells.append((f"{_written(column, value):>{column.width}}", self._style(column.title, value)))
        while width is not None and len(GAP.join(cell for cell, _ in cells)) > width and len(cells) > 2:
            cells.pop()  # a value that is wider than its column
        self._print(cells)
        self._last_reward = metrics.get("rollout/raw_reward", self._last_reward)

    def show_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the eval/ metrics of `step` in one line, without the prefix of their names. On a terminal, a long line
        is broken between two metrics."""
        begin, width = f"eval at step {step}:", self._width()
        lines = [[begin]]
        for name, value in metrics.items():
            text = f"{name.removeprefix('eval/')} {value:.4g}"
            if width is not None and len(lines[-1]) > 1 and len(GAP.join([*lines[-1], text])) > width:
                lines.append([" " * len(begin)])
            lines[-1].append(text)
        for head, *values in lines:
            self._print([(head, "bold"), (GAP.join(values), "cyan")])

    def show_warning(self, text: str) -> None:
        """Prints a warning about the run on a separate line."""
        self._print([(f"warning: {text}", "bold yellow")])

    def show_sample(self, step: int, sample: ShownSample) -> None:
        """Prints the end of a prompt, the beginning of its response, the label and the reward."""
        self._print(
            [(f"sample of rollout {step}:", "bold"), (f"reward {sample.reward}, {sample.status}", "")]
        )
        size = _SHOWN_LINES * ((self._width() or 120) - len("  response  "))
        prompt, response, label = map(_on_one_line, (sample.prompt, sample.response, sample.label))
        shown = {
            "prompt": prompt if len(prompt) <= size else "..." + prompt[3 - size :],
            "response": response if len(response) <= size else response[: size - 3] + "...",
            "label": label if len(label) <= size else label[: size - 3] + "...",
        }
        for name, text in shown.items():
            if text or name != "label":
                for at in range(0, max(len(text), 1), size // _SHOWN_LINES):
                    part = text[at : at + size // _SHOWN_LINES]
                    self._print([(f"  {name if at == 0 else '':<8}", "dim"), (part, "")])

    def show_end(self, lines: Sequence[tuple[str, str]]) -> None:
        """Prints the last lines of a run: a title and a text each. Commands in the texts are not broken."""
        for title, text in lines:
            self._print([(f"{title}:", "bold"), (text, "")], gap=" ")

    def _width(self) -> int | None:
        """Returns the characters of a line of the terminal. Returns None for another stream, and if the width is
        unknown."""
        if not self._stream.isatty():
            return None
        if (columns := os.environ.get("COLUMNS", "")).isdecimal() and int(columns) > 0:
            return max(_NARROWEST, int(columns))
        try:
            width = os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError):  # no file descriptor, or not one of a terminal
            return None
        return max(_NARROWEST, width) if width else None

    def _style(self, name: str, value: float | None) -> str:
        if value is None:
            return "dim"
        if not math.isfinite(value):
            return "bold white on red"
        last = self._last_reward
        if name == "reward" and last is not None and value != last:
            return "green" if value > last else "red"
        return "dim" if name.endswith("_s") else ""

    def _print(self, cells: list[tuple[str, str]], gap: str = GAP) -> None:
        with tqdm.external_write_mode(file=self._stream):  # hides running bars while it prints
            if self._stream.isatty():
                _print_coloured(cells, self._stream, gap)
            else:
                self._stream.write(gap.join(cell for cell, _ in cells) + "\n")
            self._stream.flush()


def _written(column: ConsoleColumn, value: float | None) -> str:
    if value is None:
        return "-"
    if LEFT in column.metrics:
        return duration(value)
    return format(value, column.spec)


def _on_one_line(text: str) -> str:
    """Returns the text on one line without control characters, which would change the terminal."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def _print_coloured(cells: list[tuple[str, str]], stream: TextIO, gap: str) -> None:
    from rich.console import Console
    from rich.text import Text

    line: Text = Text(gap).join(Text(cell, style=style) for cell, style in cells)
    Console(file=stream, highlight=False).print(line, soft_wrap=True)


def progress(desc: str, unit: str, stream: TextIO | None = None) -> tqdm:
    """Returns a progress bar as a context manager. The caller sets its `n` and `total`.

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
