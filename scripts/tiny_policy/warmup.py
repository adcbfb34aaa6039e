"""Supervised warm-up on two-turn conversations, and the exact measure of what it reached.

A conversation is one row: OpenCode's prompt, the tool call, the tool's result, the final text. The loss is on the
assistant's two turns only. Most steps see only the last tokens of the prompt (the model must learn to read the
instruction that ends it), the last steps see it whole.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import Lfm2ForCausalLM, PreTrainedTokenizerFast

from scripts.tiny_policy import prompts
from scripts.tiny_policy import tokenizer as text

PROMPT_VARIANTS = 64
"""Rendered prompts that the examples share; each has its own directory, date and tools."""


@dataclass(frozen=True)
class Schedule:
    """Right answers first; then wrong ones gain weight until right ones have ``target_accuracy``.

    Asked to err from the start, the model learns the answers' frequencies, and the questions hardly at all.
    """

    target_accuracy: float
    steps: int = 600
    clean_until: float = 0.4
    noisy_from: float = 0.6
    """Shares of the steps between which the weight of right answers falls from 1 to the target."""
    batch_size: int = 16
    full_every: int = 4
    """Every so many steps after ``clean_until`` see the whole prompt, with a quarter of the rows."""
    short_prefix: int = 40
    """Most tokens before the user's turn that the other steps see."""
    learning_rate: float = 3e-3
    rise_steps: int = 30
    title_share: float = 0.1

    def right_share(self, step: int) -> float:
        done = (step / self.steps - self.clean_until) / (self.noisy_from - self.clean_until)
        return 1 - (1 - self.target_accuracy) * min(1.0, max(0.0, done))

    def rate(self, step: int) -> float:
        """Learning rate: a short rise, constant, then linear to zero from ``clean_until`` on."""
        left = (1 - step / self.steps) / (1 - self.clean_until)
        return self.learning_rate * min(1.0, (step + 1) / self.rise_steps, left)

    def is_full(self, step: int) -> bool:
        return step >= self.clean_until * self.steps and step % self.full_every == 0


@dataclass(frozen=True)
class Row:
    """``ids``, and the weight of each in the loss: 0 for what the assistant does not write."""

    ids: list[int]
    weights: list[float]


def conversation(prompt: list[int], turns: list[tuple[list[int], float]]) -> Row:
    ids, weights = list(prompt), [0.0] * len(prompt)
    for part, weight in turns:
        ids += part
        weights += [weight] * len(part)
    return Row(ids, weights)


class Conversations:
    """Endless training rows for one tokenizer and suite."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, examples: prompts.Examples, rng: random.Random) -> None:
        self.examples = examples
        self._tokenizer, self._rng = tokenizer, rng
        self._agent = [text.render(tokenizer, *prompts.random_agent_request(rng)) for _ in range(PROMPT_VARIANTS)]

    def _ids(self, part: str) -> list[int]:
        return text.encode(self._tokenizer, part)

    def _prompt(self, rendered: str, prefix: int | None) -> list[int]:
        """Ids of a whole prompt, or of its end: the user's turn and at most ``prefix`` tokens before it."""
        ids = self._ids(rendered)
        if prefix is None:
            return ids
        start = self._tokenizer.convert_tokens_to_ids(text.IM_START)
        user = [index for index, token in enumerate(ids) if token == start][1]
        return ids[max(0, user - prefix) :]

    def _title_row(self, instruction: str, prefix: int | None) -> Row:
        rendered = text.render(self._tokenizer, prompts.title_request(instruction))
        return conversation(self._prompt(rendered, prefix), [(self._ids(prompts.TITLE_TEXT + text.IM_END), 1.0)])

    def _agent_row(self, example: prompts.Example, prefix: int | None) -> Row:
        rendered = self._rng.choice(self._agent)
        rendered = rendered.replace(prompts.user_text(prompts.INSTRUCTION), prompts.user_text(example.instruction))
        return conversation(
            self._prompt(rendered, prefix),
            [
                (self._ids(text.call_text(example.command)), example.weight),
                (self._ids(text.tool_turn(prompts.random_tool_result(self._rng))), 0.0),
                (self._ids(prompts.FINAL_TEXT + text.IM_END), 1.0),
            ],
        )

    def batch(self, size: int, short_prefix: int | None, title_share: float) -> tuple[torch.Tensor, torch.Tensor]:
        """At least ``size`` rows, padded on the right: ids_BT and the weight of each in the loss, weights_BT."""
        rows: list[Row] = []
        while len(rows) < size:
            prefix = None if short_prefix is None else self._rng.randint(0, short_prefix)
            examples = self.examples.draw()
            if self._rng.random() < title_share:
                rows.append(self._title_row(examples[0].instruction, prefix))
            else:
                rows += [self._agent_row(example, prefix) for example in examples]
        length = max(len(row.ids) for row in rows)
        ids_BT = torch.full((len(rows), length), self._tokenizer.pad_token_id)
        weights_BT = torch.zeros(len(rows), length)
        for index, row in enumerate(rows):
            ids_BT[index, : len(row.ids)] = torch.tensor(row.ids)
            weights_BT[index, : len(row.ids)] = torch.tensor(row.weights)
        return ids_BT, weights_BT


