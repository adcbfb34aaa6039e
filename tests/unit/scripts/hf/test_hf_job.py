"""Submitting a Job: the whole program against tests/hub, the payload literally, and each thing that keeps it back."""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import HfApi
from typer.testing import CliRunner

from scripts import hf_job
from scripts.hf import digests, preflight
from scripts.hf.digests import NAMES
from services.common.recipe import file_sha256
from services.hub.client import connect
from tests.hub.server import Fault, LocalHub

ROOT = Path(__file__).resolve().parents[4]
COMMIT = "1" * 40
REVISION = "a" * 40
HEX = "5" * 64
RECIPE = f"""\
# A run.
[run]
name = "run"

[model]
id = "someone/model"
revision = "{COMMIT}"
max_model_len = 65536

[sampling]
max_completion_tokens = 4096

[tasks]
train = "train"
heldout = "test"

[rollout]
max_inflight = 32

[env]
backend = "docker" # here; a Job has its own
sandbox_cpus = 1.0

[costs]
trainer_usd_per_hour = 10.0
eval_usd_per_hour = 5.0
sandbox_usd_per_hour = 0.01
ceiling_usd = 500.0
"""
PIN = {
    "source": {"kind": "hub", "repo": "me/tasks", "revision": "0" * 40, "folder": "tasks"},
    "tasks": [{"name": "t1", "difficulty": "easy", "instruction_sha256": HEX, "files_sha256": HEX}],
}


