"""The twelve pitfalls of the original recipe, each of which cost a run, as checks; docs/troubleshooting.md lists them.

What they look at is what would run: TRL in the trainer image (``Facts``), the command line that starts the policy,
OpenCode's configuration, the evaluator's own request.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast
from urllib.parse import urlparse

from docker.errors import ImageNotFound

from scripts.checks import Check, bad_recipe, not_ready, ok, skipped, warn
from scripts.doctor import data
from scripts.doctor.setup import Setup, output_of, pinned
from scripts.stack import ROOT
from services.common import tasks
from services.common.errors import RecipeError
from services.env import opencode
from services.evaluator import cells, rollout
from services.policy import argv

Facts = Mapping[str, Any]
"""What ``probe_trainer.py`` printed; ``{"skipped": why}`` when it could not run."""
TRL_RELEASE = "1.15"
KERNELS = "0.16.0"
TRL_BUDGET = 8
"""Model calls that TRL's worker allows when it is given no number."""
TUNNELS = ("gradio.live", "ngrok.io", "ngrok.app", "ngrok-free.app", "trycloudflare.com", "loca.lt", "serveo.net")
PROBE = ROOT / "scripts/doctor/probe_trainer.py"
PROBE_TIMEOUT_S = 300.0
RESTORE = "restore services/ and build the images again"


def trainer_facts(setup: Setup) -> Facts:
    """Run the probe in the trainer image, without a network."""
    if setup.engine is None:
        return {"skipped": "no Docker engine answers"}
    image = setup.image("trainer")
    try:
        setup.engine.images.get(image)
    except ImageNotFound:
        return {"skipped": f"image {image} is not there"}
    if (found := data.model(setup)).state == "fail":
        return {"skipped": f"the model is not there to be tried: {found.found}"}
    cfg = setup.cfg
    location = f"/models/{cfg.model.id}" if cfg.model.source == "local" else cfg.model.id
    revision = "" if cfg.model.source == "local" else cfg.model.revision or ""
    mounts = {setup.models_dir: "/models", setup.recipe_path.resolve(): "/run/recipe.toml"}
    if cfg.model.source == "hub":
        mounts[setup.hf_cache] = "/hf"
    code, text = output_of(
        "docker", "run", "--rm", "--interactive", "--network", "none",
        "--env", "HF_HOME=/hf", "--env", "HF_HUB_OFFLINE=1", "--env", "MODELS_DIR=/models",
        *(part for source, target in mounts.items() for part in ("--volume", f"{source}:{target}:ro")),
        image, "python", "-", location, revision, "/run/recipe.toml",
        timeout_s=PROBE_TIMEOUT_S, text=PROBE.read_text(encoding="utf-8"),
    )  # fmt: skip
    try:
        return dict(json.loads(text.splitlines()[-1]))
    except (ValueError, IndexError):
        return {"skipped": f"the trainer image's probe ended with exit code {code}: {text[-200:]}"}


def trl_release(setup: Setup, facts: Facts) -> Check:
    """1. trl 1.16 refuses LFM2.5, whose layers are not all attention."""
    name = "trl-release"
    locked = pinned(setup.lock_of["trainer"]).get("trl", "none")
    mend = f"pin trl=={TRL_RELEASE}.0 in images/trainer/requirements.in and run `make lock`"
    if not locked.startswith(f"{TRL_RELEASE}."):
        return not_ready(name, f"trl {locked} is locked; since 1.16 it refuses models with convolution layers", mend)
    if "skipped" in facts:
        return skipped(name, facts["skipped"])
    found = facts["versions"]
    if "error" in found or not found["trl"].startswith(f"{TRL_RELEASE}."):
        return not_ready(name, f"the trainer image has trl {found.get('trl', found)}", "build it again: `make images`")
    if facts["supported"] is not True:
        return bad_recipe(name, facts["supported"]["error"], "choose a model that this TRL can pack")
    layers = ", ".join(facts["config"]["layer_types"])
    return ok(name, f"trl {found['trl']} accepts {facts['config']['model_type']} ({layers})")


