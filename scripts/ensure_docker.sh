#!/usr/bin/env bash
# Make sure that `docker`, `docker compose` (>= 2.24) and `docker buildx` work on this machine.
#
# A running engine is used as it is. Without one, as root on Debian or Ubuntu, the distribution's packages are
# installed and a daemon is started, detached, so that it outlives this shell; the next call finds it again, or
# starts it again if it has died. Debian 12's own packages are too old (Compose 1.29), so there the next release's
# are unpacked into one folder beside Debian 12's runc and iptables; nothing installed is replaced.
#
# Exit codes: 0 the engine answers; 1 it was started and does not answer; 3 something must be installed or allowed by
# hand; 5 this system is not supported: not Linux on x86-64, rootless Docker, Podman.
set -euo pipefail
"$(dirname "${BASH_SOURCE[0]}")/check_system.sh"

readonly MIN_COMPOSE=2.24
readonly NEWER_SUITE=trixie                            # unpacked on bookworm
readonly PREFIX=/usr/local/lib/opencode-rl-docker      # delete this folder and the links into it to uninstall
readonly PLUGINS=/usr/local/lib/docker/cli-plugins     # read by every docker client, whatever installed it
readonly LOG=/var/log/opencode-rl-dockerd.log
readonly PIDFILE=/run/opencode-rl-dockerd.pid
readonly START_TIMEOUT_S=60

say() { printf 'ensure_docker: %s\n' "$*"; }
die() { local code=$1; shift; printf 'ensure_docker: %s\n' "$*" >&2; exit "$code"; }

engine_answers() { timeout 20 docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }

# env mounts the engine's socket and the checkout's folders under the paths that they have here, as root.
require_supported_engine() {
    local kind
    kind=$(timeout 20 docker version --format '{{.Server.Platform.Name}}{{range .Server.Components}} {{.Name}}{{end}}')
    kind+=" $(timeout 20 docker info --format '{{.SecurityOptions}}')"
    case $kind in
        *[Pp]odman*) die 5 "the engine that answers is Podman, which is not supported: use Docker Engine." ;;
        *name=rootless*) die 5 "the engine that answers is rootless, which is not supported: use one that root runs" \
            "(docker context use default; unset DOCKER_HOST)." ;;
    esac
}

has_compose() {
    local version
    version=$(docker compose version --short 2>/dev/null) || return 1
    printf '%s\n%s\n' "$MIN_COMPOSE" "${version#v}" | sort --version-sort --check=silent
}

has_buildx() { docker buildx version >/dev/null 2>&1; }

find_daemon() { PATH="$PREFIX/usr/sbin:$PATH" command -v dockerd; }

require_installable() {
    # shellcheck source=/dev/null
    [ -r /etc/os-release ] && . /etc/os-release
    local wanted="a Docker engine, its Compose plugin >= $MIN_COMPOSE and its buildx plugin" socket=/var/run/docker.sock
    [ -z "${DOCKER_HOST:-}" ] || engine_answers ||
        die 3 "no engine answers at DOCKER_HOST=$DOCKER_HOST: start it, or unset DOCKER_HOST to use a local one."
    { [ ! -S $socket ] || [ -w $socket ]; } ||
        die 3 "there may be an engine, but $(id -un) may not use $socket: as root, 'usermod --append --groups docker" \
            "$(id -un)', then log in again (the socket's group is $(stat -c %G $socket); where that is root, restart" \
            "the engine after 'groupadd --system docker')."
    [ "$(id -u)" = 0 ] ||
        die 3 "needs $wanted, and only root can install and start them. As root: 'scripts/ensure_docker.sh' on Debian" \
            "or Ubuntu, elsewhere by hand; then 'usermod --append --groups docker $(id -un)', and log in again."
    case "${ID:-unknown}" in
        debian | ubuntu) ;;
        *) die 3 "needs $wanted. Found '${ID:-unknown}', where this script cannot install them: please do." ;;
    esac
}

