#!/usr/bin/env bash
# Build the images of images/docker-bake.hcl: engine, Debian bases, then all targets at once.
#
# Usage: build_images.sh [cpu|cuda [TARGET_OR_BAKE_ARGUMENT...]]    e.g. `build_images.sh cpu env`, `... cpu test`
#
# Environment: REGISTRY, TAG, SANDBOX_BASE: see images/docker-bake.hcl; SANDBOX_BASE is by default what RECIPE says;
#   WHEELHOUSE   folder with torch's CPU build, default what PIP_FIND_LINKS names
#   EXTRA_INDEX  package index to look in besides uv's default one
#   CA_BUNDLE    certificates that builds trust, default the host's own bundle
# Exit codes: 0 built; 1 a build failed; 2 unknown variant; 3 something must be installed by hand; 5 the images cannot
# run on this machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export VARIANT=${1:-${VARIANT:-cpu}}
shift || true
has_avx2() { grep -qw avx2 /proc/cpuinfo; }
die() { local code=$1; shift; echo "build_images: $*" >&2; exit "$code"; }

scripts/check_system.sh
case $VARIANT in
    cpu) has_avx2 || die 5 "this processor has no AVX2, which vLLM's CPU build needs; use one that has it, or a GPU" ;;
    cuda) ;;
    *) die 2 "found variant '$VARIANT'; allowed are cpu and cuda" ;;
esac
scripts/ensure_docker.sh
scripts/build_base.sh

# env.sandbox_base of the recipe, or what `make prepare` has found for it.
if [ -z "${SANDBOX_BASE:-}" ] && [ -r "${RECIPE:-}" ]; then
    # Without `make prepare` there is no lock.
    SANDBOX_BASE=$(cat "$RECIPE" "$RECIPE.lock" 2>/dev/null \
        | sed -nE -e 's/^sandbox_base *= *"([^"]+)".*/\1/p' -e 's/^LOCKED_SANDBOX_BASE=//p' | sed -n 1p || true)
fi
if [ -n "${SANDBOX_BASE:-}" ]; then export SANDBOX_BASE; else unset SANDBOX_BASE; fi

bundle=${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}
if [ -z "${CA_BUNDLE:-}" ] && [ -s "$bundle" ]; then export CA_BUNDLE=$bundle; fi
wheelhouse=${WHEELHOUSE:-${PIP_FIND_LINKS:-}}
unset WHEELHOUSE
if [ -d "$wheelhouse" ]; then export WHEELHOUSE=$wheelhouse; fi
if ! has_avx2; then export OPENCODE_PACKAGE=opencode-linux-x64-baseline; fi
REVISION=$(git describe --always --dirty --abbrev=40 --exclude '*' 2>/dev/null || echo unknown)
export REVISION

# The lock that an image was made from, as a label: a run's manifest names it.
locks=()
for image in policy trainer env tools sandbox job; do
    lock=images/$image/requirements.$VARIANT.txt
    [ -e "$lock" ] || lock=images/$image/requirements.txt
    locks+=(--set "$image*.labels.opencode-rl.lock=sha256:$(sha256sum "$lock" | cut -d' ' -f1)")
done

# The engine's own builder sees the local bases. Reading the CA bundle and the wheel folder is what we ask for.
export BUILDX_BUILDER=default BUILDX_BAKE_ENTITLEMENTS_FS=0
docker buildx bake --file images/docker-bake.hcl "${locks[@]}" "${@:-default}"
