"""Each trained token has the version of the call that sampled it, through TRL's own cutting of turns into rows."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from trl.experimental.async_grpo.async_rollout_worker import TurnRecord, _chain_to_sequences

from services.trainer.groups import Call, Row, oldest_version, rows_with_versions

UNKNOWN = -1
TOKENS = st.integers(3, 4)
"""Two alone, so that outputs, contexts and rewritten histories are often equal by chance."""


@dataclass
class Turn:
    """One call, as OpenEnv captures it."""

    prompt: list[int]
    output: list[int]
    mask: list[int]
    version: int

    def record(self, number: int) -> TurnRecord:
        # The log-probability says which turn a token came from.
        return TurnRecord(self.prompt, self.output, [-float(number)] * len(self.output), self.mask)

    def call(self) -> Call:
        return Call(len(self.prompt), self.output, self.version)


@st.composite
def conversations(draw: st.DrawFn) -> list[Turn]:
    """Turns that append, rewrite their history, are asked again, or begin a new conversation; some are context only."""
    turns: list[Turn] = []
    version = 1
    prompt = draw(st.lists(TOKENS, min_size=1, max_size=4))
    for _ in range(draw(st.integers(1, 7))):
        output = draw(st.lists(TOKENS, min_size=1, max_size=3))
        kind = draw(st.sampled_from(["all", "all", "some", "none"]))
        mask = {
            "all": [1] * len(output),
            "some": draw(st.lists(st.integers(0, 1), min_size=len(output), max_size=len(output))),
            "none": [0] * len(output),
        }[kind]
        turns.append(Turn(list(prompt), output, mask, version))
        version += draw(st.integers(0, 2))
        match draw(st.sampled_from(["append", "append", "rewrite", "again", "restart", "return"])):
            case "append":
                prompt = [*prompt, *output, *draw(st.lists(TOKENS, max_size=2))]
            case "rewrite":
                held = [*prompt, *output]
                at = draw(st.integers(0, len(held) - 1))
                prompt = [*held[:at], 7 - held[at], *held[at + 1 :]]
            case "restart":
                prompt = draw(st.lists(TOKENS, min_size=1, max_size=4))
            case "return":
                earlier = draw(st.sampled_from(turns))
                prompt = [*earlier.prompt, *earlier.output]
    return turns


def rows_of(turns: list[Turn], calls: list[Call]) -> list[Row]:
    records = [turn.record(number) for number, turn in enumerate(turns)]
    sequences, _ = _chain_to_sequences(records, "rollout", fork_threshold=0)
    return rows_with_versions(sequences, calls, UNKNOWN)


@settings(max_examples=2000, deadline=None)
@given(conversations())
def test_each_trained_token_has_the_version_of_its_call(turns: list[Turn]) -> None:
    rows = rows_of(turns, [turn.call() for turn in turns if any(turn.mask)])
    for row in rows:
        for mask, log_prob, version in zip(row.completion_mask, row.old_log_probs, row.versions, strict=True):
            if mask:
                assert version == turns[int(-log_prob)].version
    assert sum(row.trained_tokens for row in rows) == sum(sum(turn.mask) for turn in turns)


@settings(max_examples=300, deadline=None)
@given(conversations())
def test_rows_are_trl_s_own_but_for_the_versions(turns: list[Turn]) -> None:
    records = [turn.record(number) for number, turn in enumerate(turns)]
    sequences, _ = _chain_to_sequences(records, "rollout", fork_threshold=0)
    rows = rows_with_versions(sequences, [], UNKNOWN)
    for row, sequence in zip(rows, sequences, strict=True):
        assert row.input_ids == sequence.input_ids
        assert row.completion_mask == sequence.completion_mask
        assert row.old_log_probs == sequence.old_log_probs
        assert row.versions == [UNKNOWN] * len(row.input_ids)
        assert oldest_version([row]) == UNKNOWN


def test_the_generator_makes_forks_and_context_only_rows() -> None:
    """The control: what the property is about does occur."""
    found = set()

    @settings(max_examples=300, deadline=None)
    @given(conversations())
    def look(turns: list[Turn]) -> None:
        rows = rows_of(turns, [])
        found.add("fork" if len(rows) > 1 else "one row")
        if any(not any(turn.mask) for turn in turns):
            found.add("context only")

    look()
    assert found == {"fork", "one row", "context only"}
