"""Fills in a page's template; templates of other rooms extend `page.html.jinja` of this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from megatron_ext.files.aside import file_aside


def write_page(path: Path, template: Path, **values: Any) -> Path:
    """Write a page, all of it or nothing, in a folder that is made where it is missing; returns its path.

    Args:
        path: of the page.
        template: what to fill in.
        values: that it asks for; text is escaped.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template(template.name).render(**values)
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")
    return path
