"""Tests the page of `vime ui` in headless Chromium: its content, keyboard, phone width, 10,000 samples, texts as
text."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from chromium import Chromium
from page_runs import HOSTILE, WORDS, make_run, make_samples

from slime.tracking.events import Events
from slime.tracking.samples import write_samples
from slime.tracking.trackers import JsonlTracker
from slime.types import Sample
from vime.cli import main
from vime.view.page.command import open_runs
from vime.view.page.server import PageServer

pytestmark = pytest.mark.slow

Steps = Callable[[Chromium, str], Awaitable[None]]
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
SCROLL = """new Promise((done) => {
  const list = document.querySelector('.virtual'), times = [];
  let last = performance.now();
  const step = (now) => {
    times.push(now - last);
    last = now;
    list.scrollTop += 700;
    if (times.length < 120) requestAnimationFrame(step);
    else done(times.slice(2));
  };
  requestAnimationFrame(step);
})"""


def in_browser(runs: list[Path], steps: Steps, **look: Any) -> None:
    """Shows the page of `runs`, and calls `steps(tab, address without the key)`. The page may throw no error."""

    async def go() -> None:
        server = PageServer(open_runs(runs))
        address = await server.start(0)
        try:
            async with Chromium(**look) as tab:
                await tab.open(address)
                await tab.until("document.querySelector('figure canvas')?.getAttribute('aria-label')")
                await steps(tab, address.partition("?")[0])
                assert not tab.errors
        finally:
            await server.stop()

    asyncio.run(go())


def test_curves_of_runs_and_their_values_by_keys(tmp_path: Path) -> None:
    async def steps(tab: Chromium, base: str) -> None:
        assert await tab.run("location.search") == ""  # the key is not in the history
        cards = await tab.run("[...document.querySelectorAll('.run')].map((card) => card.innerText)")
        assert "finished" in cards[0] and "the loss must be finite, got nan" in cards[1]
        assert "3 of 5 rollouts trained" in cards[0]
        label = await tab.run("document.querySelector('canvas.chart').getAttribute('aria-label')")
        assert label == "Reward. a: from 0 to 0.6667 over 3 points. b: from 0 to 0.6667 over 3 points"
        await tab.run("document.querySelector('canvas.chart').focus()")
        await tab.key("ArrowRight")
        await tab.key("ArrowRight")
        read = await tab.run("document.querySelector('figure output').textContent")
        assert read == "a: 0.3333 at rollout 1 · b: 0.3333 at rollout 1"
        await tab.run("document.querySelectorAll('figure details')[1].open = true")
        table = await tab.until("document.querySelectorAll('figure')[1].querySelector('tbody')?.innerText")
        assert "not finite" in table

    in_browser([make_run(tmp_path / "a"), make_run(tmp_path / "b", state="failed")], steps)


@pytest.mark.parametrize("dark", [False, True])
def test_a_chart_names_its_lines(tmp_path: Path, dark: bool) -> None:
    """Two evaluation sets of a run have a legend with the colours of their lines. A chart with one line has none."""

    async def steps(tab: Chromium, base: str) -> None:
        legends = await tab.run(
            "Object.fromEntries([...document.querySelectorAll('figure')].map((own) => "
            "[own.querySelector('figcaption').firstChild.textContent, own.querySelector('.legend').innerText]))"
        )
        assert legends["Evaluation"].split() == ["dots", "shuffled"] and legends["Reward"] == ""
        colours = await tab.run(
            "[...document.querySelectorAll('.stroke')].map((own) => own.style.background.match(/rgb.*?\\)/)[0])"
        )
        assert len(set(colours)) == 2
        box = await tab.run("JSON.stringify(document.querySelector('.stroke').getBoundingClientRect())")
        assert json.loads(box)["width"] == 24 and json.loads(box)["height"] == 3

    run = make_run(tmp_path / "a")
    tracker = JsonlTracker(run / "metrics.jsonl", {})
    for step in range(3):
        tracker.log({"eval/dots": 0.3 * step, "eval/shuffled": 0.1 * step}, step, "eval/step")
    tracker.close()
    in_browser([run], steps, dark=dark)


def test_the_timeline_by_keys(tmp_path: Path) -> None:
    read = "document.querySelector('.lanes ~ output').textContent"

    async def steps(tab: Chromium, base: str) -> None:
        await tab.run("location.hash = 'timeline'")
        await tab.until("document.querySelector('.sums tbody')")
        await tab.run("document.querySelector('.lanes').focus()")
        for _ in range(3):
            await tab.key("ArrowDown")
        assert await tab.run(read) == "lane trainer-0 cpu"
        await tab.key("ArrowRight")
        assert (await tab.run(read)).startswith("trainer-0 cpu: trains (train), rollout 0")
        await tab.key("ArrowRight")
        assert (await tab.run(read)).startswith(
            "trainer-0 cpu: forward, backward, optimizer (actor_train), rollout 0"
        )
        caption = "document.querySelector('.sums caption').textContent"
        whole = await tab.run(caption)
        await tab.key("Enter")
        await tab.until(f"{caption} !== {whole!r}")
        await tab.key("Home")
        await tab.until(f"{caption} === {whole!r}")
        await tab.run(
            "(() => { const s = document.querySelector('.controls select'); s.value = '1'; "
            "s.dispatchEvent(new Event('change')); })()"
        )
        await tab.until("!document.querySelector('.sums').innerText.includes('engine starts')")

    in_browser([make_run(tmp_path / "run")], steps)


def test_texts_of_samples_are_shown_as_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    make_samples(run, 0, [HOSTILE, "plain"])

    async def steps(tab: Chromium, base: str) -> None:
        await tab.run("location.hash = 'samples/0/0/0'")
        shown = await tab.until("document.querySelector('article pre')?.textContent")
        assert shown == HOSTILE
        assert HOSTILE[:40] in await tab.run("document.querySelectorAll('.row .prompt')[0].textContent")
        assert await tab.run("document.querySelectorAll('img, article script').length") == 0
        assert "taken" not in await tab.run("document.title")
        who = await tab.run("[...document.querySelectorAll('.who')].map((line) => line.textContent)")
        assert who == ["model, turn 1 · 3 tokens", "tool or environment, not trained · 3 tokens"]

    in_browser([run], steps)


def write_answers(run: Path) -> None:
    """Writes a group of four answers: one turn, two turns with a tool, one that is cut, and two conversations of an
    agent."""
    ids, words = [0, 1, 2, 3, 4, 5], len(WORDS)
    made = [
        Sample(
            group_index=7,
            index=[0, 1, 2, 3, 3][place],
            prompt=[{"role": "user", "content": HOSTILE}],
            tokens=[0, *((place + i) % words for i in ids)],
            response="".join(WORDS[(place + i) % words] for i in ids),
            response_length=len(ids),
            reward=[0.0, 1.0, 0.5, 0.25, 0.25][place],
            loss_mask=[1, 1, 0, 0, 1, 1] if place == 1 else [1] * len(ids),
            status=Sample.Status.TRUNCATED if place == 2 else Sample.Status.COMPLETED,
        )
        for place in range(5)
    ]
    write_samples(run, 0, [*made, *made[:1]], range(5), lambda id_: WORDS[id_])


@pytest.mark.parametrize("width", [1400, 420])
def test_the_answers_of_a_group_side_by_side(tmp_path: Path, width: int) -> None:
    run = make_run(tmp_path / "run")
    write_answers(run)
    cards = "[...document.querySelectorAll('.answer')]"

    async def steps(tab: Chromium, base: str) -> None:
        await tab.run("location.hash = 'samples/0/0/1'")
        text = await tab.until("document.querySelector('.to-group')?.textContent")
        assert text == "Show the 5 answers of the group side by side"
        await tab.run("document.querySelector('.to-group').click()")
        await tab.until("document.querySelectorAll('.answer').length === 5")
        assert await tab.run("location.hash") == "#samples/0/0/1/group"
        shown = await tab.run(f"{cards}.map((card) => card.innerText.replace(/\\s+/g, ' '))")
        heads = [text.partition(" Open ")[::2] for text in shown]
        assert [name for name, _ in heads] == [
            *("Answer 1", "Answer 2", "Answer 3", "Answer 4, part 1 of 2", "Answer 4, part 2 of 2")
        ]
        assert heads[0][1].startswith("reward 0 lowest 6 tokens")
        assert heads[1][1].startswith("reward 1 highest 6 tokens · 2 turns")
        assert heads[2][1].startswith("reward 0.5 truncated 6 tokens")
        for part in ("model, turn 1", "tool or environment, not trained", "model, turn 2"):
            assert part in shown[1]
        whole = await tab.run("document.querySelector('article.group').innerText")
        assert "5 of 6 answers are kept, rewards from 0 to 1, mean 0.4" in whole
        assert whole.count(HOSTILE) == 1 and "taken" not in await tab.run("document.title")
        lefts = await tab.run(f"{cards}.map((card) => card.getBoundingClientRect().left)")
        assert lefts[0] < lefts[1] < lefts[2]
        assert await tab.run("document.documentElement.scrollWidth") <= width
        await tab.run(f"{cards}[2].querySelector('button').click()")
        await tab.until("document.querySelector('h2')?.textContent === 'Sample 0 / 2'")

    in_browser([run], steps, width=width, height=844, phone=width < 500)


def test_search_filters_and_the_list_by_keys(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for rollout in range(3):
        make_samples(run, rollout, [f"prompt {rollout} {i}" for i in range(6)])
    count = "document.querySelector('.left p').textContent"

    async def steps(tab: Chromium, base: str) -> None:
        await tab.run("location.hash = 'samples'")
        await tab.until(f"{count} === '18 of 18 samples'")

        async def put(label: str, text: str) -> None:
            await tab.run(
                f"(() => {{ const f = document.querySelector(`[aria-label='{label}']`) ?? "
                f"document.querySelector('form [type=search]'); f.value = '{text}'; "
                "f.dispatchEvent(new Event('input')); }})()".replace("}})()", "})()")
            )

        await put("Reward, lowest", "1")
        await tab.until(f"{count} === '9 of 18 samples'")
        await put("Version, highest", "1")
        await tab.until(f"{count} === '6 of 18 samples'")
        await put("search", "PROMPT 1")
        await tab.until(f"{count} === '3 of 18 samples'")
        await tab.run("document.querySelector('.virtual').focus()")
        await tab.key("ArrowDown")
        await tab.until("document.querySelector('article h2')?.textContent === 'Sample 1 / 1'")
        await tab.key("End")
        await tab.until("document.querySelector('article h2')?.textContent === 'Sample 1 / 5'")
        assert await tab.run("location.hash") == "#samples/0/1/5"
        await tab.run("document.querySelector('.tokens').focus()")
        await tab.key("ArrowRight")
        read = await tab.run("document.querySelector('.tokens ~ output').textContent")
        assert read.startswith("token 0:") and "difference -0.05" in read

    in_browser([run], steps)


def test_ten_thousand_samples(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for rollout in range(100):
        make_samples(run, rollout, [f"prompt {rollout} {i}" for i in range(100)], tokens=100)

    async def steps(tab: Chromium, base: str) -> None:
        await tab.open("about:blank")
        await tab.open(f"{base}#samples")
        paint = await tab.until(PAINT)
        await tab.until("document.querySelector('.left p')?.textContent === '10,000 of 10,000 samples'", 60)
        assert paint < 1000, f"first paint after {paint} ms"
        times = sorted(await tab.run(SCROLL))
        assert times[int(0.9 * len(times))] < 50, f"frames of {times} ms"
        assert await tab.run("document.querySelectorAll('.row').length") < 60
        await tab.run("document.querySelector('.virtual').scrollTop = 1e9")
        await tab.until(
            "[...document.querySelectorAll('.row')].some((row) => row.innerText.includes('0/99 '))"
        )

    in_browser([run], steps)


def test_a_run_that_goes_on_is_shown_as_it_grows(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", state="running")
    make_samples(run, 2, ["one"], trained=False)

    async def steps(tab: Chromium, base: str) -> None:
        assert "goes on" in await tab.run("document.querySelector('.run').innerText")
        driver, tracker = Events("driver", str(run)), JsonlTracker(run / "metrics.jsonl", {})
        tracker.log({"rollout/raw_reward": 0.875}, 3, "rollout/step")
        driver.add("step", rollout=3)
        await tab.until("document.querySelector('.run').innerText.includes('4 of 5 rollouts trained')")
        await tab.until("document.querySelector('canvas.chart').getAttribute('aria-label').includes('0.875')")
        await tab.run("location.hash = 'samples/0/2/0'")
        await tab.until("document.querySelector('article')?.innerText.includes('not known yet')")
        driver.add("end", state="finished")
        await tab.run("location.hash = 'curves'")
        await tab.until("document.querySelector('.run').innerText.includes('finished')")
        driver.close()
        tracker.close()

    in_browser([run], steps)


@pytest.mark.parametrize(("width", "dark"), [(390, False), (1280, True)])
def test_every_screen_fits_and_its_controls_have_names(tmp_path: Path, width: int, dark: bool) -> None:
    runs = [make_run(tmp_path / name) for name in ("a", "b-with-quite-a-long-name-of-its-directory")]
    for run in runs:
        make_samples(run, 0, ["word " * 200, "x" * 500])
    controls = {
        "button",
        "combobox",
        "textbox",
        "searchbox",
        "spinbutton",
        "checkbox",
        "link",
        "listbox",
        "img",
    }

    async def steps(tab: Chromium, base: str) -> None:
        for place in ("curves", "timeline/0", "samples/0", "samples/1/0/1", "settings"):
            await tab.run(f"location.hash = '{place}'")
            await tab.until("document.querySelector('main').innerText.length > 40")
            await asyncio.sleep(0.5)
            assert await tab.run("document.documentElement.scrollWidth") <= width, place
            tree = (await tab.call("Accessibility.getFullAXTree"))["nodes"]
            seen = [
                node for node in tree if node.get("role", {}).get("value") in controls and not node["ignored"]
            ]
            unnamed = [node["role"]["value"] for node in seen if not node.get("name", {}).get("value")]
            assert len(seen) > 5 and not unnamed, place

    in_browser(runs, steps, width=width, height=844, phone=width < 500, dark=dark)


def test_the_tab_key_reaches_every_part_of_a_screen(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    make_samples(run, 0, ["one"])

    async def steps(tab: Chromium, base: str) -> None:
        await tab.run("location.hash = 'samples/0/0/0'")
        await tab.until("document.querySelector('article')")
        seen = []
        for _ in range(30):
            await tab.key("Tab")
            seen.append(await tab.run("document.activeElement.className || document.activeElement.tagName"))
        order = [name for name, _ in itertools.groupby(seen) if name in ("skip", "A", "virtual", "tokens")]
        assert order[:4] == ["skip", "A", "virtual", "tokens"]

    in_browser([run], steps)


def test_an_exported_file_shows_the_same_without_a_server(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    make_samples(run, 0, [HOSTILE, "plain"])
    out = tmp_path / "page.html"
    assert main(["ui", str(run), "--export", str(out)]) == 0

    async def go() -> None:
        async with Chromium() as tab:
            await tab.open(out.as_uri())
            await tab.until("document.querySelector('.run')?.innerText.includes('3 of 5 rollouts trained')")
            await tab.run("location.hash = 'timeline'")
            await tab.until("document.querySelector('.sums tbody')?.innerText.includes('trainer-0 cpu')")
            await tab.run("location.hash = 'samples/0/0/0'")
            assert await tab.until("document.querySelector('article pre')?.textContent") == HOSTILE
            await tab.run("location.hash = 'samples/0/0/1/group'")
            await tab.until("document.querySelectorAll('.answer').length === 2")
            await tab.run("location.hash = 'settings'")
            await tab.until("document.querySelector('main').innerText.includes('0.001')")
            assert "taken" not in await tab.run("document.title") and not tab.errors

    asyncio.run(go())


def test_without_its_server_the_page_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")

    async def go() -> None:
        server = PageServer(open_runs([run]))
        async with Chromium() as tab:
            await tab.open(await server.start(0))
            await tab.until("document.querySelector('.run')")
            await server.stop()
            await tab.until(
                "document.getElementById('notice').textContent.includes('The server does not answer')"
            )

    asyncio.run(go())
