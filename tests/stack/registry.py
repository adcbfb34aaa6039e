"""A real registry on the loopback interface: Debian's docker-registry, unpacked, not installed."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

CONFIG = """\
version: 0.1
storage: {{filesystem: {{rootdirectory: {folder}/data}}, delete: {{enabled: true}}}}
http: {{addr: "127.0.0.1:{port}"}}
log: {{level: warn}}
"""


def unpack(folder: Path) -> Path:
    """Its binary, by apt's own client; about 5 MB."""
    subprocess.run(["apt-get", "update", "-qq", "-o", "Acquire::Retries=3"], capture_output=True, check=False)
    subprocess.run(
        ["apt-get", "download", "-qq", "-o", "Acquire::Retries=3", "docker-registry"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    (package,) = folder.glob("docker-registry_*.deb")
    subprocess.run(["dpkg-deb", "--extract", package, folder], check=True)
    return folder / "usr/bin/docker-registry"


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Yields: ``127.0.0.1:PORT``, which Docker takes without TLS."""
    binary = unpack(folder)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    (folder / "config.yml").write_text(CONFIG.format(folder=folder, port=port))
    process = subprocess.Popen([binary, "serve", folder / "config.yml"])
    try:
        deadline_s = time.monotonic() + 30
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/v2/").raise_for_status()
                break
            except httpx.HTTPError:
                assert time.monotonic() < deadline_s and process.poll() is None, "docker-registry does not start"
                time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)
