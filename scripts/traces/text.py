"""Text that an agent wrote, made fit for a terminal and a page."""

from __future__ import annotations

import unicodedata

MAX_CHARS = 20_000
"""Of one message, call or output; the captured file has all of it."""
KEPT = "\n\t"


def printable(text: object, limit: int = MAX_CHARS) -> str:
    """The text with every control, format and unpaired surrogate character shown as ``\\x1b`` or ``\\u202e``.

    A terminal would obey them (colours, titles, the clipboard), and a reader be misled by reversed text.
    """
    whole = text if isinstance(text, str) else repr(text)
    cut = whole[:limit].replace("\r\n", "\n")
    shown = "".join(char if char in KEPT or _is_plain(char) else _escape(char) for char in cut)
    rest = len(whole) - limit
    return f"{shown}\n[{rest} more characters]" if rest > 0 else shown


def _is_plain(char: str) -> bool:
    return unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")


def _escape(char: str) -> str:
    number = ord(char)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def one_line(text: object, limit: int = 100) -> str:
    """For a cell of a table."""
    shown = " ".join(printable(text, limit).split())
    return shown[:limit]