install_packages() {
    # shellcheck source=/dev/null
    . /etc/os-release
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq || say "apt-get update failed; going on with the package lists that are there"
    if [ "${VERSION_CODENAME:-}" = bookworm ]; then
        apt-get install -qq -y --no-install-recommends runc iptables tini ca-certificates >/dev/null
        unpack_newer_packages
    elif [ "$ID" = ubuntu ]; then
        apt-get install -qq -y docker.io docker-compose-v2 docker-buildx >/dev/null
    else
        apt-get install -qq -y docker.io docker-cli docker-compose docker-buildx >/dev/null
    fi
}

# Downloads through apt itself, so that signatures are checked and the host's own mirror and proxy are used.
unpack_newer_packages() {
    local work mirror apt_options
    # The format string is apt's, not the shell's.
    # shellcheck disable=SC2016
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Release: bookworm' | head -n 1)
    [ -n "$mirror" ] || die 3 "apt has no source for 'bookworm', so $NEWER_SUITE's Docker packages cannot be found."
    work=$(mktemp -d)
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $NEWER_SUITE main" \
        >"$work/sources.list"
    apt_options=(-qq -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=/dev/null
        -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root)
    say "unpacking $NEWER_SUITE's engine into $PREFIX"
    apt-get "${apt_options[@]}" update
    (cd "$work" && apt-get "${apt_options[@]}" download docker.io docker-cli docker-compose docker-buildx containerd)
    local deb
    for deb in "$work"/*.deb; do dpkg-deb --extract "$deb" "$PREFIX"; done
    ln -sf /usr/bin/tini-static "$PREFIX/usr/bin/docker-init"
    rm -rf "$work"
    link_commands
}

# Links only where nothing stands yet: a client that is already there works with this engine too.
link_commands() {
    mkdir -p "$PLUGINS"
    has_compose || ln -sfn "$PREFIX/usr/libexec/docker/cli-plugins/docker-compose" "$PLUGINS/docker-compose"
    has_buildx || ln -sfn "$PREFIX/usr/libexec/docker/cli-plugins/docker-buildx" "$PLUGINS/docker-buildx"
    command -v docker >/dev/null || ln -s "$PREFIX/usr/bin/docker" /usr/local/bin/docker
}

start_daemon() {
    local dockerd config=()
    if [ -d /run/systemd/system ] && systemctl cat docker.service >/dev/null 2>&1; then
        say "starting docker.service"
        systemctl start docker
        return
    fi
    dockerd=$(find_daemon) || die 3 "dockerd is not on this machine although its packages were installed."
    if [ ! -e /etc/docker/daemon.json ]; then
        # One /24 a network: Docker's own default pools run out after 31 networks.
        mkdir -p "$PREFIX"
        echo '{"default-address-pools": [{"base": "10.210.0.0/16", "size": 24}]}' >"$PREFIX/daemon.json"
        config=(--config-file "$PREFIX/daemon.json")
    fi
    # Its packages' own script, which the unpacked ones did not run: who is in this group may use the engine.
    getent group docker >/dev/null || groupadd --system docker
    say "starting $dockerd, detached; it logs to $LOG"
    PATH="$PREFIX/usr/sbin:$PREFIX/usr/bin:$PATH:/usr/sbin:/sbin" \
        setsid nohup "$dockerd" --pidfile "$PIDFILE" "${config[@]}" </dev/null >>"$LOG" 2>&1 &
}

wait_for_engine() {
    local deadline=$((SECONDS + START_TIMEOUT_S))
    until engine_answers; do
        [ "$SECONDS" -lt "$deadline" ] ||
            die 1 "the engine did not answer within $START_TIMEOUT_S s. Last lines of $LOG:
$(tail -n 15 "$LOG" 2>/dev/null)"
        sleep 0.5
    done
}

if engine_answers; then require_supported_engine; fi
if engine_answers && has_compose && has_buildx; then
    state="was running"
else
    require_installable
    if ! { command -v docker && find_daemon && has_compose && has_buildx; } >/dev/null; then install_packages; fi
    hash -r
    engine_answers || start_daemon
    wait_for_engine
    { has_compose && has_buildx; } ||
        die 3 "the engine answers, but 'docker compose' >= $MIN_COMPOSE or 'docker buildx' is missing: install them."
    state="is running"
fi
say "engine $(docker version --format '{{.Server.Version}}') $state," \
    "compose $(docker compose version --short), $(docker buildx version | cut -d' ' -f1,2)"
