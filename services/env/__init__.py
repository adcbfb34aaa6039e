"""OpenEnv's Harbor server with OpenCode in docker sandboxes, and the capture proxy that they talk to.

Comes in: ``run_rollout`` calls of trainer and evaluator, model calls of the sandboxes. Goes out: rewards with the
exact tokens of every turn, ``runs/<run>/trials``, the ledger of sandboxes. It exists to keep the Docker socket, the
sandboxes' network and everything that a hostile sandbox can reach in one process.
"""
