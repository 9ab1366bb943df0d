"""The documentation as a site that opens from disk and is searched there: make docs.

The pages are plain Markdown. The site's contents follow from README.md: a line that ends with a colon heads a
list, and the pages that the list links to stand below it, in its order.
"""

import re
from pathlib import Path
from typing import Any

project = html_title = "securevfl"
extensions = ["myst_parser"]
root_doc = "README"
exclude_patterns = ["*.py"]
html_theme = "furo"
html_theme_options = {"footer_icons": []}
html_show_sphinx = html_show_copyright = html_show_sourcelink = html_copy_source = False
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # generated pages head small tables with small headings

WEB = re.compile(r"https?://(?!www\.w3\.org/)[^\s\"'`)>]+")
REMARK = re.compile(r"\s*(?:\*|/\*|//)")
SECTION = re.compile(r"^(\w[^\n]*):\n\n((?:- .*\n|  .*\n)+)", re.MULTILINE)


def contents(text: str) -> str:
    """The table of contents that README.md implies, as directives of MyST."""
    parts = []
    for heading, links in SECTION.findall(text):
        pages = re.findall(r"\]\(([\w/-]+)\.md\)", links)
        listed = "\n".join(pages)
        parts.append(f"\n```{{toctree}}\n:hidden:\n:caption: {heading}\n\n{listed}\n```\n")
    return "".join(parts)


def prepare(app: Any, name: str, source: list[str]) -> None:
    """Adds the contents; links to pages that are no part of the site become words."""
    source[0] = re.sub(r"\[([^\]]+)\]\((?:\.\./)+[\w/-]*(?:\.md)?\)", r"\1", source[0])
    if name == root_doc:
        source[0] += contents(source[0])
    if name == "results":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\nresults/*\n```\n"


def forget_addresses(app: Any, error: Exception | None) -> None:
    """Takes out addresses that theme and scripts name in footers and remarks: nothing leads to the web."""
    for path in Path(app.outdir).rglob("*"):
        if path.suffix in (".html", ".js", ".css"):
            text = path.read_text(encoding="utf-8")
            text = re.sub(r'<a [^>]*href="https?://[^"]*"[^>]*>(.*?)</a>', r"\1", text)
            lines = [WEB.sub("", line) if REMARK.match(line) else line for line in text.split("\n")]
            path.write_text("\n".join(lines), encoding="utf-8")


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", prepare)
    app.connect("build-finished", forget_addresses)
