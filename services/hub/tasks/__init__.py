"""Pinned task suites on disk: ``fetch`` what is pinned, ``verify`` every hash, ``materialise`` for a run."""
