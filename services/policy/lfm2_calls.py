"""One LFM2.5 tool-call block -> calls, or the reason why it cannot be read.

In: the text between ``<|tool_call_start|>`` and ``<|tool_call_end|>``, and the tools that the request declares.
Out: the calls in order. Standard library only; the work grows with the length of the text and no faster.

What LFM2.5's chat template renders, and the drift that models show::

    block    = "[" [call {"," call}] "]"              | one JSON call without the brackets
    call     = name "(" [argument {"," argument}] ")" | {"name": ..., "arguments": {...}}
    argument = name "=" value | value                 (positional: the required parameters first, as declared)
    value    = string | number | list | object | true | false | null      (in Python's or JSON's spelling)

The one repair: a named argument's string may hold quotes of its own kind that the model did not escape. It ends at a
*seam*: a quote before which the inner quotes are in pairs, and after which the block goes on with a parameter that
this tool declares, with a declared tool, or with its end. What only looks like a seam (an undeclared parameter, a
missing comma, a declared parameter after an odd quote) makes the block unreadable: text that may be one call or two,
one argument or two, is refused, never guessed.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

TOOL_CALL_START = "<|tool_call_start|>"
TOOL_CALL_END = "<|tool_call_end|>"

MAX_DEPTH = 32  # nesting of lists and objects in one value; deeper is refused instead of exhausting the stack
MAX_NUMBER_CHARS = 300  # Python itself refuses integers above 4,300 digits


class BlockError(ValueError):
    """The block cannot be read. ``open_string``: its text ended inside a string, so it may go on after a marker."""

    def __init__(self, reason: str, position: int, *, open_string: bool = False) -> None:
        super().__init__(f"{reason} (at character {position})")
        self.open_string = open_string


@dataclass(frozen=True)
class Tool:
    """A declared tool: JSON types by parameter name (an empty set allows any), and the required names in order."""

    parameters: Mapping[str, frozenset[str]] = field(default_factory=dict)
    required: tuple[str, ...] = ()

    @classmethod
    def from_schema(cls, schema: Mapping[str, Any] | None) -> Self:
        """Args: schema: the JSON schema in an OpenAI ``tools`` entry's ``parameters``."""
        schema = schema or {}
        properties = schema.get("properties") or {}
        required = tuple(name for name in schema.get("required") or () if name in properties)
        return cls({name: _json_types(spec) for name, spec in properties.items()}, required)

    @property
    def positional(self) -> tuple[str, ...]:
        return self.required + tuple(name for name in self.parameters if name not in self.required)

    def accepts(self, arguments: Mapping[str, Any]) -> bool:
        """Whether all names are declared and all values of a declared type. Missing ones are the agent's to refuse."""
        return all(
            name in self.parameters and (not (types := self.parameters[name]) or types & _TYPES_OF[type(value)])
            for name, value in arguments.items()
        )


@dataclass(frozen=True)
class Call:
    """``repaired``: a string of it held unescaped quotes and was ended at a seam."""

    name: str
    arguments: dict[str, Any]
    repaired: bool = False


def parse_block(text: str, tools: Mapping[str, Tool]) -> list[Call]:
    """Read one block, without its markers.

    Raises: BlockError: the text is no call list, or can be read in more than one way.
    """
    return _Block(text, tools).calls()


