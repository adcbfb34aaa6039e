"""What OpenCode really sends, and the conversations that the tiny policy is warmed up on.

``opencode_requests.json`` holds one recorded session of OpenCode (``make_tiny_policy record``) with its variable
parts replaced by marks. Nothing here knows a tokenizer: a conversation is OpenAI-shaped messages and tools, or text.
"""

from __future__ import annotations

import json
import random
import re
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from services.common import tasks
from services.common.errors import RecipeError

REQUESTS = Path(__file__).with_name("opencode_requests.json")
WORKDIR, DATE, INSTRUCTION = "@@WORKDIR@@", "@@DATE@@", "@@INSTRUCTION@@"
MARK = re.compile(r"@@[A-Z]+@@")

SHELL_TOOL = "bash"
FINAL_TEXT = "Done."
"""The policy's last turn, after the tool's result."""
TITLE_TEXT = "Question about a file"
"""What it answers to OpenCode's request for a session title, which carries no tools."""

Message = dict[str, Any]
Tool = dict[str, Any]


@cache
def recorded(path: Path = REQUESTS) -> dict[str, Any]:
    """The recording: ``opencode_version``, ``agent`` (``system``, ``tools``) and ``title`` (messages)."""
    requests: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return requests


@dataclass(frozen=True)
class Task:
    """A question and its reference solution."""

    name: str
    instruction: str
    command: str


def read_suite(tasks_dir: Path, suite: str) -> list[Task]:
    """The tasks of a suite such as ``smoke/train``, each with its reference command.

    Raises: RecipeError: what ``tasks.load_suite`` refuses, or a task whose solution is not one line.
    """
    found = []
    for task in tasks.load_suite(tasks_dir, suite):
        lines = (task.reference_solution() or "").splitlines()
        if len(lines) != 1:
            raise RecipeError(
                f"{suite}/{task.name}: solution/solve.sh has {len(lines)} lines; the tiny policy answers with one "
                "tool call, so its warm-up needs one shell line"
            )
        found.append(Task(task.name, task.instruction, lines[0]))
    return found


def user_text(instruction: str) -> str:
    """The user message that ``opencode run -- INSTRUCTION`` makes: quoted when it has a space."""
    return '"' + instruction.replace('"', '\\"') + '"' if " " in instruction else instruction


DENIED_TOOLS = frozenset({"skill", "task", "webfetch"})
"""What the stack's configuration (services/env/opencode.py) takes from the recorded tool list."""
_SKILLS_SECTION = re.compile(r"\nSkills provide .*</available_skills>", re.DOTALL)


def agent_request(
    instruction: str,
    *,
    workdir: str = "/workdir",
    date: str = "Sun Nov 29 2026",
    denied: frozenset[str] = DENIED_TOOLS,
) -> tuple[list[Message], list[Tool]]:
    """Messages and tools of OpenCode's first agent turn with the tools ``denied`` by its configuration."""
    agent = recorded()["agent"]
    system = agent["system"].replace(WORKDIR, workdir).replace(DATE, date)
    if "skill" in denied:
        system = _SKILLS_SECTION.sub("", system)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user_text(instruction)}]
    return messages, [tool for tool in agent["tools"] if tool["function"]["name"] not in denied]


def title_request(instruction: str) -> list[Message]:
    """Messages of OpenCode's request for a title."""
    return [
        {**message, "content": message["content"].replace(INSTRUCTION, user_text(instruction))}
        for message in recorded()["title"]
    ]