def attention_kernel(setup: Setup, facts: Facts) -> Check:
    """2. trl imports ``kernels`` and loads its attention from the Hub: package and kernel must both be there."""
    name = "attention-kernel"
    locked = pinned(setup.lock_of["trainer"]).get("kernels", "none")
    if locked != KERNELS:
        mend = f"pin kernels=={KERNELS} in images/trainer/requirements.in and run `make lock`"
        return not_ready(name, f"kernels {locked} is locked", mend)
    wanted = setup.cfg.trainer.attn_implementation
    if "skipped" not in facts and "error" in facts["versions"]:
        return not_ready(name, f"the trainer image lacks a package: {facts['versions']['error']}", "`make images`")
    if "/" in wanted and facts.get("image_kernel") is not True and not _has_kernel(setup, wanted):
        mend = f"`hf download {wanted}` into {setup.hf_cache}, set LOCAL_KERNELS, or set trainer.attn_implementation"
        return not_ready(name, f"{wanted} is neither in {setup.hf_cache} nor in the trainer image", mend)
    return ok(name, f"kernels {locked}; attention is {wanted}")


def _given(name: str, facts: Facts) -> Mapping[str, Any] | Check:
    """What the trainer gives TRL's worker; a failed check when the image cannot say."""
    worker = facts["worker"]
    if "error" in worker:
        found = f"the trainer image does not fit this recipe: {worker['error']}"
        return not_ready(name, found, "`make images`: it is of another version than this checkout")
    return dict(worker["given"])


def _has_kernel(setup: Setup, repository: str) -> bool:
    if repository in setup.environment.get("LOCAL_KERNELS", ""):
        return True
    owner_and_name = repository.replace("/", "--")
    return any((setup.hf_cache / "hub").glob(f"*--{owner_and_name}/snapshots/*/build*"))


def training_prompts(setup: Setup, facts: Facts) -> Check:
    """3. The trainer wants a data set even with a rollout worker of its own: every prompt must be one served task's."""
    name = "training-prompts"
    cfg = setup.cfg
    try:
        train = tasks.load_suite(setup.tasks_dir, cfg.tasks.train)[: cfg.tasks.max_train]
    except RecipeError as error:
        return bad_recipe(name, str(error), "restore data/tasks")
    if not train:
        return bad_recipe(name, f"suite {cfg.tasks.train} has no task", "choose another suite")
    if repeated := tasks.repeated_instructions(train):
        return bad_recipe(name, f"tasks have one instruction: {', '.join(repeated)}", "remove one of them")
    if "skipped" not in facts:
        given = _given(name, facts)
        if isinstance(given, Check):
            return given
        if "dataset" not in given:
            return not_ready(name, "the trainer gives TRL no data set", RESTORE)
    return ok(name, f"{len(train)} prompts, a task each")


def eos_token(_setup: Setup, facts: Facts) -> Check:
    """4. ``eos_token_ids`` is a required argument of the worker: it must be the model's own end token."""
    name = "eos-token"
    if "skipped" in facts:
        return skipped(name, facts["skipped"])
    token, config = facts["eos_token_id"], facts["config"]
    if not isinstance(token, int):
        return bad_recipe(
            name, f"the tokenizer has no end token: {token}", "restore tokenizer_config.json of the model"
        )
    expected = config.get("eos_token_id")
    if token not in (expected if isinstance(expected, list) else [expected]):
        found = f"the tokenizer's end token is {token}, the model's {expected}"
        return bad_recipe(name, found, "restore the model's config.json and tokenizer_config.json")
    given = _given(name, facts)
    if isinstance(given, Check):
        return given
    if given.get("eos_token_ids") != [token]:
        return not_ready(name, f"the trainer gives TRL eos_token_ids {given.get('eos_token_ids')}", RESTORE)
    return ok(name, f"token {token}")


