#!/bin/sh
# Always leaves a valid reward: 0 unless the grader prints 1. What an agent may have put in its place goes first.
# -I and -S: Python takes no module from the agent's folders, its environment or site-packages.
cd / && rm -rf /logs/verifier/reward.txt /logs/verifier/reward.json
reward=$(timeout 30 python3 -IS /tests/grader.py) || reward=0
[ "$reward" = 1 ] || reward=0
printf '%s\n' "$reward" > /logs/verifier/reward.txt
exit 0
