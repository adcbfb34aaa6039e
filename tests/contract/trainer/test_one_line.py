"""TRL logs a rollout that failed with its traceback; one that is merely unscorable is a line."""

import logging

import pytest
from accelerate import PartialState
from trl.experimental.async_grpo import openenv_harness

from services.common.causes import Cause
from services.trainer import one_line
from services.trainer.session import UnscorableRollout


def test_trl_logs_there_and_an_unscorable_rollout_is_one_line_and_a_bug_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    PartialState(cpu=True)  # accelerate's loggers ask for it
    one_line.install()
    logger = openenv_harness.logger
    assert logger.logger is logging.getLogger(openenv_harness.__name__)
    try:
        try:
            raise ConnectionError("received 1000 (OK)")
        except ConnectionError as error:
            raise UnscorableRollout(Cause.ENV, f"{type(error).__name__}: {error}") from error
    except UnscorableRollout:
        logger.warning("harness rollout failed; scoring as unscorable", exc_info=True)
    try:
        raise KeyError("a bug")
    except KeyError:
        logger.warning("harness rollout failed; scoring as unscorable", exc_info=True)
    unscorable, bug = caplog.records
    assert unscorable.exc_info is None and "\n" not in unscorable.getMessage()
    assert "received 1000 (OK)" in unscorable.getMessage()
    assert bug.exc_info is not None
