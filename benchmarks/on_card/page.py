# SPDX-License-Identifier: Apache-2.0
"""Render report.md as one HTML file, plots included, that needs no network and no other file."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

_STYLE = """
:root { color-scheme: light dark; }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 76rem; margin: 0 auto; padding: 1rem; }
main { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; margin: .75rem 0; }
th, td { border: 1px solid GrayText; padding: .25rem .5rem; text-align: start; vertical-align: top; }
code { font-family: ui-monospace, monospace; font-size: .875em; overflow-wrap: anywhere; }
pre { border: 1px solid GrayText; padding: .5rem; white-space: pre-wrap; }
li { overflow-wrap: anywhere; }
img { max-width: 100%; background: white; }
"""
_RULES = ["heading", "list", "table", "backticks", "fence", "image", "escape"]
"""What report.md uses. Links, HTML and emphasis stay text: a model's answer may contain them."""


def html(markdown: str, folder: Path) -> str:
    """Render the Markdown of a report. Its first line is the title; images are files of ``folder``."""

    def image(self: object, tokens: Sequence[Token], place: int, options: object, env: object) -> str:
        path, text = folder / Path(str(tokens[place].attrs["src"])).name, escape(tokens[place].content)
        if not path.is_file():
            return text
        data = base64.b64encode(path.read_bytes()).decode()
        return f'<img src="data:image/png;base64,{data}" alt="{text}">'

    renderer = MarkdownIt("zero").enable(_RULES)
    renderer.add_render_rule("image", image)
    title = escape(markdown.splitlines()[0].removeprefix("# "))
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    body = renderer.render(markdown).replace("<th>", '<th scope="col">')
    return f'<!doctype html>\n<html lang="en">\n<head>{head}<title>{title}</title><style>{_STYLE}</style></head>\n' + (
        f"<body><main>\n{body}</main></body>\n</html>\n"
    )
