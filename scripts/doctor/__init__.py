"""``python -m scripts.doctor``: every precondition of a run on this machine, a line each, in seconds.

``machine``, ``images``, ``data`` and ``pitfalls`` look at what is there, ``policy`` asks the running policy, and
``report`` puts them in order. Nothing is changed. ``scripts.run`` requires the part that a start needs.
"""
