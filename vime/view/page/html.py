"""Reads the page's files and builds the HTML that loads them: from the server, or everything inside one file.

The modules import each other by names such as `vime/dom`. An import map of the page maps each name to an address of the
server, or to the module itself as a data: address. So both kinds of page run the same files.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from pathlib import Path

from vime.view.page.cached import to_json

_STATIC = Path(__file__).parent / "static"
_NONE = "base-uri 'none'; form-action 'none'; default-src 'none'; img-src data:"


@cache
def static_files() -> dict[str, bytes]:
    """Returns name -> content of the files that the page loads."""
    return {
        path.name: path.read_bytes() for path in sorted(_STATIC.iterdir()) if path.suffix in (".js", ".css")
    }


def served_page() -> tuple[str, str]:
    """Returns the page that loads its files from the server, and its Content-Security-Policy."""
    imports = _import_map({name: f"/static/{name}" for name in static_files()})
    page = _filled('<link rel="stylesheet" href="/static/style.css">', imports, "")
    policy = (
        f"{_NONE}; style-src 'self'; connect-src 'self'; script-src 'self' {_hash(imports)} {_hash(_START)}"
    )
    return page, f"{policy}; frame-ancestors 'none'"


def exported_page(data: object) -> str:
    """Returns one file with everything inside. Its policy runs the scripts of this file only, and loads nothing."""
    style = static_files()["style.css"].decode()
    imports = _import_map(
        {
            name: f"data:text/javascript;base64,{base64.b64encode(content).decode()}"
            for name, content in static_files().items()
        }
    )
    policy = f"{_NONE}; style-src {_hash(style)}; script-src data: {_hash(imports)} {_hash(_START)}"
    inside = f'<script type="application/json" id="data">{_in_script(to_json(data))}</script>'
    page = _filled(f"<style>{style}</style>", imports, inside)
    return page.replace(
        "<head>", f'<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}">', 1
    )


_START = 'import "vime/main";'


def _filled(style: str, imports: str, data: str) -> str:
    page = (_STATIC / "index.html").read_text(encoding="utf-8")
    scripts = f'<script type="importmap">{imports}</script>\n{data}\n<script type="module">{_START}</script>'
    return page.replace("__STYLE__", style).replace("__SCRIPTS__", scripts)


def _import_map(addresses: dict[str, str]) -> str:
    modules = {
        f"vime/{name.removesuffix('.js')}": at for name, at in addresses.items() if name.endswith(".js")
    }
    return json.dumps({"imports": modules})


def _hash(text: str) -> str:
    """Returns a source of a Content-Security-Policy that allows inline text with this content."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _in_script(data: str) -> str:
    """Escapes JSON so that it cannot end its script element."""
    return data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
