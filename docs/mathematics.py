"""Turns the formulas of docs/ into MathML while the site is built: no script and no font is fetched to show them."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

# as pymdownx.arithmatex leaves them: \( \) inside a line, \[ \] on lines of their own
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Do as MkDocs asks of a hook: give the page's HTML as it is to be."""
    return FORMULA.sub(_mathml, content)


def _mathml(found: re.Match[str]) -> str:
    return str(convert(html.unescape(found[3]), display="inline" if found[2] == "(" else "block"))
