#!/usr/bin/env bash
# Lint, types, pages made from the code, compose files, recipes: what `make check` and a pre-commit hook run.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy" services scripts tests/browser.py
"$bin/python" -m scripts.docs --check
for recipe in data/recipes/*.toml; do
  "$bin/python" -c 'import sys; from pathlib import Path; from services.common import recipe; recipe.load(Path(sys.argv[1]))' "$recipe"
done
docker compose -f compose.yaml config --quiet
docker compose -f compose.yaml -f compose.one-gpu.yaml config --quiet
docker compose -f compose.yaml -f compose.cdi.yaml config --quiet
docker compose -f compose.yaml -f compose.cpu.yaml config --quiet
docker compose -f compose.dash.yaml config --quiet
HF_TOKEN=any docker compose -f compose.yaml -f compose.hub.yaml config --quiet
echo "check: clean"
