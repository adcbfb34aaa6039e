"""The end of the agent's phase where a sandbox can be reached by commands alone: nothing of the agent's goes on.

Our docker sandbox does it from outside; a Job and Harbor's other environments have no restart.
"""

from __future__ import annotations

import shlex

from harbor.environments.base import BaseEnvironment

from services.env.sandbox import MAX_LOG_FILE_BYTES, MAX_LOG_FOLDER_BYTES, SandboxLostError

LIMIT_S = 60

SCRIPT = """
for try in $(seq 50); do
  left=
  for process in /proc/[0-9]*; do
    [ "$(stat -c %u "$process" 2> /dev/null)" = {uid} ] || continue
    kill -9 "${{process#/proc/}}"
    # Dead, and its parent does not ask: nothing runs. A dead first thread may have living others.
    set -- "$process"/task/*
    [ $# -gt 1 ] || ! grep -q '^State:.Z' "$process/status" || continue
    left=yes
  done 2> /dev/null
  [ "$left" ] || break
done
[ -z "$left" ] || {{ echo "processes of user {uid} outlive every kill"; exit 1; }}
set -e -o pipefail
[ ! -e /logs/verifier ] || find /logs/verifier -mindepth 1 -delete
# OpenCode's database and caches: not for them a log goes.
rm -rf /logs/agent/opencode
for folder in /logs/agent /logs/artifacts; do
  [ -e "$folder" ] || continue
  find "$folder" ! -type d ! -type f -delete
  find "$folder" -type f -size +{max_file_bytes}c -delete
  find "$folder" -type f -printf '%s %p\\0' | sort -zn | {{
    room={max_folder_bytes}
    while IFS= read -r -d '' line; do
      room=$((room - ${{line%% *}}))
      [ "$room" -ge 0 ] || rm -f -- "${{line#* }}"
    done
  }}
done
"""
"""Ends every process of the agent's user, removes rewards that were written ahead of the verifier, and leaves no more
of the agent's folders than ``sandbox.make_plain`` does: Harbor reads a folder as one archive into memory."""


async def end(environment: BaseEnvironment, uid: int) -> None:
    """Leave nothing of the agent running, and no reward, before anything is graded.

    Args: uid: of the agent's user.
    Raises: SandboxLostError: it cannot be done; nothing that the agent could touch is graded.
    """
    script = SCRIPT.format(uid=uid, max_file_bytes=MAX_LOG_FILE_BYTES, max_folder_bytes=MAX_LOG_FOLDER_BYTES)
    result = await environment.exec(f"exec bash -c {shlex.quote(script)}", cwd="/", user="root", timeout_sec=LIMIT_S)
    if result.return_code != 0:
        output = ((result.stdout or "") + (result.stderr or "")).strip()[-300:]
        raise SandboxLostError(
            f"the agent's phase could not be ended (exit code {result.return_code}): {output or 'no output'}"
        )
