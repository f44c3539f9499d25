"""Tests the environment of a run's processes: a user name, direct connections, imports without the current folder."""

from __future__ import annotations

import compileall
import os
import subprocess
import sys
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from slime.peers import http
from vime.pool.process import SupervisedProcess
from vime.pool.router import RouterSpec
from vime.vllm.router import VllmRouter

ROOT = Path(__file__).parents[3]
NOWHERE = "http://127.0.0.1:9"  # nothing listens at the port `discard`


def test_a_user_id_without_a_name():
    """As under `docker --user 54321`, there is no HOME: vime, torch and Triton still find their names and folders."""
    code = (
        "import os, getpass; os.setuid(54321); os.environ.pop('HOME', None)\n"
        "from vime.run import surroundings, temporary\n"
        "surroundings.prepare(os.environ)\n"
        "from contextlib import ExitStack; from pathlib import Path\n"
        "with ExitStack() as stack: temporary.use_folder(temporary.make_folder(), stack)\n"
        "from vime.doctor.machine import Machine\n"
        "print(getpass.getuser(), Machine().home(), os.environ['TORCHINDUCTOR_CACHE_DIR'])\n"
    )
    if os.getuid() != 0:
        pytest.skip("only root may take another user id")
    dropped = ("LOGNAME", "USER", "USERNAME", "TORCHINDUCTOR_CACHE_DIR")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    # The interpreter's own folders may be closed to other users, so its modules are imported before the change of
    # user.
    preload = "import pwd, shutil, tempfile, slime.peers.http, vime.doctor.machine\n"
    preload += "from vime.run import surroundings, temporary\n"
    done = subprocess.run(
        [sys.executable, "-c", preload + code],
        env={**env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    name, home, cache = done.stdout.split()
    assert name == "uid-54321" and home == "~" and cache.endswith("torchinductor_54321")


def test_hosts_of_the_run_are_reached_directly():
    environ = {"http_proxy": NOWHERE, "NO_PROXY": "intranet, 127.0.0.1"}
    http.bypass_proxy(environ, ["localhost", "127.0.0.1", "10.0.0.7"])
    assert environ["no_proxy"] == environ["NO_PROXY"] == "intranet,127.0.0.1,localhost,10.0.0.7"
    assert environ["http_proxy"] == NOWHERE, "rewards, trackers and the hub keep it"


@pytest.fixture
def proxied(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, NOWHERE)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")


def test_hooks_reach_the_runs_own_servers_directly(proxied):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(204)
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        http.set_own_servers(http.OwnServers(urls=[url]))
        with urllib.request.urlopen(url, timeout=5) as answer:
            assert answer.status == 204
        http.set_own_servers()
        server.shutdown()


def test_the_router_serves_behind_a_proxy_that_is_not_there(proxied, tmp_path):
    router = VllmRouter(RouterSpec(run_key="k", log_path=str(tmp_path / "router.log")))
    try:
        router.start()
        router.wait_ready()
        assert router.engines() == []
    finally:
        router.stop()


def test_the_current_folder_does_not_shadow_packages(tmp_path, monkeypatch):
    """The current folder is not on the path of a server and its children. Python would put it first for a module."""
    (tmp_path / "random.py").write_text("raise SystemExit('shadowed')")
    library = tmp_path / "library"
    library.mkdir()
    again = "subprocess.call([sys.executable, '-m', 'server', 'again']) if len(sys.argv) == 1 else 0"
    (library / "server.py").write_text(f"import random, subprocess, sys\nsys.exit({again})\n")
    monkeypatch.chdir(tmp_path)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(library)])}
    process = SupervisedProcess([sys.executable, "-m", "server"], environ, str(tmp_path / "log"))
    end = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    process.stop()
    assert process.poll() == 0, process.tail_log()


@pytest.mark.parametrize("locale", ["C", "POSIX"])
def test_text_is_utf8_under_any_locale(locale, tmp_path):
    """Text is UTF-8 in this process, in its children, and in servers on hosts with such a locale."""
    (tmp_path / "vocab.txt").write_text("\u0120 \u2192", encoding="utf-8")
    code = (
        "import os, subprocess, sys\n"
        "from vime.run.surroundings import use_utf8\n"
        "use_utf8(os.environ)\n"
        "from vime.pool.process import SupervisedProcess\n"
        "look = [sys.executable, '-c', 'print(ascii(open(\"vocab.txt\").read()))']\n"
        "exec(look[2])\n"
        "print(subprocess.run(look, capture_output=True, text=True).stdout, end='')\n"
        "process = SupervisedProcess(look, {'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PATH': os.environ['PATH']}, 'log')\n"
        "process._process.wait()\n"
        "print(process.tail_log())\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": locale, "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["'\\u0120 \\u2192'"] * 3, done.stderr


BYTECODE = (
    "import sys, os, subprocess\n"
    "real = os.access\n"
    "os.access = lambda path, mode: real(path, mode) and not (sys.argv[1] == 'owner' and 'site' in str(path))\n"
    "from vime.run.surroundings import keep_bytecode; keep_bytecode(os.environ)\n"
    "subprocess.run([sys.executable, '-c', 'import vllm'], check=True)\n"
    "print(os.environ.get('PYTHONDONTWRITEBYTECODE'))\n"
)


@pytest.mark.parametrize("kind", ["variable", "owner", "compiled", "writable"])
def test_processes_of_a_run_find_bytecode(tmp_path: Path, kind: str) -> None:
    """With a stand-in for vLLM's package without bytecode. `owner`: the package belongs to another user. Root can write
    to such a folder, so the test replaces the answer of os.access."""
    package, cache = tmp_path / "site/vllm", tmp_path / "cache"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("x = 1\n")
    if kind == "compiled":
        compileall.compile_dir(package, quiet=2)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHONPYCACHE")}
    env |= {"PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}", "XDG_CACHE_HOME": str(cache)}
    env["PYTHONDONTWRITEBYTECODE"] = "1" if kind in ("variable", "compiled") else ""
    done = subprocess.run([sys.executable, "-c", BYTECODE, kind], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kept = list(cache.glob("vime/bytecode/**/vllm/__init__*.pyc"))
    if kind in ("variable", "owner"):
        assert len(kept) == 1 and done.stdout == "None\n"
        assert "vLLM has no bytecode" in done.stderr and str(cache) in done.stderr
    else:
        assert not kept and done.stdout == f"{env['PYTHONDONTWRITEBYTECODE']}\n" and not done.stderr


@pytest.mark.parametrize("home", ["", "/somewhere"])
def test_tritons_folder_is_named_before_torch_names_another(home: str) -> None:
    code = (
        "import os; from vime.run.surroundings import name_triton_cache\n"
        "import triton; default = triton.knobs.cache.dir\n"
        "assert 'TRITON_CACHE_DIR' not in os.environ; name_triton_cache(os.environ)\n"
        "print(default, os.environ['TRITON_CACHE_DIR'])\n"
        "os.environ['TRITON_CACHE_DIR'] = '/mine'; name_triton_cache(os.environ)\n"
        "print(os.environ['TRITON_CACHE_DIR'])\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    env |= {"PYTHONPATH": str(ROOT), **({"TRITON_HOME": home} if home else {})}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    default, named, kept = done.stdout.split()
    assert default == named and kept == "/mine" and (not home or named == "/somewhere/.triton/cache")
