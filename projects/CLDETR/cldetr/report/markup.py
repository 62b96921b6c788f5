"""HTML from Python: every text is escaped unless it is `Markup` already."""

from __future__ import annotations

import html
from collections.abc import Iterable

Content = object  # a text, a number, Markup, None (nothing) or an iterable of these


class Markup(str):
    """Text that is HTML and stands as it is."""


def escape(content: Content) -> Markup:
    """Turns content into HTML; only `Markup` keeps its tags."""
    if content is None:
        return Markup("")
    if isinstance(content, Markup):
        return content
    if isinstance(content, Iterable) and not isinstance(content, (str, bytes)):
        return Markup("".join(escape(part) for part in content))
    return Markup(html.escape(str(content)))


def tag(name: str, /, *content: Content, **attributes: object) -> Markup:
    """An element with its content and attributes, both escaped (`class_` stands for `class`).

    An attribute that is True is given without a value, one that is None or False is left out.
    """
    words = [name]
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            words.append(key)
        elif value is not None and value is not False:
            words.append(f'{key}="{html.escape(str(value))}"')
    head = f"<{' '.join(words)}>"
    if name in ("img", "meta", "br", "col"):
        return Markup(head)
    return Markup(f"{head}{escape(content)}</{name}>")
