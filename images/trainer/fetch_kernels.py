"""``fetch_kernels.py PROJECT CACHE``: the Hub kernels of PROJECT/pyproject.toml, for this image's torch and CUDA.

With PROJECT/kernels.lock their commits and hashes are those; without it, the newest commits of the versions, noted in
CACHE/kernels.lock either way, so that an image says what it carries. A Hub that does not answer, or that has no build
for this torch and CUDA, leaves the image without a kernel and says so: the recipe chooses another attention then.

Exit codes: 0 fetched, or left out with a message; 1 what the Hub has differs from the lock.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tomllib
from pathlib import Path

if os.path.exists("/run/secrets/ca") and os.path.getsize("/run/secrets/ca"):
    os.environ["SSL_CERT_FILE"] = "/run/secrets/ca"
project, cache = Path(sys.argv[1]), Path(sys.argv[2])
os.environ["KERNELS_CACHE"] = str(cache)  # read when the package is imported

import httpx  # noqa: E402
from huggingface_hub import constants  # noqa: E402
from kernels.lockfile import KernelLock, get_kernel_locks  # noqa: E402
from kernels.utils import install_kernel  # noqa: E402

PROBE_TIMEOUT_S = 10.0


def main() -> int:
    try:
        httpx.get(constants.ENDPOINT, timeout=PROBE_TIMEOUT_S, follow_redirects=True).raise_for_status()
    except httpx.HTTPError as error:
        print(f"fetch_kernels: {constants.ENDPOINT} does not answer ({error}); the image has no Hub kernel")
        return 0
    fetched = []
    for lock in locks():
        try:
            path = install_kernel(lock.repo_id, revision=lock.sha, variant_locks=lock.variants)
        except FileNotFoundError as error:
            print(f"fetch_kernels: {lock.repo_id} is left out: {error}")
            continue
        print(f"fetch_kernels: {lock.repo_id} at {lock.sha}: {path.name}")
        fetched.append(dataclasses.asdict(lock))
    cache.mkdir(parents=True, exist_ok=True)
    (cache / "kernels.lock").write_text(json.dumps(fetched, indent=2) + "\n")
    return 0


def locks() -> list[KernelLock]:
    lock = project / "kernels.lock"
    if lock.exists():
        return [KernelLock.from_json(entry) for entry in json.loads(lock.read_text())]
    wanted = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["kernels"]["dependencies"]
    return [get_kernel_locks(repository, version) for repository, version in wanted.items()]


if __name__ == "__main__":
    sys.exit(main())
