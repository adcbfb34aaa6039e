"""A small real HTTP server that speaks the Hub's API; see README.md for what it knows and how to break it."""

from __future__ import annotations

import base64
import json
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub.state import HubRefusal, HubState, Job, Repo, blob_oid

PAGE = 1000
"""Entries of one page of a listing, as on the real Hub."""


@dataclass
class Fault:
    """Breaks requests whose method and path match. Counted per fault: the first ``times`` after ``skip`` that pass."""

    method: str = ".*"
    path: str = ""
    """Regular expression searched in the path."""
    times: int = 1
    skip: int = 0
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    after_effect: bool = False
    """Answer ``status`` only after the request took effect: a 500 although the commit landed."""
    cut_after: int | None = None
    """Close the connection after so many bytes of the body."""
    corrupt: bool = False
    """Send other bytes of the same length."""
    delay_s: float = 0.0
    """Wait before answering."""

    def takes(self, method: str, path: str) -> bool:
        if not (re.fullmatch(self.method, method) and re.search(self.path, path)):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.times <= 0:
            return False
        self.times -= 1
        return True


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    status: int


class LocalHub(HubState):
    """A Hub on a free port of the loopback interface; ``with LocalHub() as hub``."""

    token = "hf_local"
    user = "local"

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []
        self._faults: list[Fault] = []
        hub = self

        class BoundHandler(_Handler):
            state = hub

        self._server = _Server(("127.0.0.1", 0), BoundHandler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._home = tempfile.TemporaryDirectory()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def environment(self) -> dict[str, str]:
        """What a program needs in its environment to use this Hub and no other."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_TOKEN": self.token,
            "HF_HOME": self._home.name,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def fail(self, *faults: Fault) -> None:
        """Arm faults; the first one that matches a request breaks it."""
        with self.lock:
            self._faults.extend(faults)

    def heal(self) -> None:
        """Disarm all faults."""
        with self.lock:
            self._faults.clear()

    def fault_for(self, method: str, path: str) -> Fault | None:
        with self.lock:
            return next((fault for fault in self._faults if fault.takes(method, path)), None)

    def set_stage(self, job_id: str, stage: str, message: str | None = None) -> None:
        """Move a job to RUNNING, COMPLETED, ERROR, CANCELED or another stage."""
        with self.lock:
            self.jobs[job_id].stage, self.jobs[job_id].message = stage, message

    def __enter__(self) -> LocalHub:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Close the port: later requests are refused by the kernel."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        self._home.cleanup()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is part of the tests; anything else is printed by the handler."""


@dataclass
class _Answer:
    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> _Answer:
    return _Answer(json.dumps(value).encode(), status, {"Content-Type": "application/json"} | (headers or {}))


class _Handler(BaseHTTPRequestHandler):
    state: LocalHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are kept in ``hub.requests``, not printed."""

    def _handle(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        path = unquote(url.path)
        fault = self.state.fault_for(self.command, path)
        if fault and fault.delay_s:
            time.sleep(fault.delay_s)
        answer = _Answer() if fault and fault.status and not fault.after_effect else self._route(path)
        if fault and fault.status:
            answer = _json({"error": f"fault on demand: {fault.status}"}, fault.status, fault.headers)
        if fault and fault.corrupt:
            answer.body = bytes(byte ^ 0x20 for byte in answer.body)
        self._send(path, answer, fault.cut_after if fault else None)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _handle

    def _send(self, path: str, answer: _Answer, cut_after: int | None) -> None:
        with self.state.lock:
            self.state.requests.append(Request(self.command, path, answer.status))
        self.send_response(answer.status)
        for name, value in ({"Content-Length": str(len(answer.body))} | answer.headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body[:cut_after])
        if cut_after is not None:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    def _route(self, path: str) -> _Answer:
        try:
            for method, pattern, route in ROUTES:
                if self.command in method and (match := re.fullmatch(pattern, path)):
                    return route(self, **match.groupdict())
            raise HubRefusal(404, f"the local Hub does not know {self.command} {path}")
        except HubRefusal as refusal:
            headers = {"X-Error-Message": refusal.message}
            if refusal.code:
                headers["X-Error-Code"] = refusal.code
            return _json({"error": refusal.message}, refusal.status, headers)

    def _repo(self, repo_type: str, repo_id: str) -> Repo:
        return self.state.repo(repo_id, (repo_type or "models").removesuffix("s"))

    def _page(self, path: str, entries: list[Any]) -> _Answer:
        """One page of ``entries`` with a Link to the next."""
        start = int(self.query.get("cursor", ["0"])[0])
        headers = {}
        if start + PAGE < len(entries):
            kept = "".join(f"{key}={value}&" for key, (value, *_) in self.query.items() if key != "cursor")
            headers["Link"] = f'<{self.state.endpoint}{path}?{kept}cursor={start + PAGE}>; rel="next"'
        return _json(entries[start : start + PAGE], headers=headers)

    # --- account and repositories

    def whoami(self) -> _Answer:
        if self.headers.get("Authorization") != f"Bearer {self.state.token}":
            raise HubRefusal(401, "Invalid credentials in Authorization header")
        auth = {"type": "access_token", "accessToken": {"displayName": "local", "role": "write"}}
        account = {"type": "user", "id": "0", "name": self.state.user, "fullname": "local", "orgs": []}
        return _json(account | {"auth": auth})

    def create_repo(self) -> _Answer:
        asked = json.loads(self.body)
        repo_id = f"{asked.get('organization') or self.state.user}/{asked['name']}"
        repo_type = asked.get("type") or "model"
        prefix = "" if repo_type == "model" else f"{repo_type}s/"
        answer = {"url": f"{self.state.endpoint}/{prefix}{repo_id}", "name": repo_id, "id": repo_id}
        try:
            self.state.create_repo(repo_id, repo_type)
        except HubRefusal as refusal:
            return _json(answer | {"error": refusal.message}, refusal.status)
        return _json(answer)

    def delete_repo(self) -> _Answer:
        asked = json.loads(self.body)
        repo_id = f"{asked.get('organization') or self.state.user}/{asked['name']}"
        repo = self.state.repo(repo_id, asked.get("type") or "model")
        with self.state.lock:
            del self.state.repos[repo.repo_type, repo_id]
        return _json({})

    def info(self, repo_type: str, repo_id: str, revision: str | None = None) -> _Answer:
        repo = self._repo(repo_type, repo_id)
        commit = repo.at(revision or "main")
        siblings = [{"rfilename": path, "size": len(content)} for path, content in sorted(commit.files.items())]
        return _json(
            {"_id": "0", "id": repo_id, "author": repo_id.split("/")[0], "sha": commit.oid, "private": False,
             "disabled": False, "gated": False, "downloads": 0, "likes": 0, "tags": [], "siblings": siblings,
             "lastModified": commit.date, "createdAt": commit.date}
        )  # fmt: skip

    def refs(self, repo_type: str, repo_id: str) -> _Answer:
        repo = self._repo(repo_type, repo_id)

        def named(kind: str, refs: dict[str, str]) -> list[dict[str, str]]:
            return [{"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": oid} for name, oid in refs.items()]

        return _json({"branches": named("heads", repo.branches), "tags": named("tags", repo.tags), "converts": []})

    def make_ref(self, repo_type: str, repo_id: str, kind: str, name: str) -> _Answer:
        repo = self._repo(repo_type, repo_id)
        asked = json.loads(self.body or b"{}")
        with self.state.lock:
            if kind == "branch":
                repo.branches.setdefault(name, repo.at(asked.get("startingPoint") or "main").oid)
            else:  # here the name in the URL is the revision to tag
                repo.tags[asked["tag"]] = repo.at(name).oid
        return _json({})

    def commits(self, repo_type: str, repo_id: str, revision: str) -> _Answer:
        history = self._repo(repo_type, repo_id).history(revision)
        return self._page(
            urlsplit(self.path).path,
            [
                {"id": commit.oid, "title": commit.title, "message": "", "date": commit.date,
                 "authors": [{"user": self.state.user}]}
                for commit in history
            ],
        )  # fmt: skip

    # --- files

    def tree(self, repo_type: str, repo_id: str, revision: str, folder: str | None = None) -> _Answer:
        files = self._repo(repo_type, repo_id).at(revision).files
        prefix = f"{folder}/" if folder else ""
        inside = {path: content for path, content in files.items() if path.startswith(prefix)}
        if folder and not inside:
            raise HubRefusal(404, f"{folder} does not exist on {revision}", "EntryNotFound")
        recursive = self.query.get("recursive", ["false"])[0].lower() in ("true", "1")
        folders = {
            "/".join(parts[:depth])
            for path in inside
            for parts in [path.split("/")]
            for depth in range(prefix.count("/") + 1, len(parts))
        }
        entries: list[dict[str, Any]] = [
            {"type": "directory", "path": path, "oid": blob_oid(path.encode()), "size": 0} for path in folders
        ]
        entries += [
            {"type": "file", "path": path, "oid": blob_oid(content), "size": len(content)}
            for path, content in inside.items()
        ]
        shown = [entry for entry in entries if recursive or "/" not in entry["path"].removeprefix(prefix)]
        return self._page(urlsplit(self.path).path, sorted(shown, key=lambda entry: entry["path"]))

    def paths_info(self, repo_type: str, repo_id: str, revision: str) -> _Answer:
        files = self._repo(repo_type, repo_id).at(revision).files
        form = json.loads(self.body) if self.body.startswith(b"{") else parse_qs(self.body.decode())
        return _json(
            [
                {"type": "file", "path": path, "oid": blob_oid(files[path]), "size": len(files[path])}
                for path in form.get("paths", [])
                if path in files
            ]
        )

    def resolve(self, repo_type: str, repo_id: str, revision: str, path: str) -> _Answer:
        commit = self._repo(repo_type, repo_id).at(revision)
        if path not in commit.files:
            raise HubRefusal(404, f"{path} does not exist on {revision}", "EntryNotFound")
        content = commit.files[path]
        headers = {
            "X-Repo-Commit": commit.oid,
            "ETag": f'"{blob_oid(content)}"',
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
            if first >= len(content):
                return _Answer(b"", 416, headers | {"Content-Range": f"bytes */{len(content)}"})
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            return _Answer(content[first : last + 1], 206, headers)
        if self.command == "HEAD":  # the length of what GET would send
            headers["Content-Length"] = str(len(content))
        return _Answer(content, 200, headers)

    def preupload(self, repo_type: str, repo_id: str, revision: str) -> _Answer:
        files = self._repo(repo_type, repo_id).at(revision).files
        asked = json.loads(self.body)["files"]
        return _json(
            {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": "regular",
                        "shouldIgnore": False,
                        "oid": blob_oid(files[file["path"]]) if file["path"] in files else None,
                    }
                    for file in asked
                ]
            }
        )

    def commit(self, repo_type: str, repo_id: str, revision: str) -> _Answer:
        repo = self._repo(repo_type, repo_id)
        header: dict[str, Any] = {}
        files: dict[str, bytes] = {}
        deleted: list[str] = []
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                header = value
            elif item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] in ("deletedFile", "deletedFolder"):
                folder = item["key"] == "deletedFolder"
                deleted.append(value["path"].rstrip("/") + "/" if folder else value["path"])
            else:
                raise HubRefusal(400, f"the local Hub takes no {item['key']}")
        oid = self.state.commit(
            repo_id,
            files,
            repo_type=repo.repo_type,
            branch=revision,
            title=header["summary"],
            deleted=tuple(deleted),
            parent=header.get("parentCommit"),
        )
        return _json({"success": True, "commitOid": oid, "commitUrl": f"{self.state.endpoint}/{repo_id}/commit/{oid}"})

    def validate_yaml(self) -> _Answer:
        return _json({"errors": [], "warnings": []})

    # --- jobs

    def run_job(self, namespace: str) -> _Answer:
        return _json(_job_json(self.state.run_job(namespace, json.loads(self.body))))

    def list_jobs(self, namespace: str) -> _Answer:
        stages = self.query.get("stage", [])
        labels = [tuple(label.split("=", 1)) for label in self.query.get("label", [])]
        with self.state.lock:
            jobs = [
                job
                for job in self.state.jobs.values()
                if job.namespace == namespace
                and (not stages or job.stage in stages)
                and all(job.spec.get("labels", {}).get(key) == value for key, value in labels)
            ]
        return self._page(urlsplit(self.path).path, [_job_json(job) for job in jobs])

    def inspect_job(self, namespace: str, job_id: str) -> _Answer:
        return _json(_job_json(self.state.job(namespace, job_id)))

    def cancel_job(self, namespace: str, job_id: str) -> _Answer:
        self.state.job(namespace, job_id)
        self.state.set_stage(job_id, "CANCELED")
        return _json({})

    def label_job(self, namespace: str, job_id: str) -> _Answer:
        job = self.state.job(namespace, job_id)
        job.spec["labels"] = json.loads(self.body)["labels"]
        return _json(_job_json(job))

    def job_logs(self, namespace: str, job_id: str) -> _Answer:
        job = self.state.job(namespace, job_id)
        events = [json.dumps({"timestamp": job.created_at, "data": line}) for line in job.logs]
        body = "".join(f"data: {event}\n\n" for event in events).encode()
        return _Answer(body, headers={"Content-Type": "text/event-stream"})


def _job_json(job: Job) -> dict[str, Any]:
    spec = job.spec
    ports = spec.get("expose", {}).get("ports", [])
    return {
        "id": job.id,
        "createdAt": job.created_at,
        "dockerImage": spec.get("dockerImage"),
        "spaceId": spec.get("spaceId"),
        "command": spec.get("command"),
        "arguments": spec.get("arguments", []),
        "environment": spec.get("environment", {}),
        "secrets": dict.fromkeys(spec.get("secrets", {})),  # the Hub gives the names back, never the values
        "flavor": spec.get("flavor"),
        "labels": spec.get("labels", {}),
        "volumes": spec.get("volumes"),
        "expose": spec.get("expose"),
        "network": spec.get("network"),
        "owner": {"id": "0", "name": job.namespace, "type": "user"},
        "status": {
            "stage": job.stage,
            "message": job.message,
            "exposeUrls": [f"https://{job.id}--{port}.hf.jobs" for port in ports] or None,
        },
    }


_REPO = r"(?P<repo_type>models|datasets|spaces)/(?P<repo_id>[^/]+/[^/]+)"
_JOB = r"/api/jobs/(?P<namespace>[^/]+)"
ROUTES: list[tuple[tuple[str, ...], str, Callable[..., _Answer]]] = [
    (("GET",), r"/api/whoami-v2", _Handler.whoami),
    (("POST",), r"/api/repos/create", _Handler.create_repo),
    (("DELETE",), r"/api/repos/delete", _Handler.delete_repo),
    (("POST",), r"/api/validate-yaml", _Handler.validate_yaml),
    (("GET",), rf"/api/{_REPO}", _Handler.info),
    (("GET",), rf"/api/{_REPO}/revision/(?P<revision>.+)", _Handler.info),
    (("GET",), rf"/api/{_REPO}/refs", _Handler.refs),
    (("POST",), rf"/api/{_REPO}/(?P<kind>branch|tag)/(?P<name>.+)", _Handler.make_ref),
    (("GET",), rf"/api/{_REPO}/commits/(?P<revision>.+)", _Handler.commits),
    (("GET",), rf"/api/{_REPO}/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+))?", _Handler.tree),
    (("POST",), rf"/api/{_REPO}/paths-info/(?P<revision>.+)", _Handler.paths_info),
    (("POST",), rf"/api/{_REPO}/preupload/(?P<revision>.+)", _Handler.preupload),
    (("POST",), rf"/api/{_REPO}/commit/(?P<revision>.+)", _Handler.commit),
    (("POST",), _JOB, _Handler.run_job),
    (("GET",), _JOB, _Handler.list_jobs),
    (("GET",), rf"{_JOB}/(?P<job_id>[^/]+)", _Handler.inspect_job),
    (("GET",), rf"{_JOB}/(?P<job_id>[^/]+)/logs", _Handler.job_logs),
    (("POST",), rf"{_JOB}/(?P<job_id>[^/]+)/cancel", _Handler.cancel_job),
    (("PUT",), rf"{_JOB}/(?P<job_id>[^/]+)/labels", _Handler.label_job),
    (
        ("GET", "HEAD"),
        r"/(?:(?P<repo_type>datasets|spaces)/)?(?P<repo_id>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)",
        _Handler.resolve,
    ),
]