class _Registry(BaseHTTPRequestHandler):
    """FAKE of a registry: has every image that is asked for by the digest that ends in 5."""

    def do_HEAD(self) -> None:
        self.send_response(200 if self.path.endswith("5") else 404)
        self.end_headers()

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def registry() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Registry)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def ready(server: LocalHub, registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything that a submission needs. Returns: the folder with recipe.toml, digests.json and tasks/."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "tasks").mkdir()
    for name in ("train", "test"):
        (tmp_path / f"tasks/{name}.json").write_text(json.dumps(PIN))
    images = {name: f"{registry}/me/opencode-rl-{name}@sha256:{HEX}" for name in NAMES}
    write_digests(tmp_path, variant="cuda", revision=REVISION, images=images)
    monkeypatch.setattr(digests, "PATH", tmp_path / "digests.json")
    monkeypatch.setattr(preflight.images, "__defaults__", (tmp_path / "digests.json", None))
    monkeypatch.setattr(digests.load, "__defaults__", (tmp_path / "digests.json",))
    monkeypatch.setattr(hf_job, "git_revision", lambda: REVISION)
    for name, value in {"RECIPE": str(tmp_path / "recipe.toml"), "TASKS_DIR": str(tmp_path / "tasks")}.items():
        monkeypatch.setenv(name, value)
    for name in ("ADAPTER_REPO", "RUN_NAME", "MAX_STEPS", "YES", "DRY_RUN", "JOB", "HF_NAMESPACE", "RESUME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def write_digests(folder: Path, **changed: Any) -> None:
    path = folder / "digests.json"
    value = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(value | changed))


def call(*arguments: str, answer: str = "") -> tuple[int, str]:
    result = CliRunner().invoke(hf_job.app, list(arguments), input=answer)
    return result.exit_code, result.output


TRAIN = ("train", "--repo", "local/adapter", "--run-name", "run-1")


def expected(folder: Path, registry: str) -> dict[str, Any]:
    """The payload of a training Job, literally."""
    images = {name: f"{registry}/me/opencode-rl-{name}@sha256:{HEX}" for name in sorted(NAMES)}
    pin = file_sha256(folder / "tasks/train.json")
    recipe = RECIPE.replace('"docker" #', '"hf-sandbox" #').replace(
        "sandbox_cpus = 1.0\n", f'sandbox_cpus = 1.0\nsandbox_image = "{images["sandbox"]}"\n'
    )
    return {
        "command": ["tini", "--", "/app/venvs/job/bin/python", "-m", "services.job", "train"],
        "arguments": [],
        "environment": {
            "RECIPE_TOML": recipe,
            "RUN_NAME": "run-1",
            "MAX_STEPS": "20",
            "ADAPTER_REPO": "local/adapter",
            "GIT_REVISION": REVISION,
            "IMAGE_DIGESTS": json.dumps(images),
            "PINS": json.dumps({"test.json": pin, "train.json": pin}),
        },
        "flavor": "h200x2",
        "secrets": {"HF_TOKEN": "hf_local"},
        "timeoutSeconds": 72 * 3600,
        "labels": {
            "project": "opencode-rl", "run": "run-1", "role": "train", "revision": REVISION[:12], "name": "run-1-train",
        },
        "expose": {"ports": [8000], "portsPublic": [8000]},
        "dockerImage": f"{registry}/me/opencode-rl-job@sha256:{HEX}",
    }  # fmt: skip


# --- What is submitted --------------------------------------------------------------------------------------------


def test_the_payload_of_a_training_job_is_this(server: LocalHub, ready: Path, registry: str) -> None:
    code, output = call(*TRAIN, "--max-steps", "20", "--yes")
    assert code == 0, output
    (job,) = server.jobs.values()
    spec = job.spec
    spec["expose"]["ports"] = spec["expose"].get("ports") or [8000]
    assert spec == expected(ready, registry)
    assert job.namespace == "local"
    assert f"Job {job.id}" in output


def test_a_missing_repository_is_made_private(server: LocalHub, ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    real = hf_job.ensure_repository

    def ensure(api: HfApi, repo: str, *, private: bool) -> None:
        asked.append(private)
        real(api, repo, private=private)

    monkeypatch.setattr(hf_job, "ensure_repository", ensure)
    assert call(*TRAIN, "--yes")[0] == 0
    assert asked == [True]


def test_the_estimate_comes_before_the_question_and_no_is_an_answer(server: LocalHub, ready: Path) -> None:
    code, output = call(*TRAIN, answer="n\n")
    assert code == 0
    assert "At most 10.32 dollars an hour and 743.04 in all (72 h, sandboxes included)" in output
    assert "ends itself, with a checkpoint, at 500 dollars" in output
    assert server.jobs == {} and ("model", "local/adapter") not in server.repos
    assert call(*TRAIN, answer="y\n")[0] == 0 and len(server.jobs) == 1


def test_a_dry_run_prints_the_payload_and_asks_the_hub_nothing(server: LocalHub, ready: Path, registry: str) -> None:
    code, output = call(*TRAIN, "--max-steps", "20", "--dry-run")
    assert code == 0
    (shown,) = json.loads(output[output.index("[\n") :])
    literal = expected(ready, registry)
    assert shown == {
        "image": literal["dockerImage"],
        "command": literal["command"],
        "env": literal["environment"],
        "secrets": {"HF_TOKEN": "***"},
        "flavor": "h200x2",
        "timeout": "72h",
        "expose_public": [8000],
        "name": "run-1-train",
        "labels": {key: value for key, value in literal["labels"].items() if key != "name"},
        "namespace": "local",
    }
    assert server.requests == [] and "hf_local" not in output


def test_the_evaluation_s_job_has_one_gpu_and_follows_the_repository(server: LocalHub, ready: Path) -> None:
    code, output = call("eval", "--repo", "local/adapter", "--run-name", "run-1", "--yes")
    assert code == 0, output
    (job,) = server.jobs.values()
    assert (job.spec["flavor"], job.spec["timeoutSeconds"]) == ("h200", 48 * 3600)
    assert job.spec["command"][-1] == "watch" and job.spec["labels"]["role"] == "watch"
    assert "At most 5.08 dollars an hour" in output


def test_a_split_run_is_two_jobs_in_one_network_group(server: LocalHub, ready: Path) -> None:
    assert call("train", "--repo", "local/adapter", "--run-name", "run-1.2", "--split", "--yes")[0] == 0
    policy, trainer = (job.spec for job in server.jobs.values())
    assert policy["network"] == {"group": "run-1-2", "aliases": ["policy"]} and "expose" not in policy
    assert trainer["network"] == {"group": "run-1-2", "aliases": ["trainer"]}
    assert trainer["environment"]["POLICY_ALIAS"] == "policy"
    assert (policy["flavor"], trainer["flavor"]) == ("h200", "h200")


@pytest.mark.parametrize("hub", ["answers", "is away"])
def test_a_policy_without_its_trainer_is_cancelled(server: LocalHub, ready: Path, hub: str) -> None:
    server.fail(Fault("POST", "/api/jobs/local$", status=403, skip=1, times=9))
    if hub == "is away":
        server.fail(Fault("POST", "/cancel$", status=403, times=9))
    code, output = call("train", "--repo", "local/adapter", "--run-name", "run-1", "--split", "--yes")
    (policy,) = server.jobs.values()
    assert code == 2 and policy.spec["labels"]["role"] == "policy"
    if hub == "answers":
        assert policy.stage == "CANCELED" and f"Job {policy.id} is cancelled" in output
    else:
        assert f"end it by `make hf-stop JOB={policy.id}`" in output


def test_the_result_of_before_is_gone_before_a_resumed_run_is_submitted(server: LocalHub, ready: Path) -> None:
    """Else an evaluation's Job that looks first takes the run for ended."""
    server.commit("local/adapter", {"result.json": b"{}", "metrics.jsonl": b""})
    assert call(*TRAIN, "--resume", "--yes")[0] == 0
    assert "result.json" not in server.repo("local/adapter").at("main").files
    assert "metrics.jsonl" in server.repo("local/adapter").at("main").files


def test_an_evaluation_leaves_the_result_where_it_is(server: LocalHub, ready: Path) -> None:
    server.commit("local/adapter", {"result.json": b"{}"})
    assert call("eval", "--repo", "local/adapter", "--run-name", "run-1", "--yes")[0] == 0
    assert "result.json" in server.repo("local/adapter").at("main").files


def test_no_timeout_is_the_hub_s_own(ready: Path, server: LocalHub) -> None:
    """Thirty minutes, which would end every run."""
    for arguments in (TRAIN, ("eval", "--repo", "local/adapter")):
        assert call(*arguments, "--yes")[0] == 0
    assert all(job.spec["timeoutSeconds"] > 1800 for job in server.jobs.values())


# --- What keeps it back -------------------------------------------------------------------------------------------


def without_token(server: LocalHub, ready: Path, patch: pytest.MonkeyPatch) -> None:
    patch.delenv("HF_TOKEN")
    patch.setattr(preflight, "get_token", lambda: None)


def with_another_token(server: LocalHub, ready: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("HF_TOKEN", "hf_wrong")


def reading_token(server: LocalHub, ready: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(preflight, "scopes", lambda _account: real_scopes({"auth": {"accessToken": {"role": "read"}}}))


def silent_hub(server: LocalHub, ready: Path, patch: pytest.MonkeyPatch) -> None:
    server.fail(Fault("GET", "/api/whoami-v2", status=503, times=99))


def no_pin(server: LocalHub, ready: Path, patch: pytest.MonkeyPatch) -> None:
    (ready / "tasks/test.json").unlink()


def no_digests(server: LocalHub, ready: Path, patch: pytest.MonkeyPatch) -> None:
    (ready / "digests.json").unlink()


def a_tag(server: LocalHub, ready: Path, patch: pytest.MonkeyPatch) -> None:
    images = json.loads((ready / "digests.json").read_text())["images"]
    write_digests(ready, images=images | {"job": "ghcr.io/me/opencode-rl-job:latest"})


def cpu_images(server: LocalHub, ready: Path, patch: pytest.MonkeyPatch) -> None:
    write_digests(ready, variant="cpu")


def unpushed_image(server: LocalHub, ready: Path, patch: pytest.MonkeyPatch) -> None:
    images = json.loads((ready / "digests.json").read_text())["images"]
    write_digests(ready, images=images | {"job": images["job"][:-1] + "0"})


def no_revision(server: LocalHub, ready: Path, patch: pytest.MonkeyPatch) -> None:
    path = ready / "recipe.toml"
    path.write_text(path.read_text().replace(f'revision = "{COMMIT}"\n', ""))


def local_model(server: LocalHub, ready: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("RECIPE", str(ROOT / "data/recipes/smoke.toml"))


def bad_recipe(server: LocalHub, ready: Path, patch: pytest.MonkeyPatch) -> None:
    path = ready / "recipe.toml"
    path.write_text(path.read_text() + "\n[rollout.x]\n")


def short_idle_timeout(server: LocalHub, ready: Path, patch: pytest.MonkeyPatch) -> None:
    path = ready / "recipe.toml"
    path.write_text(RECIPE.replace("[env]\n", "[env]\nhf_sandbox_idle_timeout_s = 600.0\n"))


def running_already(server: LocalHub, ready: Path, patch: pytest.MonkeyPatch) -> None:
    connect().run_job(image="x", command=["y"], labels={"run": "run-1", "role": "train"}, timeout=60)


real_scopes = preflight.scopes


@pytest.mark.parametrize(
    ("spoil", "code", "message"),
    [
        (without_token, 2, "no token is set; set HF_TOKEN"),
        (with_another_token, 2, r"refuses the token \(401\)"),
        (reading_token, 2, "the token's role is read; use a token with role write"),
        (silent_hub, 3, "does not answer .* try again later"),
        (no_pin, 2, r"test\.json .*prepare_tasks pin"),
        (no_digests, 2, "`make push REGISTRY=...` pushes the images"),
        (a_tag, 2, "names images that are not by digest"),
        (cpu_images, 2, "images of variant cpu, and a Job has GPUs"),
        (unpushed_image, 3, "cannot be pulled without a login: .* answers 404"),
        (no_revision, 2, "pin the full 40-character commit"),
        (local_model, 2, "a Job has no model of this machine"),
        (bad_recipe, 2, r"recipe .*recipe\.toml is refused:\s+rollout\.x: unknown key"),
        (short_idle_timeout, 2, "the idle timeout must exceed it"),
        (running_already, 2, "run run-1 is trained by Job .* already"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_submitted(
    server: LocalHub, ready: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[..., None], code: int, message: str
) -> None:
    spoil(server, ready, monkeypatch)
    before = len(server.jobs)
    found, output = call(*TRAIN, "--yes")
    assert re.search(message, " ".join(output.split())), output
    assert found == code
    assert len(server.jobs) == before and ("model", "local/adapter") not in server.repos


def test_without_a_repository_there_is_nowhere_to_push(ready: Path) -> None:
    code, output = call("train", "--yes")
    assert code == 2 and "ADAPTER_REPO is not set" in output


def test_images_of_another_revision_are_a_warning(server: LocalHub, ready: Path) -> None:
    write_digests(ready, revision="b" * 40)
    code, output = call(*TRAIN, "--yes")
    assert code == 0 and f"this tree is {REVISION}" in output


@pytest.mark.parametrize(
    ("permissions", "state", "found"),
    [
        (["repo.write", "job.write"], "ok", "fine-grained"),
        (["repo.write"], "fail", r"lacks job\.write \(to start Jobs and sandboxes\)"),
        ([], "fail", r"lacks repo\.write \(to push checkpoints\) and job\.write"),
    ],
)
def test_a_fine_grained_token_needs_both_rights(permissions: list[str], state: str, found: str) -> None:
    token = {"role": "fineGrained", "fineGrained": {"scoped": [{"permissions": permissions}]}}
    check = preflight.scopes({"auth": {"accessToken": token}})
    assert check.state == state and re.search(found, check.found)


# --- Jobs that are there ------------------------------------------------------------------------------------------


def test_logs_status_and_stop_find_a_run_by_its_name(server: LocalHub, ready: Path) -> None:
    assert call(*TRAIN, "--yes")[0] == 0
    assert call("eval", "--repo", "local/adapter", "--run-name", "run-1", "--yes")[0] == 0
    assert call("train", "--repo", "local/adapter", "--run-name", "run-2", "--yes")[0] == 0
    sandbox = connect().run_job(image="x", command=["y"], labels={hf_job.SANDBOX_LABEL: "run-1"}, timeout=60)
    train, evaluation, other = list(server.jobs.values())[:3]
    train.logs += ["[trainer] step 1", "[policy] ready"]
    code, output = call("logs", "--run-name", "run-1", "--no-follow")
    assert (code, output) == (0, "[trainer] step 1\n[policy] ready\n")
    code, output = call("status", "--run-name", "run-1")
    assert train.id in output and evaluation.id in output and other.id not in output
    code, output = call("stop", "--run-name", "run-1", "--yes")
    assert (code, output) == (0, "Cancelled 2 Jobs and 1 sandboxes.\n")
    assert (train.stage, evaluation.stage, other.stage) == ("CANCELED", "CANCELED", "RUNNING")
    assert server.jobs[sandbox.id].stage == "CANCELED"
    assert call("stop", "--run-name", "run-1", "--yes")[1] == "Run run-1 has no Job that runs.\n"


def test_stop_asks_what_and_whether(server: LocalHub, ready: Path) -> None:
    assert call(*TRAIN, "--yes")[0] == 0
    (job,) = server.jobs.values()
    assert call("stop")[0] == 2
    assert call("stop", "--job", job.id, answer="n\n")[0] == 0 and job.stage == "RUNNING"
    assert call("stop", "--job", job.id, answer="y\n")[0] == 0 and job.stage == "CANCELED"


def test_logs_of_no_job_is_one_message(server: LocalHub, ready: Path) -> None:
    code, output = call("logs", "--run-name", "none")
    assert code == 2 and "no training Job of none" in output


def test_the_verbs_of_the_makefile_reach_the_program() -> None:
    """`make -n` by somebody in a shell: what would be run. (`make test` exports a RECIPE to all that it runs.)"""

    def shown(verb: str, **variables: str) -> str:
        shell = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        done = subprocess.run(
            ["make", "-n", verb], cwd=ROOT, env=shell | variables, capture_output=True, text=True, check=True
        )
        return done.stdout

    for verb, command in {
        "hf-job": "scripts.hf_job train", "hf-eval-job": "scripts.hf_job eval", "hf-logs": "scripts.hf_job logs",
        "hf-status": "scripts.hf_job status", "hf-stop": "scripts.hf_job stop", "push": "scripts.push",
    }.items():  # fmt: skip
        assert command in shown(verb), verb
    assert "RECIPE=data/recipes/lfm2.5-2.6b.toml" in shown("hf-job")
    assert "RECIPE=mine.toml" in shown("hf-job", RECIPE="mine.toml")


def test_a_resumed_run_is_told_to_fetch_its_checkpoint(server: LocalHub, ready: Path) -> None:
    assert call(*TRAIN, "--resume", "--yes")[0] == 0
    (job,) = server.jobs.values()
    assert job.spec["environment"]["RESUME_FROM_HUB"] == "1"
