"""The model card of an exported adapter, as a pure function of what is known of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from scripts.export.facts import Facts
from services.policy.argv import LORA_RANKS

TASK = "text-generation"


def make(facts: Facts, name: str, *, merged: bool = False) -> str:
    """The text of README.md. Args: name: of the repository or folder. merged: of the model with the adapter in it."""
    data = ModelCardData(
        base_model=facts.cfg.model.id if facts.cfg.model.source == "hub" else None,
        library_name="transformers" if merged else "peft",
        license=facts.license.id if facts.license else None,
        license_name=facts.license.name if facts.license else None,
        license_link=facts.license.link if facts.license else None,
        pipeline_tag=TASK,
        tags=["grpo", "agent", "opencode", *([] if merged else ["lora"])],
        model_name=name,
        eval_results=_eval_results(facts),
    )
    body = "\n\n".join(
        [
            f"# {name}",
            _what(facts, merged),
            "## Results\n" + _results(facts.results),
            "## How to load\n" + (_load_merged(facts, name) if merged else _load_adapter(facts, name)),
            "## Training\n" + _training(facts),
            "## Data\n" + _data(facts),
            "## Versions\n" + _versions(facts),
            "## Licence\n" + _license(facts),
        ]
    )
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n{body}\n").content)


def _what(facts: Facts, merged: bool) -> str:
    base = f"`{facts.cfg.model.id}`" + (f" (revision `{facts.model_revision}`)" if facts.model_revision else "")
    thing = f"{base} with a LoRA adapter merged into it" if merged else f"A LoRA adapter for {base}"
    return (
        f"{thing}, trained with async GRPO inside the unmodified OpenCode agent: real tasks, real tools, a verifier's "
        f"reward. Step {facts.checkpoint.step} of run `{facts.run}`; SHA-256 of the adapter's weights "
        f"`{facts.adapter_sha256}`."
    )


def _results(value: Mapping[str, Any] | None) -> str:
    if value is None:
        return "These weights have not been evaluated."
    rows = [
        (arm["label"], f"{arm['pass_at_1']:.3f}", "{:.3f} - {:.3f}".format(*arm["interval_95"]),
         f"{arm['passed']} of {arm['rollouts']}", f"{arm['mean_tool_calls']:.1f}",
         f"{arm['mean_completion_tokens']:.0f}")
        for arm in (value["base"], value["adapter"])
    ]  # fmt: skip
    pairs, sampling = value["paired"], value["conditions"]["sampling"]
    failures = len(value["infrastructure_failures"])
    sampled = "greedy" if value["greedy"] else f"temperature {sampling['temperature']}, top_p {sampling['top_p']}"
    return "\n".join(
        [
            f"Held-out tasks of `{value['suite']}`, {len(value['tasks'])} tasks, {value['attempts']} attempt(s) each, "
            f"{sampled}, at most {value['conditions']['max_completion_tokens']} tokens a model call, as in training.\n",
            _table(("", "pass@1", "95 % interval (Wilson)", "passed", "tool calls", "tokens"), rows),
            f"\nOf {pairs['tasks']} tasks scored for both: {pairs['both']} passed by both, {pairs['only_base']} only "
            f"by the base, {pairs['only_adapter']} only with the adapter, {pairs['neither']} by neither; exact McNemar "
            f"p = {pairs['mcnemar_exact_p']:.3f}. {failures} rollouts failed for another reason than the agent's "
            "answer and are not scored.",
        ]
    )


def _eval_results(facts: Facts) -> list[EvalResult] | None:
    if facts.results is None:
        return None
    return [
        EvalResult(
            task_type=TASK, dataset_type=facts.results["suite"], dataset_name=facts.results["suite"],
            metric_type="pass@1", metric_value=round(facts.results["adapter"]["pass_at_1"], 4),
        )
    ]  # fmt: skip


def _base_source(facts: Facts) -> tuple[str, str]:
    """What to load the base from, and what to say about it."""
    if facts.cfg.model.source == "hub":
        return facts.cfg.model.id, ""
    return facts.cfg.model.id, f"\n`{facts.cfg.model.id}` is a folder that ships with the project (data/models).\n"


def _load_adapter(facts: Facts, name: str) -> str:
    base, remark = _base_source(facts)
    at = f', revision="{facts.model_revision}"' if facts.cfg.model.source == "hub" and facts.model_revision else ""
    rank = next((rank for rank in LORA_RANKS if rank >= facts.cfg.lora.r), facts.cfg.lora.r)
    flag = f" --revision {facts.model_revision}" if at else ""
    return f"""{remark}
```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained("{base}"{at}, dtype="{facts.cfg.model.dtype}")
model = PeftModel.from_pretrained(base, "{name}")
tokenizer = AutoTokenizer.from_pretrained("{base}"{at})
```

```bash
vllm serve {base}{flag} --enable-lora --max-lora-rank {rank} --lora-modules adapter={name}
```"""


def _load_merged(facts: Facts, name: str) -> str:
    return f"""
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", dtype="{facts.cfg.model.dtype}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

```bash
vllm serve {name}
```

`W = W0 + scale * B @ A` per matrix, summed in float32 and rounded once: bit for bit what the training run served."""


def _training(facts: Facts) -> str:
    cfg = facts.cfg
    rows = [
        ("step", f"{facts.checkpoint.step} of {cfg.trainer.max_steps}"),
        ("LoRA", f"r {cfg.lora.r}, alpha {cfg.lora.alpha}, dropout {cfg.lora.dropout}"),
        ("modules", ", ".join(cfg.lora.target_modules)),
        ("learning rate", f"{cfg.trainer.learning_rate:g}, {cfg.trainer.lr_scheduler_type}"),
        ("rollouts a step", f"{cfg.trainer.groups_per_step} group(s) of {cfg.rollout.num_generations}"),
        ("model calls a rollout, at most", str(cfg.rollout.max_tool_calling_iterations)),
        ("tokens a model call, at most", str(cfg.sampling.max_completion_tokens)),
        ("context", str(cfg.model.max_model_len)),
        ("largest staleness", f"{cfg.rollout.max_staleness} steps"),
        ("tool-efficiency bonus", f"{cfg.reward.tool_efficiency_bonus:g}"),
        ("seed", str(cfg.run.seed)),
    ]
    return (
        _table(("", ""), rows) + f"\n\nThe whole recipe is in `recipe.toml` (SHA-256 of its values `{cfg.sha256()}`)."
    )


def _data(facts: Facts) -> str:
    if not facts.suites:
        return "The run recorded no task suite."
    rows = [(suite.role, suite.name, str(suite.tasks), suite.source, f"`{suite.sha256}`") for suite in facts.suites]
    return _table(("", "suite", "tasks", "source", "SHA-256 of the tasks"), rows)


def _versions(facts: Facts) -> str:
    rows = [("git revision", facts.git_revision or "unknown"), *facts.versions.items()]
    rows += [(f"image `{name}`", f"`{image}`") for name, image in sorted(facts.images.items())]
    return _table(("", ""), rows)


def _license(facts: Facts) -> str:
    if facts.license is None:
        return "The licence of the base is unknown."
    text = f"That of the base: {facts.license.name or facts.license.id}"
    return f"{text} ({facts.license.link})." if facts.license.link else f"{text}."


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
