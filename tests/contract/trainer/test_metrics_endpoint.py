"""The image has what its services need to serve their numbers."""

import urllib.request
from pathlib import Path

import pytest

from services.common import metrics
from services.common.run_dir import RunDir


@pytest.mark.parametrize("service", ["trainer"])
def test_the_endpoint_answers(service: str, tmp_path: Path) -> None:
    with metrics.serve(service, RunDir(tmp_path / "run"), host="127.0.0.1", port=0) as port:
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    assert f'opencode_rl_info{{run="run",service="{service}"}} 1.0' in text
