#!/usr/bin/env bash
# Usage: scripts/test.sh [unit] [contract] [stack] [gpu] [job]
# unit runs on the host, without Docker; contract inside the images, one pytest per image; stack drives real compose; gpu
# needs CUDA, and runs in the trainer image of VARIANT=cuda; job runs the smoke recipe in the job image.
# One kind after another: side by side, two cores are too few for tests that start vLLM and those that wait for sandboxes.
# Prints, when a part has ended, its output with the slowest tests; at the end the seconds of each part and the counts.
# Exits non-zero if any failed or none ran.
set -uo pipefail
cd "$(dirname "$0")/.."
# The tests choose their own: what `make` exports, or the caller's shell has, must not reach them.
unset RECIPE VARIANT COMPOSE_FILE RUN_NAME MAX_STEPS WATCH RUNS_DIR HF_TOKEN ADAPTER_REPO
# Hypothesis then takes the same examples in every run, and none fails for having been slow once.
export CI=true

python=.venv/bin/python
reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
SLOWEST=(--durations=10 --durations-min=2)
# Half of the unit tests by time; the other half is all that these folders do not hold.
HALF=(tests/unit/trainer tests/unit/job tests/unit/evaluator)

part() { # part <name> <command...>: run it, then print its output in one piece
  local name=$1 started=$SECONDS code=0
  shift
  echo "$name: started"
  "$@" >"$reports/$name.log" 2>&1 || code=$?
  echo "$name: $((SECONDS - started)) s" >>"$reports/seconds"
  flock "$reports" cat <(echo "--- $name") "$reports/$name.log"
  return "$code"
}

host() { # host <report> <pytest arguments...>
  local name=$1
  shift
  part "$name" "$python" -m pytest -q "${SLOWEST[@]}" --junitxml="$reports/$name.xml" "$@"
}

inside() { # inside <image> <tag> <folder> [docker options...]
  local image=$1 tag=$2 folder=$3 name=${3#tests/}
  shift 3
  name=${name//\//-}
  part "$name" docker run --rm --init --network bridge --user root "$@" \
    --volume "$PWD:/src:ro" --volume "$reports:/reports" --workdir /src \
    --env CI --env PYTHONPATH=/src --env PYTHONDONTWRITEBYTECODE=1 --env MODELS_DIR=/src/data/models \
    "${REGISTRY:-local}/opencode-rl-$image-test:$tag" \
    python -m pytest "$folder" -q -p no:cacheprovider "${SLOWEST[@]}" --junitxml="/reports/$name.xml"
}

both() { # both <command> -- <command>: side by side; fails if one does
  local first=() code=0
  while [ "$1" != -- ]; do first+=("$1"); shift; done
  shift
  "${first[@]}" & local job=$!
  "$@" || code=1
  wait "$job" || code=1
  return "$code"
}

unit() { both host unit-1 "${HALF[@]}" -- host unit-2 tests/unit "${HALF[@]/#/--ignore=}"; }

contract() {
  part build-test scripts/build_images.sh cpu test || return 1
  local tag=${TAG:-cpu} code=0
  inside trainer "$tag" tests/contract/trainer --shm-size 1g || code=1
  small_images "$tag" || code=1
  return "$code"
}

small_images() {
  local code=0
  inside env "$1" tests/contract/env || code=1
  inside tools "$1" tests/contract/tools || code=1
  return "$code"
}

stack() { scripts/ensure_chromium.sh && host stack tests/stack; }

job() { host job tests/job; }

gpu() {
  part build-test scripts/build_images.sh cuda trainer-test || return 1
  inside trainer "${TAG:-cuda}" tests/gpu --gpus all --shm-size 8g
}

lane() { # lane <kind...>: one after another
  local kind code=0
  for kind in "$@"; do "$kind" || code=1; done
  return "$code"
}

kinds=()
for kind in "$@"; do
  case $kind in
    unit | contract | stack | gpu | job) kinds+=("$kind") ;;
    *)
      echo "unknown kind of test: $kind; known: unit contract stack gpu job" >&2
      exit 2
      ;;
  esac
done
failed=0
lane "${kinds[@]}" || failed=1
cat "$reports/seconds"
"$python" -m scripts.count_tests "$reports" || failed=1
exit $failed
