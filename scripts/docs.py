"""``python -m scripts.docs``: the parts of docs/ that are made from the code; ``--check``: are they current?

docs/recipe.md is the recipe's model, key by key. docs/metrics.md holds the metric tables between two markers.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from scripts.stack import ROOT
from services.common import metrics
from services.common.errors import RecipeError, run_main
from services.common.metrics import Metric
from services.common.recipe import Recipe

RECIPE_PAGE = ROOT / "docs/recipe.md"
METRICS_PAGE = ROOT / "docs/metrics.md"
BEGIN, END = "<!-- made by scripts/docs.py -->", "<!-- end -->"


# --- The recipe -----------------------------------------------------------------------------------------------------


def recipe_page() -> str:
    lines = [
        "# The recipe, key by key",
        "",
        "One TOML file says what a run is; [data/recipes](../data/recipes) has those that come with it. Unknown",
        'keys are refused, and so is a value of another type: `4` is no `"4"`. A required key must be given.',
        "`RUN_NAME` and `MAX_STEPS` in the environment are set over `run.name` and `trainer.max_steps`.",
        "",
        "This page is made from `services/common/recipe.py` by `python -m scripts.docs`.",
    ]
    for name, field in Recipe.model_fields.items():
        section = field.annotation
        assert isinstance(section, type) and issubclass(section, BaseModel)
        lines += ["", f"## [{name}]", ""]
        if section.__doc__:
            lines += [" ".join(section.__doc__.split()).replace("``", "`"), ""]
        lines += ["| key | allowed | default | meaning |", "|---|---|---|---|"]
        lines += [_key_row(key, found) for key, found in section.model_fields.items()]
    return "\n".join(lines) + "\n"


def _key_row(key: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else "not set" if field.default is None else f"`{_toml(field.default)}`"
    meaning = " ".join((field.description or "").split()).replace("``", "`")
    cells = (f"`{key}`", _allowed(field), default, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case tuple():
            return "[" + ", ".join(_toml(item) for item in value) + "]"
        case str():
            return f'"{value}"'
    return f"{value:g}" if isinstance(value, float) else str(value)


def _allowed(field: FieldInfo) -> str:
    bounds = ", ".join(_bound(rule) for rule in field.metadata if _bound(rule))
    kind = _kind(field.annotation)
    return f"{kind}, {bounds}" if bounds else kind


def _kind(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        kind, *rules = get_args(annotation)
        return ", ".join([_kind(kind), *(_bound(rule) for rule in _flat(rules) if _bound(rule))])
    if origin is Literal:
        return ", ".join(f"`{_toml(value)}`" for value in get_args(annotation))
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(part) for part in get_args(annotation) if part is not type(None))
    if origin is tuple:
        inner = [part for part in get_args(annotation) if part is not Ellipsis]
        return f"list of {_kind(inner[0])}"
    return {int: "whole number", float: "number", str: "text", bool: "true or false"}[annotation]


def _flat(rules: Sequence[Any]) -> Iterator[Any]:
    for rule in rules:
        yield from rule.metadata if isinstance(rule, FieldInfo) else (rule,)


def _bound(rule: Any) -> str:
    match rule:
        case annotated_types.Gt():
            return f"> {_toml(rule.gt)}"
        case annotated_types.Ge():
            return f">= {_toml(rule.ge)}"
        case annotated_types.Lt():
            return f"< {_toml(rule.lt)}"
        case annotated_types.Le():
            return f"<= {_toml(rule.le)}"
    pattern = getattr(rule, "pattern", None)
    return f"matches `{pattern}`" if pattern else ""


# --- The metrics ----------------------------------------------------------------------------------------------------


def metrics_page(text: str) -> str:
    """``text`` with the tables between its markers renewed. Raises: RecipeError: it has no markers."""
    before, begin, rest = text.partition(BEGIN)
    _old, end, after = rest.partition(END)
    if not begin or not end:
        raise RecipeError(f"{METRICS_PAGE.name} has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{_tables()}\n{END}{after}"


def _tables() -> str:
    parts = []
    for service, table in metrics.SERVED.items():
        own = [metric for metric in table if metric not in metrics.STEP]
        rows = [f"| `{_full_name(metric)}` | {metric.help} |" for metric in own]
        title = f"### {service.capitalize()}, port {metrics.PORTS[service]}"
        parts += ["\n".join(["", title, "", "| metric | meaning |", "|---|---|", *rows])]
    rows = [f"| `{metric.key}` | `{_full_name(metric)}` | {metric.help} |" for metric in metrics.STEP]
    head = ["", "### Of the last step: metrics.jsonl and the trainer's endpoint", "", "| key | metric | meaning |"]
    return "\n".join([*parts, *head, "|---|---|---|", *rows])


def _full_name(metric: Metric) -> str:
    labels = ", ".join(metric.label_names)
    return f"{metric.name}{'_total' if metric.kind == 'counter' else ''}{f'{{{labels}}}' if labels else ''}"


# --- The command ----------------------------------------------------------------------------------------------------


def pages() -> dict[Path, str]:
    """Path -> what it should say."""
    return {RECIPE_PAGE: recipe_page(), METRICS_PAGE: metrics_page(METRICS_PAGE.read_text(encoding="utf-8"))}


def main(check: Annotated[bool, typer.Option("--check", help="change nothing; fail if a page is old")] = False) -> None:
    """Renew the pages that are made from the code."""
    run_main(lambda: _work(check))


def _work(check: bool) -> int:
    old = [path for path, text in pages().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if check and old:
        raise RecipeError(f"{', '.join(path.name for path in old)} of docs/ are old: run `python -m scripts.docs`")
    for path, text in pages().items():
        if not check:
            path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    typer.run(main)
