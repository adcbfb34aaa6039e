"""Kills every part of a running stack in every phase of a step, and keeps the books on what came of it.

The stack is the real one of ``make smoke``; nothing in it knows that it is tested.
"""
