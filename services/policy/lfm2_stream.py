"""LFM2.5's output, in pieces of any size -> content, calls, and the blocks that could not be read.

In: text as the detokenizer hands it over, special tokens included. Out: what the agent gets. A call's block is held
back until its end marker and then read once, so every cut of the same text gives the same result, and each character
is handled a bounded number of times. Nothing here knows vLLM; the parsers beside this module do.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from services.policy.lfm2_calls import TOOL_CALL_END, TOOL_CALL_START, BlockError, Call, Tool, parse_block

THINK_START = "<think>"
THINK_END = "</think>"

MAX_END_MARKERS = 8  # that one block may hold inside its strings: the block is read again at each of them

_MARKER = re.compile(r"<(?:\|\w{1,40}\|>|/?think>)", re.ASCII)
_MARKER_BEGUN = re.compile(r"<(?:\|(?:\w{1,40}\|?)?|/?(?:t(?:h(?:i(?:nk?)?)?)?)?)?\Z", re.ASCII)
_LONGEST_MARKER = 44


class MarkerLexer:
    """Cuts text at ``<|...|>``, ``<think>`` and ``</think>``; holds back an end that may become one of them."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> Iterator[str]:
        """Yields markers whole, and the text between them in any number of pieces."""
        text = self._held + text
        end = text.rfind("<", max(0, len(text) - _LONGEST_MARKER))
        if end < 0 or not _MARKER_BEGUN.match(text, end):
            end = len(text)
        self._held = text[end:]
        start = 0
        for marker in _MARKER.finditer(text, 0, end):
            if marker.start() > start:
                yield text[start : marker.start()]
            yield marker[0]
            start = marker.end()
        if end > start:
            yield text[start:end]

    def finish(self) -> str:
        """What was held back, and is text after all."""
        held, self._held = self._held, ""
        return held


class ReasoningStream:
    """Splits a completion whose prompt ended in ``<think>`` at the first ``</think>``."""

    def __init__(self) -> None:
        self._lexer = MarkerLexer()
        self.ended = False

    def feed(self, text: str) -> tuple[str, str]:
        """Returns: reasoning, without markers; and what follows it, as it came."""
        if self.ended:
            return "", text
        reasoning: list[str] = []
        rest: list[str] = []
        for piece in self._lexer.feed(text):
            if self.ended:
                rest.append(piece)
            elif piece == THINK_END:
                self.ended = True
            elif piece not in (THINK_START, TOOL_CALL_START, TOOL_CALL_END):
                reasoning.append(piece)
        if self.ended:
            rest.append(self._lexer.finish())
        return "".join(reasoning), "".join(rest)

    def finish(self) -> str:
        """Returns: reasoning that was held back when the completion ended."""
        return self._lexer.finish()


@dataclass
class Output:
    """What pieces of text gave. ``unread``: for each block that is not run, why."""

    content: str = ""
    calls: list[Call] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    @classmethod
    def joined(cls, outputs: Iterable["Output"]) -> "Output":
        parts = list(outputs)
        return cls(
            "".join(part.content for part in parts),
            [call for part in parts for call in part.calls],
            [reason for part in parts for reason in part.unread],
        )


class _State(Enum):
    TEXT = "content"
    THINK = "between <think> and </think>, where calls are not run"
    BLOCK = "between the markers of a tool call"


class CallStream:
    """One completion: feed it all text, then finish it.

    After a block that could not be read, later blocks are not run either: where the unread one ends is not certain
    (they may be part of a string of it), and a call may depend on the one that was lost.
    """

    def __init__(self, tools: Mapping[str, Tool], *, drop: Collection[str] = (), think_is_content: bool = True) -> None:
        """
        Args: tools: what the request declares, by name.
            drop: other special tokens, to be removed from content as ``skip_special_tokens=True`` would.
            think_is_content: pass ``<think>...</think>`` on as text; False leaves it out.
        """
        self._tools = tools
        self._drop = drop
        self._think_is_content = think_is_content
        self._lexer = MarkerLexer()
        self._state = _State.TEXT
        self._block: list[str] = []
        self._end_markers: list[int] = []  # where in _block; all so far lie in a string
        self._lost = False
        # Text that is not shown yet: whitespace at the margins, and after a block "[...", which LFM2 at times repeats
        # from that block and ends a second time.
        self._held: list[str] | None = []
        self._may_echo = self._echo = False
        self._content: list[str] = []
        self._output = Output()

    def feed(self, text: str) -> Output:
        for piece in self._lexer.feed(text):
            self._take(piece)
        return self._flush()

    def finish(self) -> Output:
        self._take(self._lexer.finish())
        while self._state is _State.BLOCK:
            self._give_up("the output ended before the block did")
        self._show_echo()
        return self._flush()

    def _flush(self) -> Output:
        output, self._output = self._output, Output()
        output.content = "".join(self._content)
        self._content = []
        return output

    def _take(self, piece: str) -> None:
        if self._state is _State.BLOCK:
            self._block.append(piece)
            if piece == TOOL_CALL_END:
                self._end_block()
        elif piece == TOOL_CALL_START:
            if self._state is _State.TEXT:
                self._show_echo()
                self._state = _State.BLOCK
        elif piece == TOOL_CALL_END:
            if self._echo:
                self._held, self._echo = [], False
        elif piece not in self._drop:
            if self._think_is_content or (self._state is _State.TEXT and piece not in (THINK_START, THINK_END)):
                self._text(piece)
            self._state = {THINK_START: _State.THINK, THINK_END: _State.TEXT}.get(piece, self._state)

    def _end_block(self) -> None:
        self._end_markers.append(len(self._block) - 1)
        if self._lost:
            return self._give_up("it follows a block that could not be read")
        try:
            self._output.calls += parse_block("".join(self._block[:-1]), self._tools)
        except BlockError as error:
            if not error.open_string or len(self._end_markers) == MAX_END_MARKERS:
                self._give_up(str(error))
        else:
            self._leave_block()

    def _give_up(self, reason: str) -> None:
        """The block ends at its first end marker, unread; what follows that is text."""
        rest = self._block[self._end_markers[0] + 1 :] if self._end_markers else []
        self._output.unread.append(reason)
        self._lost = True
        self._leave_block()
        for piece in rest:
            self._take(piece)

    def _leave_block(self) -> None:
        self._state = _State.TEXT
        self._block, self._end_markers = [], []
        self._held, self._may_echo = [], True

    def _text(self, text: str) -> None:
        if self._held is None:
            self._content.append(text)
            return
        self._held.append(text)
        if not self._echo and (visible := text.lstrip()):
            self._echo = self._may_echo and visible[0] == "["
            if not self._echo:
                self._content += self._held
                self._held = None

    def _show_echo(self) -> None:
        if self._echo:
            self._content += self._held or ()
            self._held, self._echo = None, False