def agent_budget(setup: Setup, facts: Facts) -> Check:
    """5. TRL allows 8 model calls when it is given no number."""
    name = "agent-budget"
    wanted = setup.cfg.rollout.max_tool_calling_iterations
    if "skipped" in facts:
        return skipped(name, facts["skipped"])
    given = _given(name, facts)
    if isinstance(given, Check):
        return given
    if (number := given.get("max_tool_calling_iterations")) != wanted:
        found = f"the trainer gives TRL {number or f'no number, so {TRL_BUDGET} hold'}, the recipe says {wanted}"
        return not_ready(name, found, RESTORE)
    values = tomllib.loads(setup.recipe_path.read_text(encoding="utf-8"))
    if "max_tool_calling_iterations" not in values.get("rollout", {}):
        mend = "write rollout.max_tool_calling_iterations into the recipe: it also scales the reward"
        return warn(name, f"{wanted} model calls, by default", mend)
    return ok(name, f"{wanted} model calls a rollout, in TRL and in the recipe")


def chat_template(_setup: Setup, facts: Facts) -> Check:
    """6. TRL does not recognise LFM2.5's chat template by itself: a call that it renders must be read back."""
    name = "chat-template"
    if "skipped" in facts:
        return skipped(name, facts["skipped"])
    expected = [{"name": "bash", "arguments": {"command": "ls -a", "timeout": 5}}]
    if facts["round_trip"] != expected:
        found = f"a tool call in the model's chat template reads back as {facts['round_trip'] or 'none'}"
        return bad_recipe(name, found, "restore the model's chat_template.jinja; TRL's lfm2_2_5_template is set")
    return ok(name, "a tool call in the model's template reads back as it was")


def tool_choice(setup: Setup, _facts: Facts, command: Sequence[str] | None = None) -> Check:
    """7. OpenCode always sends ``tool_choice="auto"``: without a parser the policy refuses every call."""
    name = "tool-choice"
    try:
        command = (
            argv.argv(setup.cfg, "train", "cpu" if setup.variant == "cpu" else "cuda") if command is None else command
        )
    except RecipeError as error:
        return bad_recipe(name, str(error), "correct the recipe")
    missing = [flag for flag in ("--enable-auto-tool-choice", "--tool-call-parser") if flag not in command]
    if missing:
        return not_ready(name, f"the policy's command lacks {', '.join(missing)}", RESTORE)
    return ok(name, f"parser {command[list(command).index('--tool-call-parser') + 1]}")


def session_key_header(
    setup: Setup, _facts: Facts, configure: Callable[..., Mapping[str, Any]] = opencode.config
) -> Check:
    """8. The Jobs proxy strips Authorization: the session's key must travel as x-api-key."""
    name = "session-key-header"
    found = configure(setup.cfg, "http://capture", "the-key", setup.cfg.policy.served_model_name)
    headers = found["provider"][opencode.PROVIDER]["options"].get("headers", {})
    if headers.get("x-api-key") != "the-key":
        return not_ready(name, f"OpenCode's configuration sends the headers {sorted(headers) or 'none'}", RESTORE)
    return ok(name, "OpenCode sends its session's key as x-api-key")


def checkpoint_push(setup: Setup, facts: Facts) -> Check:
    """9. transformers 5 pushes no checkpoint by itself: with ADAPTER_REPO, the stack's own push must be able to."""
    name = "checkpoint-push"
    repository, token = setup.environment.get("ADAPTER_REPO", ""), setup.environment.get("HF_TOKEN", "")
    if not repository:
        return ok(name, f"ADAPTER_REPO is not set: checkpoints stay in {setup.runs_dir}")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        return bad_recipe(name, f"ADAPTER_REPO is {repository!r}", "set it to owner/name")
    if not token:
        return bad_recipe(name, f"ADAPTER_REPO is {repository} and HF_TOKEN is not set", "set a token that may write")
    if facts.get("push_callback") is True:
        found = "transformers has a PushToHubCallback again, and would push beside this stack"
        return warn(name, found, "restore the pinned transformers, or leave hub_strategy unset")
    return ok(name, f"complete checkpoints go to {repository}")


