"""Where the policy listens: a container of its own, or one that it shares."""

import pytest

from services.common.errors import RecipeError
from services.policy.app import listen_address
from services.policy.argv import argv
from tests.unit.policy.test_argv import recipe


def test_a_container_of_its_own_is_listened_on_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLICY_LISTEN", raising=False)
    assert listen_address() == ("0.0.0.0", 8000)


def test_in_a_job_only_loopback_reaches_the_development_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLICY_LISTEN", "127.0.0.1:8001")
    command = argv(recipe(), "train", "cuda", listen=listen_address())
    assert command[command.index("--host") + 1] == "127.0.0.1" and command[command.index("--port") + 1] == "8001"


@pytest.mark.parametrize("value", ["8001", ":8001", "127.0.0.1:", "127.0.0.1:http"])
def test_another_form_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("POLICY_LISTEN", value)
    with pytest.raises(RecipeError, match="it must be host:port"):
        listen_address()
