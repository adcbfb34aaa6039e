"""``python -m scripts.hf_job train | eval | logs | status | stop``: a run on Hugging Face Jobs.

``train`` checks, prints the estimate, asks, and submits; ``--dry-run`` prints what it would submit and asks the Hub
nothing. ``eval`` is the Job beside it that evaluates every checkpoint. docs/hf-jobs.md says what they need.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from huggingface_hub import HfApi, JobInfo, get_token
from rich.console import Console
from rich.table import Table

from scripts import checks
from scripts.hf import digests, payload, preflight
from scripts.hf.payload import Payload, Request
from scripts.stack import ROOT, folder, git_revision
from services.common import recipe
from services.common.errors import RecipeError, run_main
from services.hub.client import UNAVAILABLE, connect, first_line, messages, patiently
from services.hub.commits import ensure_repository
from services.hub.pushes import reopen

SANDBOX_LABEL = "opencode-rl-run"
"""As services.env.hub_sandbox sets it on every sandbox."""
OPEN_STAGES = ["RUNNING", "SCHEDULING"]
RETRY_S = 60.0
"""How long the repository is asked before nothing is submitted."""
WIDE = 160
"""Columns of a table that goes to a file or a pipe: names are not cut there."""
app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)
out = Console(highlight=False, soft_wrap=True)
if not out.is_terminal:
    out.width = WIDE

Repo = Annotated[str, typer.Option(envvar="ADAPTER_REPO", help="owner/name of the repository for the adapters")]
RunName = Annotated[str, typer.Option(envvar="RUN_NAME", help="name of the run")]
Yes = Annotated[bool, typer.Option(envvar="YES", help="do not ask")]
DryRun = Annotated[bool, typer.Option("--dry-run", envvar="DRY_RUN", help="print what would be submitted; ask nothing")]
MaxSteps = Annotated[int | None, typer.Option(envvar="MAX_STEPS", min=1, help="fewer steps: 20 for a first try")]


@app.command()
def train(
    repo: Repo = "",
    run_name: RunName = "",
    max_steps: MaxSteps = None,
    resume: Annotated[bool, typer.Option(envvar="RESUME", help="from the newest checkpoint in ADAPTER_REPO")] = False,
    split: Annotated[bool, typer.Option(help="policy and trainer in Jobs of their own, in one network group")] = False,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Train the recipe that RECIPE names in a Job."""

    def payloads(request: Request) -> list[Payload]:
        request = replace(request, resume=resume)
        return payload.split(request) if split else [payload.training(request)]

    run_main(lambda: _submit("train", payloads, repo, run_name, max_steps, yes, dry_run))


@app.command("eval")
def evaluate(
    repo: Repo = "", run_name: RunName = "", max_steps: MaxSteps = None, yes: Yes = False, dry_run: DryRun = False
) -> None:
    """Evaluate every checkpoint of ADAPTER_REPO as it appears, in a Job of its own."""

    def payloads(request: Request) -> list[Payload]:
        return [payload.evaluation(request)]

    run_main(lambda: _submit("watch", payloads, repo, run_name, max_steps, yes, dry_run))


def _submit(
    role: str,
    payloads: Callable[[Request], list[Payload]],
    repo: str,
    run_name: str,
    max_steps: int | None,
    yes: bool,
    dry_run: bool,
) -> int:
    if not repo:
        raise RecipeError("ADAPTER_REPO is not set; it names the Hub repository for the adapters, owner/name")
    api = connect()
    revision = git_revision()
    tasks_dir = folder("TASKS_DIR", "data/tasks")
    path = Path(os.environ.get("RECIPE") or ROOT / "data/recipes/lfm2.5-2.6b.toml")
    pushed = digests.load()
    text = payload.job_recipe(path, pushed.images["sandbox"])
    cfg = _parse(text, path)
    name = run_name or f"{cfg.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    found = list(preflight.recipe(cfg, tasks_dir))
    if not dry_run:
        found += [*preflight.images(revision=revision), *preflight.hub(api, repo, name if role == "train" else "")]
    checks.show(found, out)
    checks.require(found)
    request = Request(
        recipe_toml=text, cfg=cfg, digests=pushed, run_name=name, repo=repo, revision=revision,
        namespace=repo.partition("/")[0] if dry_run else _namespace(api), token=str(api.token or get_token() or ""),
        pins=preflight.pins(cfg, tasks_dir), max_steps=max_steps,
    )  # fmt: skip
    asked = payloads(request)
    _show_price(request, role)
    if dry_run:
        out.print_json(json.dumps([payload.shown(one) for one in asked]))
        return 0
    if not yes and not typer.confirm("Submit?"):
        out.print("Nothing was submitted.")
        return 0
    with messages(repo, api.endpoint):
        ensure_repository(api, repo, private=True)
        if role == "train":
            reopen(api, repo, RETRY_S)  # here too: an evaluation's Job may look before the trainer's does it
        _run_jobs(api, asked)
    out.print(f"`make hf-logs RUN_NAME={name}` follows it, `make hf-stop RUN_NAME={name}` ends it.")
    return 0


def _run_jobs(api: HfApi, asked: list[Payload]) -> None:
    """Submit all or none: a policy without its trainer would run, and cost, until its timeout."""
    submitted: list[JobInfo] = []
    try:
        for one in asked:
            submitted.append(job := api.run_job(**one))
            out.print(f"Job {job.id}: {job.url}")
    except BaseException:  # Ctrl-C too
        for job, one in zip(submitted, asked, strict=False):
            _cancel(api, job.id, one["namespace"])
        raise


