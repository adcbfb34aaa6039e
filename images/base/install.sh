#!/bin/sh
# uv pip install, for `RUN` lines: into $VIRTUAL_ENV, which is made if need be, with the host's CA bundle (build
# secret `ca`), its wheel folder (build context `wheelhouse`) and a further index (EXTRA_INDEX) where they are given.
set -eu
here=$(dirname "$0")
export UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never
if [ -s /run/secrets/ca ]; then export SSL_CERT_FILE=/run/secrets/ca; fi
if [ -d /run/wheelhouse ]; then export UV_FIND_LINKS=/run/wheelhouse; fi
# Hashes are required, so it does not matter which of the indexes a file comes from.
if [ -n "${EXTRA_INDEX:-}" ]; then export UV_INDEX="$EXTRA_INDEX" UV_INDEX_STRATEGY=unsafe-best-match; fi
[ -d "$VIRTUAL_ENV" ] || "$here/uv" venv --quiet --python /usr/bin/python3 "$VIRTUAL_ENV"
# A lock is complete as it is, and leaves out on purpose what a package asks for in vain.
exec "$here/uv" pip install --no-deps "$@"
