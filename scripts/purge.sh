#!/usr/bin/env bash
# Deletes runs/ and this project's images, after asking. YES=1 answers for you.
set -euo pipefail
cd "$(dirname "$0")/.."
images=$(docker images --format '{{.Repository}}:{{.Tag}}' | grep -E '(^|/)opencode-rl[-/]' || true)
echo "This deletes ${RUNS_DIR:-$PWD/runs} ($(du -sh "${RUNS_DIR:-runs}" 2>/dev/null | cut -f1 || echo empty)) and:"
echo "${images:-no images}"
if [ "${YES:-}" != 1 ]; then
  read -r -p "Type yes to go on: " answer
  [ "$answer" = yes ] || { echo "nothing was deleted"; exit 1; }
fi
rm -rf "${RUNS_DIR:-runs}"
[ -z "$images" ] || echo "$images" | xargs docker rmi --force >/dev/null
echo "deleted"
