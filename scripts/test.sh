#!/usr/bin/env bash
# Usage: scripts/test.sh [unit] [contract] [stack] [job]
# unit runs on the host; contract runs inside the images, one pytest per image; stack drives real compose;
# job runs the smoke recipe in the job image, and is not part of `make test`.
# Prints the counts of each kind at the end; exits non-zero if any failed or none ran.
set -uo pipefail
cd "$(dirname "$0")/.."
# The tests choose their own: what `make` exports, or the caller's shell has, must not reach them.
unset RECIPE VARIANT COMPOSE_FILE RUN_NAME MAX_STEPS WATCH RUNS_DIR HF_TOKEN ADAPTER_REPO
# Hypothesis then takes the same examples in every run, and none fails for having been slow once.
export CI=true

python=.venv/bin/python
reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
failed=0

host() { # host <kind>
  "$python" -m pytest "tests/$1" -q --junitxml="$reports/$1.xml" || failed=1
}

inside() { # inside <image> <folder> [docker options...]
  local image=$1 folder=$2
  shift 2
  docker run --rm --init --network bridge --user root "$@" \
    --volume "$PWD:/src:ro" --volume "$reports:/reports" --workdir /src \
    --env CI --env PYTHONPATH=/src --env PYTHONDONTWRITEBYTECODE=1 --env MODELS_DIR=/src/data/models \
    "${REGISTRY:-local}/opencode-rl-$image-test:${TAG:-cpu}" \
    python -m pytest "$folder" -q -p no:cacheprovider --junitxml="/reports/contract-$image.xml" || failed=1
}

for kind in "$@"; do
  case $kind in
    unit | job) host "$kind" ;;
    stack)
      scripts/ensure_chromium.sh || exit 1
      host stack
      ;;
    contract)
      scripts/build_images.sh cpu test || exit 1
      inside trainer tests/contract/trainer --shm-size 1g
      inside env tests/contract/env
      inside tools tests/contract/tools
      ;;
    *)
      echo "unknown kind of test: $kind; known: unit contract stack job" >&2
      exit 2
      ;;
  esac
done
"$python" -m scripts.count_tests "$reports" || failed=1
exit $failed
