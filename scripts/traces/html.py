"""HTML that cannot be got wrong: every string is escaped, only ``Html`` is not."""

from __future__ import annotations

import base64
import hashlib
import html


class Html(str):
    """Markup made by ``tag``; anything else is text."""

    __slots__ = ()


VOID = {"meta", "input"}


def tag(_name: str, *children: object, **attributes: object) -> Html:
    """An element. Attributes: ``_`` becomes ``-``, a last ``_`` goes, True is a bare one, None and False none."""
    written = "".join(
        _attribute(key, value) for key, value in attributes.items() if value is not None and value is not False
    )
    if _name in VOID:
        return Html(f"<{_name}{written}>")
    return Html(f"<{_name}{written}>{join(*children)}</{_name}>")


def join(*children: object) -> Html:
    return Html("".join(child if isinstance(child, Html) else html.escape(str(child)) for child in children))


def _attribute(key: str, value: object) -> str:
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(str(value))}"'


def source_hash(text: str) -> str:
    """How a Content-Security-Policy names a script or a style of the page."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
