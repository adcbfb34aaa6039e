#!/usr/bin/env bash
# Resolve the *.in files of images/ and tests/ into hashed locks; refresh the bases' digests where a registry answers.
#
# WHEELHOUSE (default: the folder that PIP_FIND_LINKS names) is searched for torch's CPU build, EXTRA_INDEX is one
# more package index to look in; neither is written to a lock. Arguments are passed on to uv, e.g. `--upgrade`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly WHEELHOUSE=${WHEELHOUSE:-${PIP_FIND_LINKS:-}}
readonly arguments=("$@")

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/uv"
"$work/uv/bin/pip" install --quiet --require-hashes --requirement images/base/uv.txt

if [ -d "$WHEELHOUSE" ]; then export UV_FIND_LINKS=$WHEELHOUSE; fi
if [ -n "${EXTRA_INDEX:-}" ]; then export UV_INDEX=$EXTRA_INDEX UV_INDEX_STRATEGY=unsafe-best-match; fi
export UV_CUSTOM_COMPILE_COMMAND="make lock" UV_PYTHON_DOWNLOADS=never
if [ -n "${SSL_CERT_FILE:-}" ]; then export UV_SYSTEM_CERTS=1; fi

# lock OUTPUT PYTHON UV_ARGUMENT...; arguments of `make lock` come last.
lock() {
    local output=$1 python=$2
    shift 2
    echo "lock: $output"
    "$work/uv/bin/uv" pip compile --quiet --no-annotate --generate-hashes --only-binary :all: --output-file "$output" \
        --python-version "$python" "$@" "${arguments[@]}"
}

refresh_bases() {
    local name reference digest
    while IFS='=' read -r name reference; do
        digest=$(timeout 20 docker buildx imagetools inspect "${reference%@*}" \
            --format '{{.Manifest.Digest}}' 2>/dev/null) || {
            echo "lock: no registry answers for ${reference%@*}; its digest stays"
            continue
        }
        sed -i "s|^$name=.*|$name=${reference%@*}@$digest|" images/bases.env
    done < <(grep -v '^#' images/bases.env)
}

# Hub kernels of the trainer, with the package's own command, where the Hub answers.
lock_kernels() {
    local package
    package=$(grep '^kernels==' images/trainer/requirements.in)
    echo "lock: images/trainer/kernels.lock"
    timeout 120 "$work/uv/bin/uv" run --quiet --isolated --no-project --with "$package" \
        kernels lock images/trainer 2>"$work/kernels.log" ||
        echo "lock: the trainer's kernels stay as they are: $(tail -n 1 "$work/kernels.log")"
}

lock images/base/uv.txt 3.11 --universal images/base/uv.in
lock images/base/test.txt 3.11 --universal images/base/test.in
lock tests/requirements.txt 3.11 --universal tests/requirements.in
lock images/sandbox/requirements.txt 3.11 --universal images/sandbox/requirements.in

linux=(--python-platform x86_64-manylinux_2_31)
lock images/env/requirements.txt 3.13 "${linux[@]}" images/env/requirements.in
lock images/tools/requirements.txt 3.13 "${linux[@]}" images/tools/requirements.in
lock images/job/requirements.txt 3.13 "${linux[@]}" images/job/requirements.in

# lock_variant NAME PYTHON UV_ARGUMENT...: the trainer's lock, then the policy's. The trainer's layers go on top of
# the policy's, so both take the versions that the trainer needs; of mcp they need different ones.
lock_variant() {
    local variant=$1 python=$2 policy=images/policy/requirements.$1 trainer=images/trainer/requirements
    shift 2
    lock "$trainer.$variant.txt" "$python" "${linux[@]}" "$@" --override images/trainer/overrides.txt \
        "$policy.in" "$trainer.in"
    sed -n '/^mcp/d; s/^\([a-z0-9][^ ]*==[^ ]*\).*/\1/p' "$trainer.$variant.txt" >"$work/pins.txt"
    lock "$policy.txt" "$python" "${linux[@]}" "$@" --constraint "$work/pins.txt" "$policy.in"
}
lock_variant cpu 3.11 --override images/policy/overrides.cpu.txt
lock_variant cuda 3.13

refresh_bases
lock_kernels
