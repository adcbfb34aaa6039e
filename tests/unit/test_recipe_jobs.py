"""What the recipe refuses about Jobs and their sandboxes."""

from pathlib import Path

import pytest

from services.common import recipe
from services.common.errors import RecipeError

SMOKE = Path(__file__).resolve().parents[2] / "data/recipes/smoke.toml"
PUSHED = {"env.backend": "hf-sandbox", "env.sandbox_image": "docker.io/me/sandbox@sha256:" + "0" * 64}


def test_sandboxes_on_the_hub_come_from_an_image_that_the_hub_can_pull() -> None:
    assert recipe.load(SMOKE, PUSHED).env.backend == "hf-sandbox"
    with pytest.raises(RecipeError, match=r"env\.sandbox_image is 'local/.*must be in a registry: `make push`"):
        recipe.load(SMOKE, PUSHED | {"env.sandbox_image": "local/opencode-rl-sandbox:cpu"})
    with pytest.raises(RecipeError, match=r"env\.sandbox_image is None.*must be in a registry"):
        recipe.load(SMOKE, {"env.backend": "hf-sandbox"})


def test_a_sandbox_may_not_end_itself_under_its_agent() -> None:
    with pytest.raises(RecipeError, match=r"hf_sandbox_idle_timeout_s is 150\.0 and rollout\.agent_timeout_s 150\.0"):
        recipe.load(SMOKE, PUSHED | {"env.hf_sandbox_idle_timeout_s": 150.0})


@pytest.mark.parametrize("key", ["hf_job.timeout", "hf_job.eval_timeout"])
@pytest.mark.parametrize("timeout", ["0h", "", "72", "1.5h", "-1h", "72 h"])
def test_a_job_s_timeout_is_a_duration_and_never_none(key: str, timeout: str) -> None:
    """Nothing, or zero, would be the Hub's own: 30 minutes."""
    with pytest.raises(RecipeError, match=key.replace(".", r"\.")):
        recipe.load(SMOKE, {key: timeout})
