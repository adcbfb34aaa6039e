"""The local Hub answers the real huggingface_hub client as the real Hub does, faults included."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    JobNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tests.hub.server import Fault, LocalHub


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with LocalHub() as started:
        yield started
    huggingface_hub.close_session()


@pytest.fixture
def api(hub: LocalHub) -> HfApi:
    return HfApi(endpoint=hub.endpoint, token=hub.token)


def download(api: HfApi, folder: Path, oid: str, name: str = "a.txt") -> bytes:
    path = api.hf_hub_download("me/data", name, repo_type="dataset", revision=oid, local_dir=folder)
    return Path(path).read_bytes()


def test_client_is_the_pinned_one() -> None:
    assert huggingface_hub.__version__ == "2.4.0"


def test_repository_is_made_filled_listed_and_read_back(api: HfApi, hub: LocalHub, tmp_path: Path) -> None:
    repo = api.create_repo("local/adapter", exist_ok=True).repo_id
    api.create_repo(repo, exist_ok=True)
    (tmp_path / "up" / "checkpoint-1").mkdir(parents=True)
    (tmp_path / "up" / "checkpoint-1" / "adapter.bin").write_bytes(bytes(range(256)))
    first = api.upload_folder(repo_id=repo, folder_path=tmp_path / "up", commit_message="step 1")
    second = api.create_commit(
        repo,
        [CommitOperationAdd("README.md", b"# adapter"), CommitOperationDelete("checkpoint-1/", is_folder=True)],
        commit_message="tidy",
    )
    assert [commit.title for commit in api.list_repo_commits(repo)] == ["tidy", "step 1", "initial commit"]
    assert api.repo_info(repo).sha == second.oid
    assert api.list_repo_files(repo) == [".gitattributes", "README.md"]
    assert "checkpoint-1/adapter.bin" in api.list_repo_files(repo, revision=first.oid)
    path = api.hf_hub_download(repo, "checkpoint-1/adapter.bin", revision=first.oid, local_dir=tmp_path / "down")
    assert Path(path).read_bytes() == bytes(range(256))
    assert api.whoami()["name"] == "local"
    assert api.file_exists(repo, "README.md") and not api.file_exists(repo, "nothing")


def test_snapshot_of_a_tag_and_a_branch(api: HfApi, hub: LocalHub, tmp_path: Path) -> None:
    oid = hub.commit("me/data", {"tasks/a/task.toml": b"1"}, repo_type="dataset")
    api.create_tag("me/data", tag="v1", revision=oid, repo_type="dataset")
    api.create_branch("me/data", branch="next", repo_type="dataset")
    hub.commit("me/data", {"tasks/a/task.toml": b"2"}, repo_type="dataset")
    for revision, content in (("v1", b"1"), ("next", b"1"), ("main", b"2")):
        folder = api.snapshot_download(
            "me/data", repo_type="dataset", revision=revision, local_dir=tmp_path / revision, allow_patterns="tasks/*"
        )
        assert (Path(folder) / "tasks/a/task.toml").read_bytes() == content


def test_listings_longer_than_a_page_are_whole(api: HfApi, hub: LocalHub) -> None:
    files = {f"tasks/{number:04}/task.toml": b"x" for number in range(1200)}
    oid = hub.commit("me/data", files, repo_type="dataset")
    listed = api.list_repo_tree("me/data", "tasks", recursive=True, revision=oid, repo_type="dataset")
    assert sum(type(entry).__name__ == "RepoFile" for entry in listed) == 1200
    assert len(api.list_repo_files("me/data", repo_type="dataset")) == 1201
    flat = list(api.list_repo_tree("me/data", "tasks/0001", repo_type="dataset"))
    assert [entry.path for entry in flat] == ["tasks/0001/task.toml"]


def test_what_is_not_there_has_the_hubs_own_errors(api: HfApi, hub: LocalHub, tmp_path: Path) -> None:
    oid = hub.commit("me/data", {"a.txt": b"1"}, repo_type="dataset")
    with pytest.raises(RepositoryNotFoundError):
        api.repo_info("me/nothing")
    with pytest.raises(RevisionNotFoundError):
        api.list_repo_commits("me/data", repo_type="dataset", revision="nothing")
    with pytest.raises(RevisionNotFoundError):
        download(api, tmp_path, oid[:7])
    with pytest.raises(RemoteEntryNotFoundError):
        download(api, tmp_path, oid, "nothing.txt")


def test_second_writer_gets_412(api: HfApi, hub: LocalHub) -> None:
    parent = hub.commit("me/adapter", {"a": b"1"})
    hub.commit("me/adapter", {"a": b"2"}, title="the other writer")
    with pytest.raises(HfHubHTTPError) as raised:
        api.create_commit("me/adapter", [CommitOperationAdd("b", b"3")], commit_message="m", parent_commit=parent)
    assert raised.value.response.status_code == 412
    assert hub.repo("me/adapter").at("main").files == {".gitattributes": b"", "a": b"2"}


def test_412_on_demand(api: HfApi, hub: LocalHub) -> None:
    hub.commit("me/adapter", {"a": b"1"})
    hub.fail(Fault("POST", "/commit/", status=412))
    with pytest.raises(HfHubHTTPError, match="412"):
        api.create_commit("me/adapter", [CommitOperationAdd("b", b"3")], commit_message="m")
    api.create_commit("me/adapter", [CommitOperationAdd("b", b"3")], commit_message="m")
    assert hub.repo("me/adapter").at("main").files["b"] == b"3"


def test_429_is_waited_for_as_long_as_it_says(api: HfApi, hub: LocalHub, tmp_path: Path) -> None:
    oid = hub.commit("me/data", {"a.txt": b"content"}, repo_type="dataset")
    hub.fail(Fault("GET", "/resolve/", status=429, headers={"Retry-After": "1"}))
    start = time.monotonic()
    assert download(api, tmp_path, oid) == b"content"
    assert time.monotonic() - start >= 1
    assert [request.status for request in hub.requests if request.method == "GET"] == [429, 200]


def test_500_although_the_commit_landed(api: HfApi, hub: LocalHub) -> None:
    hub.commit("me/adapter", {"a": b"1"})
    hub.fail(Fault("POST", "/commit/", status=500, after_effect=True))
    with pytest.raises(HfHubHTTPError, match="500"):
        api.create_commit("me/adapter", [CommitOperationAdd("b", b"3")], commit_message="step 2")
    assert api.list_repo_commits("me/adapter")[0].title == "step 2"


def test_500_before_the_commit_leaves_nothing(api: HfApi, hub: LocalHub) -> None:
    before = hub.commit("me/adapter", {"a": b"1"})
    hub.fail(Fault("POST", "/commit/", status=500))
    with pytest.raises(HfHubHTTPError, match="500"):
        api.create_commit("me/adapter", [CommitOperationAdd("b", b"3")], commit_message="step 2")
    assert api.repo_info("me/adapter").sha == before


def test_cut_connection_is_resumed_by_range(api: HfApi, hub: LocalHub, tmp_path: Path) -> None:
    content = bytes(range(256)) * 48_000  # 12 MB: the client keeps what it got in pieces of 10 MB
    oid = hub.commit("me/data", {"a.txt": content}, repo_type="dataset")
    hub.fail(Fault("GET", "/resolve/", cut_after=11_000_000))
    assert download(api, tmp_path, oid) == content
    assert [request.status for request in hub.requests if request.method == "GET"] == [200, 206]


def test_corrupted_bytes_pass_the_client(api: HfApi, hub: LocalHub, tmp_path: Path) -> None:
    """Why prepare_tasks hashes what it downloaded."""
    oid = hub.commit("me/data", {"a.txt": b"content"}, repo_type="dataset")
    hub.fail(Fault("GET", "/resolve/", corrupt=True))
    assert download(api, tmp_path, oid) == b"CONTENT"


def test_slow_answer_runs_into_the_timeout_of_the_call(api: HfApi, hub: LocalHub) -> None:
    hub.commit("me/data", {"a.txt": b"1"}, repo_type="dataset")
    hub.fail(Fault("GET", "/api/datasets/", delay_s=1))
    with pytest.raises(httpx2.TimeoutException):
        api.repo_info("me/data", repo_type="dataset", timeout=0.2)


def test_stopped_hub_refuses_connections(hub: LocalHub, api: HfApi) -> None:
    hub.commit("me/data", {"a.txt": b"1"}, repo_type="dataset")
    hub.stop()
    huggingface_hub.close_session()
    with pytest.raises(httpx2.ConnectError):
        api.repo_info("me/data", repo_type="dataset", timeout=5)


def test_faults_are_counted(api: HfApi, hub: LocalHub) -> None:
    hub.commit("me/adapter", {"a": b"1"})
    hub.fail(Fault("GET", "/api/models/", status=403, skip=1, times=2))
    answers = []
    for _ in range(4):
        try:
            api.repo_info("me/adapter")
            answers.append(200)
        except HfHubHTTPError as error:
            answers.append(error.response.status_code)
    assert answers == [200, 403, 403, 200]


def test_job_is_run_watched_and_cancelled(api: HfApi, hub: LocalHub) -> None:
    job = api.run_job(
        image="me/job:1", command=["python", "-m", "services.job"], env={"RECIPE": "r.toml"}, secrets={"HF_TOKEN": "s"},
        flavor="h200x2", timeout="72h", expose_public=[8000], labels={"run": "lfm"},
    )  # fmt: skip
    asked = hub.jobs[job.id].spec
    assert (asked["flavor"], asked["timeoutSeconds"], asked["expose"]["portsPublic"]) == ("h200x2", 72 * 3600, [8000])
    assert asked["secrets"] == {"HF_TOKEN": "s"} and "s" not in str(job.secrets)
    assert job.status.expose_urls == [f"https://{job.id}--8000.hf.jobs"]
    hub.jobs[job.id].logs += ["one", "two"]
    hub.set_stage(job.id, "COMPLETED")
    assert list(api.fetch_job_logs(job_id=job.id)) == ["one", "two"]
    assert api.inspect_job(job_id=job.id).status.stage == "COMPLETED"
    other = api.run_job(image="me/job:1", command=["true"])
    assert [listed.id for listed in api.list_jobs(namespace="local", labels={"run": "lfm"})] == [job.id]
    api.cancel_job(job_id=other.id)
    assert api.inspect_job(job_id=other.id).status.stage == "CANCELED"
    with pytest.raises(JobNotFoundError):
        api.inspect_job(job_id="nothing")