def stall_watchdog(setup: Setup, _facts: Facts) -> Check:
    """10. A tunnel died at hour 11 and the run stalled in silence: no tunnel, and a watchdog that can tell a stall."""
    name = "stall-watchdog"
    host = urlparse(setup.environment.get("CAPTURE_URL", "")).hostname or ""
    if any(host == tunnel or host.endswith(f".{tunnel}") for tunnel in TUNNELS):
        mend = "use the Jobs proxy (https://<job>--8000.hf.jobs/capture) or a network of your own"
        return bad_recipe(name, f"CAPTURE_URL goes through the tunnel {host}", mend)
    stall_s, outer_s = setup.cfg.watchdog.stall_s, setup.cfg.rollout.outer_timeout_s
    if stall_s < outer_s:
        found = f"watchdog.stall_s is {stall_s:g} and a rollout may take rollout.outer_timeout_s = {outer_s:g}"
        return bad_recipe(name, found, "raise stall_s: one slow rollout would look like a stall")
    return ok(name, f"a run without an optimizer step for {stall_s:g} s is stopped")


def one_variable_per_flag(setup: Setup, _facts: Facts) -> Check:
    """11. ``hf jobs run --env`` takes one variable a flag: "A=1 B=2" becomes the one variable A."""
    name = "one-variable-per-flag"
    ours = ("RUN_NAME", "MAX_STEPS", "ADAPTER_REPO", "RECIPE", "N_TASKS", "REGISTRY", "TAG")
    for variable in ours:
        value = setup.environment.get(variable, "")
        if found := re.search(r"[\s,;](\w+)=", value):
            mend = f"give {found[1]} a flag (or a line) of its own"
            return bad_recipe(name, f"{variable} is {value!r}, which holds {found[1]} too", mend)
    return ok(name, "no variable holds another one")


def eval_purpose(setup: Setup, _facts: Facts, request: Mapping[str, Any] | None = None) -> Check:
    """12. ``run_rollout(eval_sampling=...)`` needs ``purpose="eval"``, or every cell of an evaluation fails."""
    name = "eval-purpose"
    request = evaluation_request(setup) if request is None else request
    expected = cells.eval_sampling(setup.cfg)
    if request.get("purpose") != "eval" or request.get("eval_sampling") != expected:
        found = (
            f"the evaluator asks with purpose {request.get('purpose')!r} and sampling {request.get('eval_sampling')}"
        )
        return not_ready(name, found, RESTORE)
    return ok(name, "the evaluator asks with purpose eval and the recipe's sampling")


def evaluation_request(setup: Setup) -> dict[str, Any]:
    """What the evaluator sends to the env server for one cell, from the evaluator itself."""
    asked: dict[str, Any] = {}

    class Recorder:
        def run_rollout(self, **request: Any) -> Any:
            asked.update(request)
            raise ConnectionError("recorded")

        def close(self) -> None:
            pass

    arm = cells.Arm("base")
    runner = rollout.Runner(
        connect=lambda: cast(rollout.Client, Recorder()), suite=setup.cfg.tasks.heldout, index={"task": 0},
        under=cells.conditions(setup.cfg, None),
        llm_url="http://policy-eval/v1", backend=setup.cfg.env.backend, retries=0,
    )  # fmt: skip
    runner(cells.Cell(arm, "task", "0" * 64, 0), "base")
    return asked


ALL: tuple[Callable[[Setup, Facts], Check], ...] = (
    trl_release,
    attention_kernel,
    training_prompts,
    eos_token,
    agent_budget,
    chat_template,
    tool_choice,
    session_key_header,
    checkpoint_push,
    stall_watchdog,
    one_variable_per_flag,
    eval_purpose,
)