_TYPES_OF = {
    str: {"string"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}


def _json_types(spec: Any) -> frozenset[str]:
    if not isinstance(spec, Mapping):
        return frozenset()
    if choices := spec.get("anyOf") or spec.get("oneOf"):
        types = [_json_types(choice) for choice in choices]
        return frozenset().union(*types) if all(types) else frozenset()
    declared = spec.get("type") or ()
    return frozenset([declared] if isinstance(declared, str) else declared)


_NAME = r"\w[\w.\-]*+"  # MCP servers use hyphens, namespaces dots
_CALL = re.compile(rf"({_NAME})\s*+\(")
_KEY = re.compile(rf"({_NAME})\s*+=(?!=)")
_SPACE = re.compile(r"\s*+")
_RAW = re.compile(r"""[rR](['"])((?:\\.|(?!\1)[^\\])*+)\1""", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(?:(\d++)(?:\.\d*+)?|\.\d++)(?:[eE][-+]?\d++)?(?![\w.])")
_WORD = re.compile(r"\w++")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_STRING = {q: re.compile(rf"{q}([^{q}\\]*+(?:\\.[^{q}\\]*+)*+){q}", re.DOTALL) for q in "'\""}
_TRIPLE = {q: re.compile(rf"{q}{{3}}((?:\\.|(?!{q}{{3}})[^\\])*+){q}{{3}}(?=\s*+[,)])", re.DOTALL) for q in "'\""}

# An escaped character; or a quote and, after it, punctuation and then a name or the end of the block, or another
# string after a comma, an operator or a line break. All other quotes are passed over inside the regex engine.
_MAYBE_SEAM = {
    q: re.compile(
        rf"""\\. | {q}(?= (?P<gap>[\s,;)\]\[]*+) (?: (?P<name>{_NAME})\s*+(?P<op>=(?!=)|[:(]) | \Z )
                        | (?: ,\s | \s++[+%]\s | [^\S\n]*+\n ) \s*+ ["'] )""",
        re.DOTALL | re.VERBOSE,
    )
    for q in "'\""
}
_NEXT_CALL = {"),", ",),"}
_LAST = {")]", ",)]", "),]", ",),]"}
# don't, it's, we'll: no quotes, so they do not count when quotes are paired
_CONTRACTION = re.compile(r"(?<=[^\W\d_])'(?=(?:[stdm]|re|ve|ll)\b)")


class _Block:
    def __init__(self, text: str, tools: Mapping[str, Tool]) -> None:
        self.text = text
        self.tools = tools
        self.pos = 0
        self.repairs = 0  # strings that were ended at a seam
        self.drift = 0  # what the template never writes and may be part of a string with unescaped quotes

    def calls(self) -> list[Call]:
        calls = [self.call() for _ in self.items("]")] if self.accept("[") else [self.json_call()]
        if self.peek():
            raise self.error("text after the calls")
        known = [(self.tools[call.name], call) for call in calls if call.name in self.tools]
        if self.repairs and (self.drift or not all(tool.accepts(call.arguments) for tool, call in known)):
            raise self.error("a repaired block that else is not as the template and the declared tools have it")
        return calls

    def call(self) -> Call:
        if self.peek() == "{":
            return self.json_call()
        name = self.match(_CALL, "a tool's name and '('")[1]
        tool = self.tools.get(name)
        before = self.repairs
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for _ in self.items(")"):
            if key := _KEY.match(self.text, self.pos):
                self.pos = key.end()
                if key[1] in named:
                    raise self.error("a parameter given twice")
                named[key[1]] = None  # given from here on
                named[key[1]] = self.argument(tool, named)
            elif named:
                raise self.error("a positional argument after a named one")
            else:
                positional.append(self.value())
        self.drift += len(positional)
        placed = self.placed(tool, positional)
        if placed.keys() & named:
            raise self.error("a parameter given twice")
        return Call(name, placed | named, self.repairs > before)

    def placed(self, tool: Tool | None, positional: list[Any]) -> dict[str, Any]:
        """Names for positional arguments. One object of declared names stands for all arguments."""
        if tool and len(positional) == 1 and isinstance(positional[0], dict) and tool.accepts(positional[0]):
            return positional[0]
        placed = dict(zip(tool.positional if tool else (), positional, strict=False))
        if len(placed) < len(positional) or (tool and not tool.accepts(placed)):
            raise self.error("a positional argument that the declaration has no place for")
        return placed

    def json_call(self) -> Call:
        call = self.value() if self.peek() == "{" else None
        if isinstance(call, dict):
            arguments = call.get("arguments", call.get("parameters", {}))
            if isinstance(arguments, str):  # as in OpenAI's messages: JSON inside JSON
                inner = _Block(arguments, self.tools)
                arguments = None if inner.peek() != "{" else inner.value()
                if inner.peek():
                    raise self.error("text after the arguments")
            if isinstance(call.get("name"), str) and isinstance(arguments, dict):
                return Call(call["name"], arguments)
        raise self.error("neither a list of calls nor an object with 'name' and 'arguments'")

    def argument(self, tool: Tool | None, given: Mapping[str, Any]) -> Any:
        """A named argument's value; only here are strings repaired. Args: given: names up to and with its own."""
        quote = self.peek()
        if quote not in _STRING or _TRIPLE[quote].match(self.text, self.pos):
            return self.value()
        start = counted = self.pos + 1
        inner = contractions = 0
        for found in _MAYBE_SEAM[quote].finditer(self.text, start):
            if found[0] != quote:
                inner -= found[0][1] == quote  # an escaped quote, which the count below includes
                continue
            inner += self.text.count(quote, counted, found.start())
            if quote == "'":
                contractions += len(_CONTRACTION.findall(self.text, counted, found.start()))
            counted = found.start()
            if self.ends_string(found, tool, given, inner, paired=(inner - contractions) % 2 == 0):
                self.pos = found.end()
                return self.string(start, found.start(), inner)
        raise self.error("the text ends inside a string", open_string=True)

    def ends_string(
        self, quote: re.Match[str], tool: Tool | None, given: Mapping[str, Any], inner: int, paired: bool
    ) -> bool:
        """Whether this quote is a seam. Raises BlockError where it looks like one and is not certain."""
        name, op = quote["name"], quote["op"]
        gap = None if quote["gap"] is None else "".join(quote["gap"].split())  # None: a string follows
        if op == "(":
            seam, declared = gap in _NEXT_CALL, name in self.tools
        elif name:
            seam = gap == "," and op == "="
            declared = tool is not None and name in tool.parameters and name not in given
        else:
            seam, declared = gap in _LAST, gap is not None
        if seam and (inner == 0 or (declared and paired)):
            return True
        end_of_block = gap is not None and name is None
        if end_of_block or (seam and declared) or (paired and (seam or declared or gap is None)):
            self.pos = quote.start()
            raise self.error("a quote that may or may not end the string")
        return False

    def string(self, start: int, end: int, inner: int) -> str:
        raw = self.text[start:end]
        self.repairs += inner > 0
        if inner and (TOOL_CALL_START in raw or TOOL_CALL_END in raw):
            raise self.error("a marker in a string that needs repair")  # it would join two blocks, one cut short
        return _unescape(raw, _SHELL_ESCAPE)

    def value(self, depth: int = 0) -> Any:
        """A value as Python or JSON writes it. Nothing is repaired here."""
        if depth > MAX_DEPTH:
            raise self.error(f"a value nested more than {MAX_DEPTH} deep")
        match self.peek():
            case "'" | '"' as quote:
                triple = _TRIPLE[quote].match(self.text, self.pos)
                found = triple or _STRING[quote].match(self.text, self.pos)
                if not found:
                    raise self.error("the text ends inside a string", open_string=True)
                self.drift += triple is not None
                self.pos = found.end()
                return _unescape(found[1], _LITERAL_ESCAPE if depth else _SHELL_ESCAPE)
            case "[":
                self.pos += 1
                return [self.value(depth + 1) for _ in self.items("]")]
            case "{":
                self.pos += 1
                return {self.key(depth + 1): self.value(depth + 1) for _ in self.items("}")}
        if found := _NUMBER.match(self.text, self.pos):
            return self.number(found)
        if found := _RAW.match(self.text, self.pos):
            self.pos = found.end()
            self.drift += 1
            return found[2]
        word = self.match(_WORD, "a value")[0]
        if word not in _WORDS:
            raise self.error("a bare word where a value belongs")
        return _WORDS[word]

    def key(self, depth: int) -> str:
        key = self.value(depth)
        if not isinstance(key, str):
            raise self.error("an object's key that is no string")
        self.expect(":")
        return key

    def number(self, found: re.Match[str]) -> int | float:
        self.pos = found.end()
        if len(found[0]) > MAX_NUMBER_CHARS:
            raise self.error(f"a number of more than {MAX_NUMBER_CHARS} characters")
        number = int(found[0]) if found[0].lstrip("+-") == found[1] else float(found[0])  # 07 is 7
        if not math.isfinite(number):
            raise self.error("a number that is not finite, which JSON cannot carry")
        return number

    def items(self, close: str) -> Iterator[None]:
        """Stops before each of the items, which commas separate, and ends after ``close``."""
        while not self.accept(close):
            yield
            if not self.accept(","):
                self.expect(close)
                return

    def peek(self) -> str:
        self.pos = _SPACE.match(self.text, self.pos).end()  # type: ignore[union-attr]  # it always matches
        return self.text[self.pos : self.pos + 1]

    def accept(self, char: str) -> bool:
        found = self.peek() == char
        self.pos += found
        return found

    def expect(self, char: str) -> None:
        if not self.accept(char):
            raise self.error(f"no {char!r} where one belongs")

    def match(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        found = pattern.match(self.text, self.pos)
        if not found:
            raise self.error(f"not {what}")
        self.pos = found.end()
        return found

    def error(self, reason: str, *, open_string: bool = False) -> BlockError:
        return BlockError(reason, self.pos, open_string=open_string)


# A string argument is mostly a command, a path or a file's text, where \1, \d, \x, \b and \/ mean themselves: only
# what the chat template escapes is undone, and \t, \" and \uXXXX, which models add. Inside lists and objects the
# template writes JSON (an older one Python's repr), so what those two write is undone there.
_SHELL_ESCAPE = re.compile(r"""\\(?:([\\'"nrt])|u([0-9a-fA-F]{4}))""")
_LITERAL_ESCAPE = re.compile(
    r"""\\(?:([\\'"nrtbf/])|u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|U(000[0-9a-fA-F]{5}|0010[0-9a-fA-F]{4}))"""
)
_CHARACTERS = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def _unescape(raw: str, escape: re.Pattern[str]) -> str:
    if "\\" in raw:
        raw = escape.sub(_character, raw)
    if _SURROGATE.search(raw):  # two halves become one character, a lone half U+FFFD: JSON must stay valid UTF-8
        raw = raw.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return raw


def _character(escape: re.Match[str]) -> str:
    if escape[1]:
        return _CHARACTERS.get(escape[1], escape[1])
    return chr(int(escape[escape.lastindex or 0], 16))
