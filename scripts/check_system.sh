#!/usr/bin/env bash
# Is this a system that the project supports: Linux on x86-64? One line if not.
# Exit codes: 0 yes; 5 no.
set -eu
found="$(uname -s) on $(uname -m)"
case $found in
    "Linux on x86_64") ;;
    *)
        echo "check_system: found $found; only Linux on x86_64 is supported (WSL2 on such a machine is Linux)" >&2
        exit 5
        ;;
esac
