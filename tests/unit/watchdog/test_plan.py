"""What the watchdog decides, with a clock that is a number."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.health import PHASES, Heartbeat
from services.common.recipe import Rollout as RolloutLimits
from services.common.recipe import Watchdog as Limits
from services.watchdog import plan as decisions
from services.watchdog.plan import ENDED, STEADY, SUPERVISOR_MARGIN_S, Decision, Observations, Progress, advance

LIMITS = Limits()
ROLLOUTS = RolloutLimits(max_unscorable_share=0.25, unscorable_window=16)
T0 = 1_800_000_000.0
MINUTE = 60.0


def beat(service: str = "trainer", phase: str = "rollout", step: int = 7, age_s: float = 1, phase_s: float = 10) -> Any:
    """A heartbeat as read at T0."""
    return Heartbeat(service, phase, step, T0 - age_s, T0 - phase_s, 1, {})


def seen(*beats: Heartbeat, **values: Any) -> Observations:
    defaults = {"watching_since_s": T0 - 3600, "progress": Progress(7, T0 - 10), "silent_since_s": {}}
    return Observations(beats={found.service: found for found in beats}, **defaults | values)


def plan(look: Observations, limits: Limits, now_s: float) -> Decision:
    return decisions.plan(look, limits, ROLLOUTS, now_s)


def test_a_run_that_gets_further_is_left_alone() -> None:
    decision = plan(seen(beat()), LIMITS, T0)
    assert (decision.action, decision.reason) == ("wait", "The trainer is in phase rollout at step 7.")


@pytest.mark.parametrize("phase", STEADY)
def test_thirty_minutes_without_an_optimizer_step_stop_the_run(phase: str) -> None:
    within = seen(beat(phase=phase), progress=Progress(7, T0 - 30 * MINUTE))
    assert plan(within, LIMITS, T0).action == "wait"
    decision = plan(replace(within, progress=Progress(7, T0 - 30 * MINUTE - 1)), LIMITS, T0)
    assert (decision.action, decision.subject) == ("stop", "trainer")
    for part in ("1801 s", "after step 7", phase, "watchdog.stall_s is 1800"):
        assert part in decision.reason


@pytest.mark.parametrize(
    ("phase", "limit_s", "key"),
    [
        ("starting", LIMITS.start_limit_s, "start_limit_s"),
        ("compiling", LIMITS.start_limit_s, "start_limit_s"),
        ("first_sync", LIMITS.start_limit_s, "start_limit_s"),
        ("saving", LIMITS.save_limit_s, "save_limit_s"),
        ("pushing", LIMITS.save_limit_s, "save_limit_s"),
        ("evaluating", LIMITS.eval_limit_s, "eval_limit_s"),
    ],
)
def test_each_other_phase_has_the_recipe_s_own_limit(phase: str, limit_s: float, key: str) -> None:
    long_ago = Progress(7, T0 - 10 * limit_s)
    within = plan(seen(beat(phase=phase, phase_s=limit_s), progress=long_ago), LIMITS, T0)
    beyond = plan(seen(beat(phase=phase, phase_s=limit_s + 1), progress=long_ago), LIMITS, T0)
    assert (within.action, beyond.action) == ("wait", "stop")
    assert f"in phase {phase} for {limit_s + 1:.0f} s" in beyond.reason
    assert f"watchdog.{key} is {limit_s:.0f}" in beyond.reason


@pytest.mark.parametrize("phase", ["starting", "compiling", "saving", "pushing", "evaluating"])
def test_a_slow_start_save_or_push_is_not_a_stall(phase: str) -> None:
    look = seen(beat(phase=phase, phase_s=29 * MINUTE), progress=Progress(7, T0 - 29 * MINUTE - 1700))
    assert plan(look, LIMITS, T0).action == "wait"


def test_a_process_that_renews_no_heartbeat_is_dead_or_frozen_in_any_phase() -> None:
    for phase in PHASES:
        assert plan(seen(beat(phase=phase, age_s=180)), LIMITS, T0).action == "wait", phase
        decision = plan(seen(beat(phase=phase, age_s=181)), LIMITS, T0)
        assert (decision.action, decision.subject) == ("stop", "trainer"), phase
        assert "no heartbeat for 181 s" in decision.reason and phase in decision.reason


@pytest.mark.parametrize("peer", ["policy", "env"])
def test_a_peer_that_stopped_answering_is_named(peer: str) -> None:
    assert plan(seen(beat(), silent_since_s={peer: T0 - 180}), LIMITS, T0).action == "wait"
    decision = plan(seen(beat(phase="training"), silent_since_s={peer: T0 - 181}), LIMITS, T0)
    assert (decision.action, decision.subject, decision.resume) == ("stop", peer, True)
    assert decision.reason.startswith(f"{peer} has not answered for 181 s") and "phase training" in decision.reason


def test_a_policy_that_refuses_connections_is_gone_with_its_weights() -> None:
    for phase in STEADY:
        assert plan(seen(beat(phase=phase), refused_since_s={"policy": T0 - 5}), LIMITS, T0).action == "wait"
        decision = plan(seen(beat(phase=phase), refused_since_s={"policy": T0 - 6}), LIMITS, T0)
        assert (decision.action, decision.subject, decision.resume) == ("stop", "policy", True)
    env = seen(beat(), refused_since_s={"env": T0 - 100}, silent_since_s={"env": T0 - 100})
    assert plan(env, LIMITS, T0).action == "wait"  # sessions wait for an env that restarts


def test_a_policy_that_is_silent_in_a_sync_is_frozen() -> None:
    within = seen(beat(phase="sync"), silent_since_s={"policy": T0 - LIMITS.sync_silent_s})
    assert plan(within, LIMITS, T0).action == "wait"
    beyond = plan(replace(within, silent_since_s={"policy": T0 - LIMITS.sync_silent_s - 1}), LIMITS, T0)
    assert (beyond.action, beyond.subject, beyond.resume) == ("stop", "policy", True)
    busy = seen(beat(phase="rollout"), silent_since_s={"policy": T0 - LIMITS.sync_silent_s - 1})
    assert plan(busy, LIMITS, T0).action == "wait"


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase not in STEADY])
def test_outside_the_steady_phases_no_peer_and_no_rollout_stops_a_run(phase: str) -> None:
    worst = seen(
        beat(phase=phase),
        silent_since_s={"policy": T0 - 9999, "env": T0 - 9999},
        refused_since_s={"policy": T0 - 9999},
        unscorable={"policy": 16},
    )
    assert plan(worst, LIMITS, T0).action == "wait"


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase not in (*ENDED, "watching", "serving")])
def test_half_an_hour_of_each_phase_minute_by_minute(phase: str) -> None:
    """A fake clock: what a look every ten seconds at a trainer that stays in one phase decides, and when."""
    limits = Limits(start_limit_s=1800, save_limit_s=1800, eval_limit_s=1800, stall_s=1800)
    progress, stopped_at = Progress(7, T0), None
    for second in range(0, 1900, 10):
        now_s = T0 + second
        trainer = Heartbeat("trainer", phase, 7, now_s, T0, 1, {})
        progress = advance(progress, trainer, 7, now_s)
        look = Observations({"trainer": trainer}, T0 - 60, progress, {})
        if plan(look, limits, now_s).action == "stop":
            stopped_at = second
            break
    assert stopped_at == 1810


def test_too_many_unscorable_rollouts_are_no_chance_and_are_not_resumed() -> None:
    assert plan(seen(beat(), unscorable={"capture": 5}), LIMITS, T0).resume is False


def test_a_run_that_starts_again_is_waited_for_from_the_end_of_its_last_process() -> None:
    gone = seen(watching_since_s=T0 - 99999, trainer_gone_since_s=T0 - LIMITS.start_limit_s)
    assert plan(gone, LIMITS, T0).action == "wait"
    assert plan(replace(gone, trainer_gone_since_s=T0 - LIMITS.start_limit_s - 1), LIMITS, T0).exit_code == 3


def test_of_two_silent_peers_the_one_that_fell_silent_first_is_named() -> None:
    decision = plan(seen(beat(), silent_since_s={"env": T0 - 200, "policy": T0 - 300}), LIMITS, T0)
    assert decision.subject == "policy"


def test_env_s_own_heartbeat_counts_like_an_answer_that_did_not_come() -> None:
    frozen = beat("env", "serving", age_s=200)
    assert plan(seen(beat(), frozen), LIMITS, T0).subject == "env"
    assert plan(seen(beat(), replace(frozen, phase="done")), LIMITS, T0).action == "wait"


def test_peers_may_go_when_training_has_ended() -> None:
    for phase in ENDED:
        look = seen(beat(phase=phase), beat("env", "serving", age_s=900), silent_since_s={"policy": T0 - 900})
        assert plan(look, LIMITS, T0).action == "wait"


def test_a_trainer_that_never_comes_ends_the_watch_as_not_ready() -> None:
    assert plan(seen(watching_since_s=T0 - 3600), LIMITS, T0).action == "wait"
    decision = plan(seen(watching_since_s=T0 - 3601), LIMITS, T0)
    assert (decision.action, decision.exit_code, decision.subject) == ("end", 3, "trainer")


@pytest.mark.parametrize("exit_code", [0, 1, 4, 143])
def test_the_end_of_the_run_is_the_end_of_the_watch_with_its_exit_code(exit_code: int) -> None:
    decision = plan(seen(beat(age_s=9999), exit_code=exit_code, stop_seen_s=T0 - 9999), LIMITS, T0)
    assert (decision.action, decision.exit_code) == ("end", exit_code)


def test_after_a_stop_request_nothing_is_done_but_to_wait_for_the_end() -> None:
    worst = seen(beat(age_s=9999), silent_since_s={"policy": T0 - 9999}, stop_seen_s=T0 - 5)
    assert plan(worst, LIMITS, T0).action == "wait"


def test_a_stop_request_that_nobody_obeys_ends_the_watch_as_stopped() -> None:
    limit_s = LIMITS.grace_s + SUPERVISOR_MARGIN_S
    assert plan(seen(beat(age_s=999), stop_seen_s=T0 - limit_s), LIMITS, T0).action == "wait"
    decision = plan(seen(beat(age_s=999), stop_seen_s=T0 - limit_s - 1), LIMITS, T0)
    assert (decision.action, decision.exit_code) == ("end", 4)


def test_a_stuck_evaluator_is_told_and_stops_nothing() -> None:
    dead = plan(seen(beat(), beat("evaluator", "evaluating", age_s=181)), LIMITS, T0)
    slow = plan(seen(beat(), beat("evaluator", "evaluating", step=300, phase_s=LIMITS.eval_limit_s + 1)), LIMITS, T0)
    idle = plan(seen(beat(), beat("evaluator", "watching", phase_s=LIMITS.eval_limit_s + 1)), LIMITS, T0)
    gone = plan(seen(beat(), beat("evaluator", "done", age_s=9999)), LIMITS, T0)
    assert [found.action for found in (dead, slow, idle, gone)] == ["alert", "alert", "wait", "wait"]
    assert "checkpoint-300" in slow.reason


def test_a_stalled_trainer_comes_before_a_stuck_evaluator() -> None:
    look = seen(beat(age_s=181), beat("evaluator", "evaluating", age_s=999))
    assert plan(look, LIMITS, T0).action == "stop"


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase not in STEADY])
def test_time_outside_the_steady_phases_does_not_count_against_the_next_step(phase: str) -> None:
    assert advance(Progress(7, T0 - 1700), beat(phase=phase), 7, T0) == Progress(7, T0)


@pytest.mark.parametrize("phase", STEADY)
def test_in_the_steady_phases_only_a_new_step_is_progress(phase: str) -> None:
    before = Progress(7, T0 - 1700)
    assert advance(before, beat(phase=phase), 7, T0) is before
    assert advance(before, beat(phase=phase), 8, T0) == Progress(8, T0)


def test_an_earlier_step_is_progress_of_a_resumed_run() -> None:
    assert advance(Progress(7, T0), beat(), 4, T0 + 1) == Progress(4, T0 + 1)


observations = st.builds(
    Observations,
    beats=st.dictionaries(
        st.sampled_from(["trainer", "env", "policy", "evaluator"]),
        st.builds(
            Heartbeat,
            service=st.just("trainer"),
            phase=st.sampled_from(PHASES),
            step=st.integers(0, 9),
            time_s=st.floats(T0 - 9000, T0),
            phase_since_s=st.floats(T0 - 9000, T0),
            pid=st.just(1),
            detail=st.just({}),
        ),
    ),
    watching_since_s=st.floats(T0 - 9000, T0),
    progress=st.builds(Progress, st.integers(0, 9), st.floats(T0 - 9000, T0)),
    silent_since_s=st.dictionaries(st.sampled_from(["policy", "env"]), st.floats(T0 - 9000, T0)),
    stop_seen_s=st.none() | st.floats(T0 - 9000, T0),
    exit_code=st.none() | st.integers(0, 5),
)


@given(observations)
def test_every_decision_is_a_sentence_and_an_end_has_an_exit_code(look: Observations) -> None:
    decision = plan(look, LIMITS, T0)
    assert decision.reason[0].isupper() or decision.subject in ("policy", "env")
    assert decision.reason.endswith(".")
    assert (decision.exit_code is not None) == (decision.action == "end")
    assert decision.subject or decision.action in ("wait", "end")


@given(observations, st.floats(0, 9000))
def test_no_second_stop_is_ever_decided(look: Observations, later_s: float) -> None:
    if plan(look, LIMITS, T0).action == "stop":
        assert plan(replace(look, stop_seen_s=T0), LIMITS, T0 + later_s).action in ("wait", "end")


@given(observations, st.floats(0, 9000))
def test_waiting_longer_never_turns_a_stop_into_a_wait(look: Observations, later_s: float) -> None:
    if plan(look, LIMITS, T0).action == "stop":
        assert plan(look, LIMITS, T0 + later_s).action == "stop"


def test_more_unscorable_rollouts_than_the_recipe_s_share_stop_the_run_with_their_causes() -> None:
    within = seen(beat(), unscorable={"capture": 3, "policy": 1})
    assert plan(within, LIMITS, T0).action == "wait"
    decision = plan(replace(within, unscorable={"policy": 1, "capture": 4}), LIMITS, T0)
    assert (decision.action, decision.subject) == ("stop", "rollouts")
    assert decision.reason.startswith("5 of the last 16 rollouts were unscorable (capture 4, policy 1); ")
    assert "rollout.max_unscorable_share is 0.25" in decision.reason


def test_a_silent_policy_is_named_before_the_rollouts_that_it_spoilt() -> None:
    look = seen(beat(), unscorable={"policy": 16}, silent_since_s={"policy": T0 - 181})
    assert plan(look, LIMITS, T0).subject == "policy"


def test_unscorable_rollouts_of_a_run_that_has_ended_stop_nothing() -> None:
    for phase in ENDED:
        assert plan(seen(beat(phase=phase), unscorable={"capture": 16}), LIMITS, T0).action == "wait"
