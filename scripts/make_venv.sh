#!/usr/bin/env bash
# Make the virtual environment that every script runs in, from the locked requirements.
#
# Usage: make_venv.sh FOLDER    Environment: PYTHON, default python3
# Exit codes: 0 it is there; 1 pip failed; 3 something must be installed by hand; 5 this system is not supported.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly FOLDER=$1 PYTHON=${PYTHON:-python3}
die() { local code=$1; shift; printf 'make_venv: %s\n' "$*" >&2; exit "$code"; }

scripts/check_system.sh
command -v "$PYTHON" >/dev/null || die 3 "'$PYTHON' is not on this machine; Python 3.11 or newer is needed."
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die 3 "found $("$PYTHON" --version 2>&1); 3.11 or newer is needed. Where one is installed: make PYTHON=python3.12"
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
    die 3 "$PYTHON has no venv module; on Debian and Ubuntu: apt install" \
        "$("$PYTHON" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
"$PYTHON" -m venv "$FOLDER"
"$FOLDER/bin/pip" install --quiet --require-hashes --requirement tests/requirements.txt
touch "$FOLDER/ready"