def log_probs(
    model: Lfm2ForCausalLM, ids_BT: torch.Tensor, chosen_BT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the chosen tokens in the order of rows, and whether each is the likeliest one.

    Padding on the right needs no mask in a causal model.
    """
    hidden_BTH = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
    logits_NV = model.lm_head(hidden_BTH[:, :-1][chosen_BT[:, 1:]])
    ids_N = ids_BT[:, 1:][chosen_BT[:, 1:]]
    return -functional.cross_entropy(logits_NV, ids_N, reduction="none"), logits_NV.argmax(-1) == ids_N


def run(model: Lfm2ForCausalLM, data: Conversations, schedule: Schedule, report: Callable[[int, float], None]) -> None:
    """Train ``model`` in place; ``report`` gets (step, loss) after every step, the loss in nats a trained token."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    for step in range(schedule.steps):
        data.examples.right_share = schedule.right_share(step)
        if schedule.is_full(step):
            ids_BT, weights_BT = data.batch(schedule.batch_size // 4, None, schedule.title_share)
        else:
            ids_BT, weights_BT = data.batch(schedule.batch_size, schedule.short_prefix, schedule.title_share)
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        weights_N = weights_BT[weights_BT > 0]
        log_probs_N, _ = log_probs(model, ids_BT, weights_BT > 0)
        loss = -(weights_N * log_probs_N).sum() / weights_N.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        report(step + 1, loss.item())
    model.eval()


@dataclass(frozen=True)
class Score:
    """Of one answer in its true, full context, by teacher forcing: no sampling noise."""

    probability: float
    """Chance that sampling at temperature 1 gives exactly this answer."""
    greedy: bool
    """Whether greedy decoding gives it."""


def score(model: Lfm2ForCausalLM, prompt: list[int], answer: list[int]) -> Score:
    row = conversation(prompt, [(answer, 1.0)])
    with torch.inference_mode():
        log_probs_N, likeliest_N = log_probs(model, torch.tensor([row.ids]), torch.tensor([row.weights]) > 0)
    return Score(float(log_probs_N.sum().exp()), bool(likeliest_N.all()))


def score_task(model: Lfm2ForCausalLM, tokenizer: PreTrainedTokenizerFast, task: prompts.Task) -> dict[str, Score]:
    """Scores of the reference ``call``, of the ``final`` text after its result, and of the session's ``title``."""
    messages, tools = prompts.agent_request(task.instruction)
    result = [prompts.tool_call_turn(task.command), {"role": "tool", "content": "(no output)"}]

    def scored(rendered: str, answer: str) -> Score:
        return score(model, text.encode(tokenizer, rendered), text.encode(tokenizer, answer))

    return {
        "call": scored(text.render(tokenizer, messages, tools), text.call_text(task.command)),
        "final": scored(text.render(tokenizer, messages + result, tools), prompts.FINAL_TEXT + text.IM_END),
        "title": scored(
            text.render(tokenizer, prompts.title_request(task.instruction)), prompts.TITLE_TEXT + text.IM_END
        ),
    }
