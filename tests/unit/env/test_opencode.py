from pathlib import Path

import pytest

from services.common import recipe
from services.common.recipe import Recipe
from services.env import opencode

RECIPES = sorted((Path(__file__).resolve().parents[3] / "data" / "recipes").glob("*.toml"))


@pytest.fixture(params=RECIPES, ids=lambda path: path.stem)
def cfg(request: pytest.FixtureRequest) -> Recipe:
    return recipe.load(request.param)


def test_limits_are_the_recipes(cfg: Recipe) -> None:
    config = opencode.config(cfg, "http://capture:8101", "key", "policy")
    limit = config["provider"][opencode.PROVIDER]["models"]["policy"]["limit"]
    assert limit == {"context": cfg.model.max_model_len, "output": cfg.sampling.max_completion_tokens}


def test_session_key_travels_in_both_headers(cfg: Recipe) -> None:
    options = opencode.config(cfg, "http://capture:8101", "key", "policy")["provider"][opencode.PROVIDER]["options"]
    assert options["apiKey"] == "key"
    assert options["headers"] == {"x-api-key": "key"}
    assert options["baseURL"] == "http://capture:8101/v1"


def test_nothing_asks_a_terminal_that_is_not_there(cfg: Recipe) -> None:
    permission = opencode.config(cfg, "http://capture:8101", "key", "policy")["permission"]
    assert set(permission.values()) == {"allow", "deny"}
    # OpenCode takes the last rule that matches.
    assert next(iter(permission)) == "*"
    denied = {tool for tool, rule in permission.items() if rule == "deny"}
    assert {"task", "question", "webfetch", "websearch"} <= denied


def test_no_call_but_the_agents_own(cfg: Recipe) -> None:
    config = opencode.config(cfg, "http://capture:8101", "key", "policy")
    assert config["agent"]["title"] == {"disable": True}
    assert config["compaction"] == {"auto": False, "prune": False}
    assert config["enabled_providers"] == [opencode.PROVIDER]
    assert (config["autoupdate"], config["share"], config["snapshot"]) == (False, "disabled", False)
