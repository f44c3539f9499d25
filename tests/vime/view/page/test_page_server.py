"""Tests the server and the exported file of `vime ui`: access, answers, and texts that stay texts."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from page_runs import HOSTILE, make_run, make_samples

from vime.cli import main
from vime.view.page.command import open_runs
from vime.view.page.html import static_files
from vime.view.page.server import PageServer

MAKES_HTML = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc|setHTML"
)
Steps = Callable[[aiohttp.ClientSession, str], Awaitable[None]]


def with_server(runs: list[Path], steps: Steps) -> None:
    """Starts the server of `runs`, and calls `steps(client, address with the key)`. The client keeps cookies."""

    async def go() -> None:
        server = PageServer(open_runs(runs))
        address = await server.start(0)
        try:
            async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as client:
                await steps(client, address)
        finally:
            await server.stop()

    asyncio.run(go())


def test_without_the_key_nothing_is_given(tmp_path: Path) -> None:
    async def steps(client: aiohttp.ClientSession, address: str) -> None:
        base, _, key = address.partition("/?key=")
        assert base.startswith("http://127.0.0.1:") and len(key) == 32
        for path in (
            "/",
            "/?key=",
            "/?key=" + key[:-1] + "~",
            "/?key=%ff",
            "/api/runs",
            "/static/main.js",
            "/no",
        ):
            for cookies in ({}, {f"vime-ui-{base.rpartition(':')[2]}": "wrong"}):
                async with client.get(base + path, cookies=cookies) as answer:
                    text = await answer.text()
                    assert answer.status == 401 and "Open the address that `vime ui` printed" in text
                    assert "run" not in text.lower().replace("running", "")
        async with client.get(address, allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (303, "/")
            cookie = answer.headers["Set-Cookie"]
            assert "HttpOnly" in cookie and "SameSite=Lax" in cookie
        async with client.get(base + "/api/runs") as answer:  # with the cookie now
            assert answer.status == 200 and (await answer.json())[0]["name"] == "run"

    with_server([make_run(tmp_path / "run")], steps)


def test_each_answer_says_that_it_is_not_for_other_pages(tmp_path: Path) -> None:
    async def steps(client: aiohttp.ClientSession, address: str) -> None:
        base = address.partition("/?")[0]
        async with client.get(address) as answer:
            policy = answer.headers["Content-Security-Policy"]
            page = await answer.text()
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and "data:" not in policy.partition("script-src")[2]
        assert set(re.findall(r'(?:src|href)="([^"]+)"', page)) == {"/static/style.css", "data:,"}
        for path in ("/", "/api/runs", "/api/curves?run=0", "/static/main.js", "/api/curves?run=9"):
            async with client.get(base + path) as answer:
                assert answer.headers["Cache-Control"] == "no-store"
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert answer.headers["Referrer-Policy"] == "no-referrer"
                assert "Access-Control-Allow-Origin" not in answer.headers

    with_server([make_run(tmp_path / "run")], steps)


def test_parts_of_runs_and_requests_for_what_is_not_there(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", state="failed")]
    make_samples(runs[1], 2, ["one", HOSTILE])

    async def steps(client: aiohttp.ClientSession, address: str) -> None:
        async with client.get(address):
            pass
        base = address.partition("/?")[0]

        async def ask(path: str, status: int = 200) -> object:
            async with client.get(f"{base}/api/{path}") as answer:
                assert answer.status == status, path
                return json.loads(
                    await answer.text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON")
                )

        assert [run["state"] for run in await ask("runs")] == ["finished", "failed"]
        assert (await ask("curves?run=1"))["train/loss"]["values"][1] is None
        assert (await ask("sample?run=1&rollout=2&place=1"))["prompt"] == HOSTILE
        assert [one["place"] for one in await ask("group?run=1&rollout=2&place=1")] == [0, 1]
        assert (await ask("find?run=1&text=ONERROR"))["found"] == [[2, 1]]
        assert len((await ask("samples?run=1&since=0"))["rows"]["2"]) == 2
        assert (await ask("settings?run=0"))["configuration"]["lr"] == 1e-3
        error = await ask("curves?run=2", 422)
        assert error == {"error": "run must be below 2, got 2; /api/runs has the runs of this page"}
        for wrong in ("-1", "1.5", "../../x", "%2e%2e", "1e3", "", "9" * 40):
            assert (
                "run must be a whole number from 0, got" in (await ask(f"curves?run={wrong}", 422))["error"]
            )
        assert "rollout must be a whole number" in (await ask("sample?run=1&rollout=../../x", 422))["error"]
        assert (
            "must be the index of a stored sample"
            in (await ask("group?run=1&rollout=2&place=7", 422))["error"]
        )
        assert "the rollout must have samples" in (await ask("sample?run=1&rollout=77&place=0", 422))["error"]

    with_server(runs, steps)


def test_no_request_reaches_a_file_beside_the_page(tmp_path: Path) -> None:
    async def steps(client: aiohttp.ClientSession, address: str) -> None:
        host, port = address.split("/")[2].split(":")
        key = address.rpartition("=")[2]
        for path in (
            "/static/../server.py",
            "/static/%2e%2e/server.py",
            "/static/..%2fserver.py",
            "/static//etc/passwd",
        ):
            reader, writer = await asyncio.open_connection(
                host, int(port)
            )  # a client library would clean the path
            writer.write(f"GET {path}?key={key} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()
            assert answer.startswith(b"HTTP/1.1 404"), answer[:80]
        async with client.post(address) as refused:
            assert refused.status == 405

    with_server([make_run(tmp_path / "run")], steps)


def test_the_page_of_a_run_that_disappears_says_so(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b")]

    async def steps(client: aiohttp.ClientSession, address: str) -> None:
        (runs[0] / "events.jsonl").write_text(
            '{"time": 1.0, "source": "x", "kind": "journal", "version": 99}\n'
        )
        await asyncio.sleep(0.3)  # an answer that is read quickly is cached for an equally short time
        async with client.get(address.replace("/?", "/api/runs?")) as answer:
            first, second = await answer.json()
        assert (first["state"], second["state"]) == ("unknown", "finished")
        assert "must have a journal of version" in first["cause"]

    with_server(runs, steps)


def test_modules_make_no_html_of_texts_and_load_nothing_from_elsewhere() -> None:
    assert len(static_files()) > 10
    for name, content in static_files().items():
        text = content.decode()
        assert not MAKES_HTML.search(text), name
        assert not re.search(r"https?://|url\(", text), name
        assert set(re.findall(r'^import .* from "(.*)";', text, re.MULTILINE)) <= {
            f"vime/{module.removesuffix('.js')}" for module in static_files()
        }


def test_an_exported_file_holds_the_page_and_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", state="failed")]
    make_samples(runs[0], 0, ["plain", HOSTILE])
    out = tmp_path / "page.html"
    assert main(["ui", *map(str, runs), "--export", str(out)]) == 0
    assert re.search(r"page.html: 0\.\d MiB, 2 runs, samples kept: 2 of 2, 0 of 0", capsys.readouterr().out)
    page = out.read_text()
    assert HOSTILE not in page and page.count("</script>") == 3
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1])
    assert [part["summary"]["state"] for part in data["runs"]] == ["finished", "failed"]
    assert data["runs"][0]["whole"]["0/1"]["prompt"] == HOSTILE
    assert data["runs"][1]["curves"]["train/loss"]["values"][1] is None
    imports = json.loads(re.search(r'<script type="importmap">(.*?)</script>', page)[1])["imports"]
    assert "vime/main" in imports and all(
        at.startswith("data:text/javascript;base64,") for at in imports.values()
    )
    assert "connect-src" not in page and "default-src 'none'" in page
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".page")] == []


def test_a_file_keeps_the_newest_samples_that_have_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "a")
    for rollout in range(4):
        make_samples(run, rollout, ["one", "two"])
    monkeypatch.setattr("vime.view.page.export.MOST_BYTES", 1800)
    assert main(["ui", str(run), "--export", str(tmp_path / "page.html")]) == 0
    assert "samples kept: 4 of 8" in capsys.readouterr().out
    page = (tmp_path / "page.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])["runs"][0]
    assert set(data["samples"]["rows"]) == {"2", "3"} and set(data["whole"]) == {"2/0", "2/1", "3/0", "3/1"}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--export", "{dir}/page.txt"], "--export must name an .html file, got"),
        (["--export", "{dir}/no/page.html"], "--export must name a file of a folder that is there, got"),
        (["--port", "70000"], "--port must be a port, 1 to 65535, or 0 for any, got 70000"),
    ],
)
def test_flags_that_are_wrong(
    tmp_path: Path, argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    assert main(["ui", str(run), *(word.format(dir=tmp_path) for word in argv)]) == 2
    assert said in capsys.readouterr().err


def test_a_port_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["ui", str(run), "--port", str(port)]) == 2
    assert f"--port must be a free port, got {port}" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_command_serves_until_it_is_interrupted(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    run = make_run(tmp_path / "run")
    command = [sys.executable, "-m", "vime", "ui", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        address = process.stdout.readline().strip()
        listing = asyncio.run(names_of(address))
        os.kill(process.pid, number)
        assert (process.wait(30), listing) == (code, ["run"])
        assert "interrupted" in process.stderr.read()


async def names_of(address: str) -> list[str]:
    async with aiohttp.ClientSession() as client, client.get(address.replace("/?", "/api/runs?")) as answer:
        return [run["name"] for run in await answer.json()]