def _cancel(api: HfApi, job_id: str, namespace: str) -> None:
    try:
        patiently(api.cancel_job)(job_id=job_id, namespace=namespace)
        out.print(f"Job {job_id} is cancelled: the Jobs beside it were not submitted.")
    except UNAVAILABLE as error:
        out.print(f"Job {job_id} still runs ({first_line(error)}); end it by `make hf-stop JOB={job_id}`.")


def _parse(text: str, path: Path) -> recipe.Recipe:
    """The recipe as the Job reads it. Raises: RecipeError: with the name of the file that a person edits."""
    with tempfile.TemporaryDirectory() as aside:
        written = Path(aside) / path.name
        written.write_text(text, encoding="utf-8")
        try:
            return recipe.load(written)
        except RecipeError as error:
            raise RecipeError(str(error).replace(str(written), str(path))) from None


def _show_price(request: Request, role: str) -> None:
    found = payload.price(request, role)
    out.print(
        f"At most {found.usd_per_hour:.2f} dollars an hour and {found.usd:.2f} in all ({found.hours:g} h, sandboxes "
        "included), at the recipe's prices."
    )
    if (ceiling := request.cfg.costs.ceiling_usd) is not None and role == "train":
        out.print(f"The run ends itself, with a checkpoint, at {ceiling:g} dollars.")


# --- Jobs that are there ------------------------------------------------------------------------------------------

JobId = Annotated[str, typer.Option("--job", envvar="JOB", help="id of the Job; default: by the run's name")]


@app.command()
def status(run_name: RunName = "") -> None:
    """Jobs of this project, or of one run, newest first."""

    def work() -> int:
        api = connect()
        found = _jobs(api, run_name)
        table = Table("job", "run", "role", "stage", "flavor", "started", "message", box=None, pad_edge=False)
        for job in found:
            labels = job.labels or {}
            table.add_row(
                job.id, labels.get("run", "-"), labels.get("role", "-"), str(job.status.stage), str(job.flavor),
                f"{job.created_at:%Y-%m-%d %H:%M}" if job.created_at else "-", job.status.message or "",
            )  # fmt: skip
        out.print(table if found else "No Job of this project.")
        return 0

    run_main(work)


@app.command()
def logs(job: JobId = "", run_name: RunName = "", follow: Annotated[bool, typer.Option()] = True) -> None:
    """Follow the lines of the newest training Job, or of JOB."""

    def work() -> int:
        api = connect()
        namespace = _namespace(api)
        chosen = job or _newest(api, run_name).id
        for line in api.fetch_job_logs(job_id=chosen, namespace=namespace, follow=follow):
            out.print(line, markup=False)
        return 0

    run_main(work)


@app.command()
def stop(job: JobId = "", run_name: RunName = "", yes: Yes = False) -> None:
    """Cancel JOB, or the Jobs of a run and the sandboxes that they left."""

    def work() -> int:
        api = connect()
        namespace = _namespace(api)
        if not job and not run_name:
            raise RecipeError("name what to stop: RUN_NAME=... or JOB=...; `make hf-status` lists them")
        found = [job] if job else [one.id for one in _jobs(api, run_name) if str(one.status.stage) in OPEN_STAGES]
        sandboxes = [] if job else _ids(api, namespace, {SANDBOX_LABEL: run_name})
        if not found and not sandboxes:
            out.print(f"Run {run_name} has no Job that runs.")
            return 0
        if not yes and not typer.confirm(f"Cancel {', '.join(found) or 'no Job'} and {len(sandboxes)} sandboxes?"):
            return 0
        with messages(f"Jobs of {namespace}", api.endpoint):
            for one in (*found, *sandboxes):
                patiently(api.cancel_job)(job_id=one, namespace=namespace)
        out.print(f"Cancelled {len(found)} Jobs and {len(sandboxes)} sandboxes.")
        return 0

    run_main(work)


def _namespace(api: HfApi) -> str:
    if given := os.environ.get("HF_NAMESPACE"):
        return given
    with messages("your account", api.endpoint):
        return str(patiently(api.whoami)()["name"])


def _jobs(api: HfApi, run_name: str) -> list[JobInfo]:
    namespace = _namespace(api)
    labels = {"project": payload.PROJECT} | ({"run": run_name} if run_name else {})
    with messages(f"Jobs of {namespace}", api.endpoint):
        found = patiently(lambda: list(api.list_jobs(namespace=namespace, labels=labels, timeout=30)))()
    return sorted(found, key=lambda job: str(job.created_at), reverse=True)


def _newest(api: HfApi, run_name: str) -> JobInfo:
    """Raises: RecipeError: there is none."""
    training = [job for job in _jobs(api, run_name) if (job.labels or {}).get("role") == "train"]
    if not training:
        raise RecipeError(f"no training Job of {run_name or 'this project'}; `make hf-status` lists what there is")
    return training[0]


def _ids(api: HfApi, namespace: str, labels: dict[str, str]) -> list[str]:
    with messages(f"Jobs of {namespace}", api.endpoint):
        listed = api.list_jobs(namespace=namespace, labels=labels, status=OPEN_STAGES, timeout=30)
        return [job.id for job in listed]


if __name__ == "__main__":
    app()
