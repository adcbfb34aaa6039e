"""Tells slow from stalled, and stops a run that is stalled, with a reason and a bundle of evidence.

Comes in: heartbeats, metrics and health of all services. Goes out: ``stop.json``, which the trainer's supervisor
obeys, and ``incidents/<time>/``. It holds no Docker socket and kills nothing itself.
"""
