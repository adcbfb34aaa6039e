"""FAKE captured rollouts, in the files that the trainer writes, and what a hostile agent would put into them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import zstandard

from services.common import run_dir
from services.common.run_dir import RunDir

HOSTILE = (
    "<script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "</pre></details><svg onload=\"document.title='owned'\">",
    "</script><script>document.title='owned'</script>",
    '" onmouseover="document.title=\'owned\'" autofocus onfocus="document.title=\'owned\'" x="',
    "javascript:document.title='owned'",
    "&lt;script&gt;&#x3c;b&#x3e;",
    "\x1b]0;owned\x07\x1b[31mred\x1b[2J\x9b31m",
    "\u202egnp.exe\u2066 \u200b\ufeff\u2028",
    "[red]markup of rich[/red] :smile:",
    "{{7*7}} ${7*7} <%= 7*7 %>",
    "x" * 30_000,
)


def captured(
    run: RunDir,
    rollout_id: str,
    *,
    reward: float | None = 1.0,
    cause: str | None = None,
    task: str = "first-a",
    step: int = 0,
    answer: str = "Done.",
    command: str = "ls",
    output: str = "(no output)",
    name: str = "bash",
    ids: Sequence[int] = (10, 11),
    logprobs: Sequence[float] = (-0.01, -3.0),
    verifier: str | None = None,
    **record: Any,
) -> dict[str, Any]:
    """One rollout of two turns: a tool call, its output, an answer. Returns: its line of the index."""
    line = {
        "rollout_id": rollout_id, "group": 0, "task": task, "scored": cause is None, "reward": reward, "cause": cause,
        "error": None, "breaches": [], "policy_steps": [step, step + 1], "policy_versions": [[1, 1], [1, 2]],
        "agent_timeout": False, "turns": 2, "tool_calls": 1, "trainable_tokens": 4, "completion_tokens": 4,
        "sandbox_s": 18.0, "agent_s": 12.0, "wall_s": 20.0, "at": "2026-11-29T12:00:00Z", **record,
    }  # fmt: skip
    call = {"id": "c0", "type": "function", "function": {"name": name, "arguments": json.dumps({"command": command})}}
    messages = [
        {"role": "system", "content": "You are opencode."},
        {"role": "user", "content": [{"type": "text", "text": "Count the lines."}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c0", "content": output},
        {"role": "assistant", "content": answer, "reasoning": None},
    ]
    turn = {
        "completion_token_ids": list(ids), "per_token_logps": list(logprobs), "finish_reason": "tool_calls",
        "prompt_token_ids": [1] * 300, "trainable": True, "discarded": False,
    }  # fmt: skip
    result = {
        "conversations": [{"role": "agent", "messages": messages}, {"role": "title", "messages": messages[:2]}],
        "turns": [turn, {**turn, "finish_reason": "stop"}],
        "trial_name": f"trial-{rollout_id}",
    }
    run.rollouts.mkdir(parents=True, exist_ok=True)
    data = zstandard.ZstdCompressor().compress(json.dumps({"record": line, "result": result}).encode())
    (run.rollouts / f"{rollout_id}.json.zst").write_bytes(data)
    run_dir.append_line(run.rollouts / "index.jsonl", line)
    if verifier is not None:
        run_dir.write_text(run.trials / f"trial-{rollout_id}" / "verifier/test-stdout.txt", verifier)
    return line


def hostile(run: RunDir) -> None:
    """A run whose every text is one of ``HOSTILE``."""
    for number, text in enumerate(HOSTILE):
        captured(
            run, f"{number:032x}", answer=text, command=text, output=text, name=text, verifier=text, task=text,
            error=text, cause="agent_crash" if number % 2 else None, breaches=[text],
        )  # fmt: skip