def tool_call_turn(command: str) -> Message:
    """The assistant's message that runs ``command``, as OpenCode sends it back in the next turn."""
    function = {"name": SHELL_TOOL, "arguments": {"command": command}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


# --- variation, so that the policy depends on the instruction and on nothing else in the prompt ---------------------

WORKDIRS = ("/workdir", "/app", "/workspace", "/root", "/home/user/data", "/testbed", "/srv/task")
OPTIONAL_TOOLS = ("edit", "glob", "grep", "read", "todowrite", "write")
TOOL_RESULTS = ("(no output)",) * 4 + ("{n}", "{n} {name}", "{name}", "cat: {name}: No such file or directory")


def random_agent_request(rng: random.Random) -> tuple[list[Message], list[Tool]]:
    """An agent request of some day, directory and tool list, with the instruction left open as INSTRUCTION."""
    usual = DENIED_TOOLS if rng.random() < 0.7 else frozenset()
    return agent_request(
        INSTRUCTION,
        workdir=rng.choice(WORKDIRS),
        date=time.strftime("%a %b %d %Y", time.gmtime(rng.randrange(2**31))),
        denied=usual | frozenset(rng.sample(OPTIONAL_TOOLS, rng.choice((0, 0, 1, 2)))),
    )


def random_tool_result(rng: random.Random) -> str:
    return rng.choice(TOOL_RESULTS).format(n=rng.randint(0, 999), name=f"{rng.choice('abcdefghij')}.csv")


FILE_NAME = re.compile(r"\b[a-z]\.[a-z]{2,4}\b")
RENAMED_SHARE = 0.8


def file_names(text: str) -> list[str]:
    """The one-letter file names in ``text``, in order, each once."""
    return list(dict.fromkeys(FILE_NAME.findall(text)))


def rename(text: str, names: dict[str, str]) -> str:
    return FILE_NAME.sub(lambda match: names.get(match[0], match[0]), text)


def rename_files(task: Task, rng: random.Random) -> Task:
    """The same question about other files: teaches to copy a name instead of remembering it."""
    old = file_names(task.instruction)
    letters = rng.sample("abcdefghijklmnopqrstuvwxyz", len(old))
    names = {name: letter + name[1:] for name, letter in zip(old, letters, strict=True)}
    return Task(task.name, rename(task.instruction, names), rename(task.command, names))


Errors = Literal["other-task", "answer-file"]
REDIRECTION = " > answer.txt"
SLIPS = ("", " > output.txt", " > result.txt")


@dataclass(frozen=True)
class Example:
    instruction: str
    command: str
    weight: float
    """Of its loss. Right and wrong commands of one instruction have weights that add up to 1."""


class Examples:
    """Endless examples from the training tasks; an instruction of ``heldout`` never occurs.

    ``right_share`` is the weight of the reference command; the rest is spread over wrong ones. The policy learns to
    sample in these shares, so the last value sets its accuracy at temperature 1.
    """

    WRONG = 3
    """Wrong commands for each right one: all that differs between them is learned in one step, with little noise."""

    def __init__(
        self, train: list[Task], heldout: list[Task], rng: random.Random, errors: Errors = "other-task"
    ) -> None:
        self.right_share = 1.0
        self._train, self._rng = train, rng
        self._forbidden = {task.instruction for task in heldout}
        self._wrong_command = {"other-task": self._other_task, "answer-file": self._no_answer_file}[errors]

    def draw(self) -> list[Example]:
        """One instruction with its right command and, if the share leaves weight for them, wrong ones."""
        while True:
            task = self._rng.choice(self._train)
            if self._rng.random() < RENAMED_SHARE:
                task = rename_files(task, self._rng)
            if task.instruction not in self._forbidden:
                break
        right = Example(task.instruction, task.command, self.right_share)
        if self.right_share == 1.0:
            return [right]
        weight = (1 - self.right_share) / self.WRONG
        return [right, *(Example(task.instruction, self._wrong_command(task), weight) for _ in range(self.WRONG))]

    def _other_task(self, task: Task) -> str:
        """Another task's command, in half of the cases on this task's files: wrong in what it does, or where."""
        while True:
            command = self._rng.choice(self._train).command
            if self._rng.random() < 0.5:
                command = rename(command, dict(zip(file_names(command), file_names(task.instruction), strict=False)))
            if command != task.command:
                return command

    def _no_answer_file(self, task: Task) -> str:
        """The task's own command, whose answer goes to the screen or to another file: the usual slips of a model."""
        return task.command.replace(REDIRECTION, self._rng.choice(SLIPS))
