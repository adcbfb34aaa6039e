#!/usr/bin/env bash
# Make sure that a Chromium is there for the tests of HTML pages; on Debian, as root, its package is installed.
set -euo pipefail

if command -v chromium >/dev/null; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "ensure_chromium: no chromium on PATH; install your system's package of it" >&2
    exit 3
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core >/dev/null
chromium --version
