from pathlib import Path
from typing import Any

from services.common import run_dir
from services.common.run_dir import RunDir
from services.trainer import rollout_log
from services.trainer.rollout_log import RolloutRecord


class FakeResult:
    """FAKE of HarborRolloutResult: what pydantic's model_dump is asked."""

    def model_dump(self, *, mode: str, exclude: Any) -> dict[str, Any]:
        assert mode == "json"
        assert exclude == {"turns": {"__all__": {"request_messages", "request_tools"}}}
        return {"turns": [{"completion_token_ids": [1, 2], "text": "ä"}]}


def record(**differs: Any) -> RolloutRecord:
    fields: dict[str, Any] = {
        "rollout_id": "0a", "group": 3, "task": "first-c", "scored": True, "reward": 1.0, "cause": None, "error": None,
        "breaches": [], "policy_steps": (1, 2),
    }  # fmt: skip
    return RolloutRecord(**fields | differs)


def test_rollout_comes_back_as_it_was_captured(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    rollout_log.write(run, record(), FakeResult())
    found = rollout_log.read(run.rollouts / "0a.json.zst")
    assert found["result"] == {"turns": [{"completion_token_ids": [1, 2], "text": "ä"}]}
    assert found["record"]["policy_steps"] == [1, 2]


def test_index_has_a_line_for_each_rollout_also_without_a_result(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    rollout_log.write(run, record(), FakeResult())
    rollout_log.write(run, record(rollout_id="0b", scored=False, reward=None, cause="env"), None)
    lines = run_dir.read_lines(run.rollouts / rollout_log.INDEX)
    found = [(line["rollout_id"], line["scored"], line["cause"]) for line in lines]
    assert found == [("0a", True, None), ("0b", False, "env")]
    assert sorted(path.name for path in run.rollouts.iterdir()) == ["0a.json.zst", "index.jsonl"]
