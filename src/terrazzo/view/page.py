"""A page from its data: one HTML file that contains its styles, scripts and data, and needs no network.

The data are in an element that browsers do not run, escaped so that they cannot end it. A content security policy in
the page allows only its own script, by its hash, and connections only to the server of the page.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

# In order: each uses only those before it.
SCRIPTS: Final = (
    "dom.js",
    "keys.js",
    "list.js",
    "search.js",
    "tree.js",
    "overview.js",
    "grid.js",
    "drawing.js",
    "charts.js",
    "timeline.js",
    "values.js",
    "checkpoint.js",
    "diff.js",
    "layout.js",
    "trace.js",
    "run.js",
    "main.js",
)
_IMPORT: Final = re.compile(r'^import \{[^}]*\} from "\./[a-z]+\.js";\n', re.MULTILINE)
_FRAME_HEIGHT: Final = 640


@dataclass(frozen=True, repr=False)
class Page:
    """A page of the viewer, as data. `html` makes one file of it, and a notebook displays it in a frame.

    Attributes:
        data: plain values, from the functions of `terrazzo.view.data`.
    """

    data: dict[str, Any]

    @property
    def title(self) -> str:
        """The title of the page."""
        return str(self.data["title"])

    def html(self, *, served: bool = False) -> str:
        """The page as HTML.

        Args:
            served: whether a server computes statistics, which the page then requests.
        """
        script = _script()
        # JSON has "<" only in strings, in which it can be escaped.
        data = json.dumps(self.data | {"served": served}, allow_nan=False, separators=(",", ":")).replace(
            "<", "\\u003c"
        )
        return "\n".join(
            [
                '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
                f'<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                f'<link rel="icon" href="data:,">\n<title>{escape(self.title)} - terrazzo</title>',
                f"<style>\n{_text('style.css')}</style>\n</head>\n<body>",
                '<main id="page"><noscript>A script draws this page, and scripts are turned off.</noscript></main>',
                f'<script type="application/json" id="data">{data}</script>',
                f'<script type="module">{script}</script>',
                "</body>\n</html>\n",
            ]
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file."""
        Path(path).write_text(self.html(), encoding="utf-8")

    def __repr__(self) -> str:
        return f"Page({self.title!r})"

    def _repr_html_(self) -> str:
        frame = f'style="width:100%;height:{_FRAME_HEIGHT}px;border:0" sandbox="allow-scripts"'
        return f'<iframe srcdoc="{escape(self.html())}" {frame}></iframe>'


def _policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


@cache
def _script() -> str:
    """All modules as one script. Each uses only those before it, so their imports can be removed."""
    parts = []
    for name in SCRIPTS:
        text = _IMPORT.sub("", _text(name))
        parts.append(re.sub(r"^export ", "", text, flags=re.MULTILINE))
    return "\n".join(parts)


def _text(name: str) -> str:
    return (files("terrazzo.view") / "page" / name).read_text(encoding="utf-8")
