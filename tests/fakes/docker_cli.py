#!/usr/bin/env python3
"""FAKE of the docker CLI for tests without an engine: put as ``docker`` in a folder of PATH.

Containers and networks are in ``$FAKE_DOCKER``, a JSON file: {"container": {id: {label: value}}, "network": {...}}.
Knows ``ls`` with one label filter and ``rm``, and writes every call to ``$FAKE_DOCKER.calls``.
"""

import json
import os
import sys
from pathlib import Path

state = Path(os.environ["FAKE_DOCKER"])
with Path(f"{state}.calls").open("a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\n")
things = json.loads(state.read_text())
kind, verb, *rest = sys.argv[1:]
if verb == "ls":
    name, value = rest[-1].removeprefix("label=").split("=")
    print(*(identifier for identifier, labels in things[kind].items() if labels.get(name) == value), sep="\n")
elif verb == "rm":
    for identifier in (argument for argument in rest if not argument.startswith("--")):
        if identifier not in things[kind]:
            sys.exit(f"Error response from daemon: No such {kind}: {identifier}")
        del things[kind][identifier]
    state.write_text(json.dumps(things))
else:
    sys.exit(f"the fake does not know {verb}")
