"""MkDocs hooks of the documentation site: links that leave docs/, and the contributing page.

Pages link to source files with relative links, so that the links work in a checkout. The site has no source files. If
`repo_url` is set, a link that leaves docs/ becomes a link into the repository. Otherwise it becomes the path as code. A
link to a missing file is a warning, and `mkdocs build --strict` turns warnings into errors.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

LOG = logging.getLogger("mkdocs.hooks.docs")
ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^ *(```|~~~)")


def on_files(files: Files, config: Any) -> Files:
    """Adds CONTRIBUTING.md to the site. The file stays in the root of the repository."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "contributing.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrites every link of the page that leaves docs/. Fenced code does not change."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))
    lines, fenced = [], False
    for line in markdown.splitlines():
        if FENCE.match(line):
            fenced = not fenced
        lines.append(line if fenced else LINK.sub(lambda m: rewritten(m, folder, page, config), line))
    return "\n".join(lines)


def rewritten(match: re.Match[str], folder: str, page: Any, config: Any) -> str:
    """Returns a link of a page in `folder`: unchanged inside docs/, otherwise as a repository link or as code."""
    text, target = match.groups()
    name, _, anchor = target.partition("#")
    path = posixpath.normpath(posixpath.join(folder, name))
    if "://" in target or target.startswith(("mailto:", "#")) or path.startswith("docs/"):
        return match[0]
    if not (ROOT / path).exists():
        LOG.warning("%s links to %s, which is not in the repository", page.file.src_uri, path)
    if config.repo_url:
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path}{'#' + anchor if anchor else ''})"
    return f"{text} (`{path}`)" if " " in text.strip("`") else f"`{path}`"
