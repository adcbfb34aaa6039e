"""What every service shares: recipe, run directory, errors, logs, heartbeats, signals.

Standard library and pydantic only, so that the smallest service starts in a fraction of a second.
"""
