"""A whole run in one container: what Compose does on a host, supervisord does here, with the same commands.

``__main__`` is the container's own process. It prepares what the run needs, starts supervisord, and conducts: it says
when each program starts, as ``depends_on`` does in compose.yaml, and ends with the trainer's exit code.
"""
