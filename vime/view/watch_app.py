"""Runs the screen of `vime watch`: its layout for a terminal's size, keys, and an update every second."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, Horizontal, VerticalScroll
from textual.widgets import Footer, Static

from vime.view import watch_draw as draw
from vime.view.watch_data import CURVES, HELD_OUT, Curve, Look, WatchedRun

PAGE = 4
"""Number of curves that a small terminal shows at once."""
LARGE, HIGH = 110, 36
"""Columns and lines from which on all curves are shown."""
WIDE = 182
"""Columns from which on a row has room for title, steps and value of four curves."""


class CurveView(Static):
    """One curve that fills its widget."""

    def __init__(self, curve: Curve) -> None:
        super().__init__(classes="curve")
        self.curve = curve
        self.look: Look | None = None

    def show(self, look: Look) -> None:
        self.look = look
        self.refresh()

    def render(self) -> Text:
        if self.look is None:
            return Text("")
        curve, curves = self.curve, self.look.curves
        if curve is CURVES[0] and HELD_OUT.title in curves:
            curve = HELD_OUT
        return draw.joined(draw.curve(curve, curves.get(curve.title), self.size.width, self.size.height))


class Listing(VerticalScroll):
    """A list that scrolls with the arrow keys while it has the focus."""

    def __init__(self, name: str) -> None:
        super().__init__(id=name)
        self.text = Static()

    def compose(self) -> ComposeResult:
        yield self.text

    def show(self, lines: Sequence[Text]) -> None:
        self.text.update(draw.joined(lines))


class WatchApp(App[None]):
    """The app of `vime watch`. `problem`: the ValueError that ended it, when the run can no longer be read."""

    CSS = """
    Screen { layout: vertical; }
    #head { height: auto; }
    #curves { grid-size: 2; grid-gutter: 0 2; height: 3fr; }
    #lists { height: 2fr; }
    .curve { height: 100%; }
    Listing { height: 100%; scrollbar-size-vertical: 1; }
    Listing:focus { background: $boost; }
    #engines { width: 3fr; margin-right: 2; }
    #slow { width: 2fr; }
    #warnings { height: 3; }
    Screen.wide #curves { grid-size: 4; }
    Screen.large #warnings { height: 6; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("m", "more", "more curves"),
    ]
    ENABLE_COMMAND_PALETTE = False
    TITLE = "vime watch"

    def __init__(self, run: WatchedRun, name: str, every_s: float) -> None:
        super().__init__()
        self.problem: ValueError | None = None
        self._run, self._run_name, self._every_s = run, name, every_s
        self._page = 0
        self._look: Look | None = None
        self._looking = asyncio.Lock()

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        with Grid(id="curves"):
            for curve in CURVES:
                yield CurveView(curve)
        with Horizontal(id="lists"):
            yield Listing("engines")
            yield Listing("slow")
        yield Listing("warnings")
        yield Footer()

    async def on_mount(self) -> None:
        self.query_one("#head", Static).update("reading the run ...")
        self._arrange()
        self.set_interval(self._every_s, self.look)
        self.call_after_refresh(self.look)

    async def look(self) -> None:
        """Reads new data in a thread and shows them. A thread is needed because the first read of a long run takes
        seconds."""
        if self._looking.locked():
            return
        async with self._looking:
            try:
                self._look = await asyncio.to_thread(self._run.look)
            except ValueError as error:
                self.problem = error
                self.exit()
                return
            self._show()

    def _show(self) -> None:
        look, width = self._look, self.size.width
        if look is None or not self.query("#head"):  # the view ends
            return
        self.query_one("#head", Static).update(draw.joined(draw.head(self._run_name, look, width)))
        for view in self.query(CurveView):
            view.show(look)
        parts = {
            "engines": draw.engines(look.summary, self._part_width("engines")),
            "slow": draw.slow_samples(look.slow, self._part_width("slow")),
            "warnings": draw.warnings(look.summary, self._part_width("warnings")),
        }
        for name, lines in parts.items():
            self.query_one(f"#{name}", Listing).show(lines)

    def _part_width(self, part: str) -> int:
        return self.query_one(f"#{part}", Listing).scrollable_content_region.width

    def on_resize(self) -> None:
        self.call_after_refresh(self._rearrange)

    def _rearrange(self) -> None:
        self._arrange()
        self.call_after_refresh(self._show)

    def _arrange(self) -> None:
        large = self.size.width >= LARGE and self.size.height >= HIGH
        self.screen.set_class(large, "large")
        self.screen.set_class(large and self.size.width >= WIDE, "wide")
        for number, view in enumerate(self.query(CurveView)):
            view.display = large or number // PAGE == self._page

    def action_more(self) -> None:
        """Shows the other curves, if the terminal has no room for all."""
        self._page = (self._page + 1) % -(-len(CURVES) // PAGE)
        self._rearrange()
