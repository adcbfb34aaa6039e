"""The pages of docs/ that are made from the code are current, and links in the docs lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from scripts import docs
from services.common.errors import RecipeError
from services.common.recipe import Recipe

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted(path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("services/*/README.md")))
app = typer.Typer()
app.command()(docs.main)


def test_the_pages_made_from_the_code_are_current() -> None:
    for path, text in docs.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is old: run `python -m scripts.docs`"


def test_every_key_of_the_recipe_says_what_it_means() -> None:
    for name, field in Recipe.model_fields.items():
        keys = field.annotation.model_fields  # type: ignore[union-attr]
        assert [key for key, found in keys.items() if not found.description] == [], name


def test_types_bounds_and_defaults_are_those_of_the_model() -> None:
    page = docs.recipe_page()
    assert "| `max_staleness` | whole number, >= 0 | `4` |" in page
    assert '| `source` | `"hub"`, `"local"` | `"hub"` |' in page
    assert "| `max_model_len` | whole number, > 0 | required |" in page
    assert "| `ratio_bounds` | list of number | `[0.98, 1.02]` |" in page
    assert "| `gpu_memory_utilization` | number, > 0, < 1 | `0.9` |" in page


def test_an_old_page_is_told_and_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs, "RECIPE_PAGE", tmp_path / "recipe.md")
    monkeypatch.setattr(docs, "METRICS_PAGE", tmp_path / "metrics.md")
    (tmp_path / "metrics.md").write_text(f"before\n{docs.BEGIN}\nold\n{docs.END}\nafter\n")
    result = CliRunner().invoke(app, ["--check"])
    assert result.exit_code == 2 and "recipe.md, metrics.md" in result.stderr
    assert CliRunner().invoke(app, []).exit_code == 0
    text = (tmp_path / "metrics.md").read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "opencode_rl_reward" in text
    assert CliRunner().invoke(app, ["--check"]).exit_code == 0


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"metrics\.md has no"):
        docs.metrics_page("no markers")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_that_are_there(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    local = [link for link in links if not re.match(r"[a-z]+:", link)]
    assert [link for link in local if not (page.parent / link).exists()] == []
