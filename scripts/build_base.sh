#!/usr/bin/env bash
# Make the local images opencode-rl/base:bookworm and :trixie, which every Dockerfile starts from.
#
# Where the registry answers they are the digest-pinned images of images/bases.env; else debootstrap makes the same
# Debian from the host's own apt mirror. The labels say which it was, and the run's manifest records them:
#   opencode-rl.base.origin    the pinned reference, or debootstrap:<suite>
#   opencode-rl.base.packages  sha256 of the sorted "package version" list (debootstrap only)
#
# Usage: build_base.sh [--force]     --force makes them again.
# Exit codes: 0 both are there; 1 a step failed; 3 neither a registry nor debootstrap can be had.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly PROBE_TIMEOUT_S=10
readonly PULL_TIMEOUT_S=300

say() { printf 'build_base: %s\n' "$*"; }
die() { local code=$1; shift; printf 'build_base: %s\n' "$*" >&2; exit "$code"; }

pinned() { sed -n "s/^$1=//p" images/bases.env; }

# A base is kept while its origin is still what images/bases.env asks for, or debootstrap.
is_current() {
    local origin
    origin=$(docker image inspect --format '{{index .Config.Labels "opencode-rl.base.origin"}}' \
        "opencode-rl/base:$1" 2>/dev/null) || return 1
    [ "$origin" = "$(pinned "$1")" ] || [ "$origin" = "debootstrap:$1" ]
}

registry_answers() { timeout "$PROBE_TIMEOUT_S" docker buildx imagetools inspect "$(pinned "$1")" >/dev/null 2>&1; }

pull() {
    local reference
    reference=$(pinned "$1")
    say "$1: pulling $reference"
    timeout "$PULL_TIMEOUT_S" docker pull --quiet "$reference" >/dev/null
    echo "FROM $reference" |
        docker build --quiet --label "opencode-rl.base.origin=$reference" --tag "opencode-rl/base:$1" - >/dev/null
}

require_debootstrap() {
    [ "$(id -u)" = 0 ] || die 3 "no registry answers, and only root can run debootstrap: pull images/bases.env's" \
        "images where one answers, or run this as root."
    command -v debootstrap >/dev/null && return
    command -v apt-get >/dev/null || die 3 "no registry answers and debootstrap is not here: please install it."
    say "installing debootstrap"
    apt-get update -qq || true
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends debootstrap >/dev/null
}

# The host's own mirror for a suite whose name ends as given ("" or "-security").
host_mirror() {
    # The format string is apt's, not the shell's.
    # shellcheck disable=SC1091,SC2016
    . /etc/os-release && apt-get indextargets --format '$(REPO_URI)' \
        'Created-By: Packages' "Release: ${VERSION_CODENAME}$1" | head -n 1
}

write_sources() {
    local suite=$1 root=$2 security
    security=$(host_mirror -security)
    {
        echo "deb $(host_mirror '') $suite main"
        echo "deb $(host_mirror '') $suite-updates main"
        [ -z "$security" ] || echo "deb $security $suite-security main"
    } >"$root/etc/apt/sources.list"
}

# What Debian's own slim images leave out, now and in every later apt-get install.
slim_down() {
    local root=$1
    cat >"$root/etc/dpkg/dpkg.cfg.d/slim" <<'SLIM'
path-exclude /usr/share/doc/*
path-include /usr/share/doc/*/copyright
path-exclude /usr/share/man/*
path-exclude /usr/share/info/*
path-exclude /usr/share/locale/*
SLIM
    find "$root/usr/share/doc" -type f ! -name copyright -delete
    rm -rf "$root"/usr/share/{man,info,locale}/* "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/* \
        "$root"/var/log/* "$root"/var/cache/debconf/*-old
}

bootstrap() {
    local suite=$1 work root packages
    work=$(mktemp -d -p "${TMPDIR:-/var/tmp}")
    # Expanded now: a local is gone when the trap runs.
    # shellcheck disable=SC2064
    trap "rm -rf '$work'" EXIT
    root=$work/root
    say "$suite: no registry; making it with debootstrap"
    debootstrap --variant=minbase "$suite" "$root" "$(host_mirror '')" >"$work/log" 2>&1 ||
        die 1 "debootstrap $suite failed: $(tail -n 5 "$work/log")"
    packages=$(chroot "$root" dpkg-query --show | sort | sha256sum | cut -d' ' -f1)
    write_sources "$suite" "$root"
    slim_down "$root"
    tar --directory "$root" --numeric-owner --create . | docker import \
        --change "LABEL opencode-rl.base.origin=debootstrap:$suite opencode-rl.base.packages=sha256:$packages" \
        --change 'CMD ["bash"]' - "opencode-rl/base:$suite" >/dev/null
}

make_base() {
    if [ "${force:-}" != yes ] && is_current "$1"; then
        say "$1: is there"
        return
    fi
    if registry_answers "$1"; then pull "$1"; else bootstrap "$1"; fi
    say "$1: made, $(docker image inspect --format '{{.Size}}' "opencode-rl/base:$1" | numfmt --to=si)B"
}

case "${1:-}" in
    '') ;;
    --force) force=yes ;;
    *) die 2 "unknown argument '$1'; the only one is --force" ;;
esac
if { [ "${force:-}" = yes ] || ! is_current bookworm || ! is_current trixie; } && ! registry_answers bookworm; then
    require_debootstrap
fi
make_base bookworm & first=$!
make_base trixie & second=$!
status=0
wait "$first" || status=$?
wait "$second" || status=$?
exit "$status"
