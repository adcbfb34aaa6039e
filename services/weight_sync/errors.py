"""How a weight sync fails: always with the peer, the phase and what to do."""

from __future__ import annotations

from services.common.errors import NotReadyError


class WeightSyncError(NotReadyError):
    """The policy server could not be reached, answered with an error, or did not answer in time.

    Exit code 3, as for a peer that was never there: nothing is wrong with the recipe or with what was trained,
    and a resume from the last checkpoint is the way on.
    """

    def __init__(self, peer: str, phase: str, problem: str) -> None:
        super().__init__(f"weight sync with {peer} failed in phase {phase!r}: {problem}")
        self.peer = peer
        self.phase = phase
        self.problem = problem
