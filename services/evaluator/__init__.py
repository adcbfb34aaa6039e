"""Held-out evaluation: base and adapters, paired, on ``policy-eval``.

Comes in: complete checkpoints of a run, the held-out suite, the recipe. Goes out: ``runs/<run>/eval/``: one line a
cell, results a checkpoint, the learning curve. Sampling and output cap are the training's own.
"""
