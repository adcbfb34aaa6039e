"""Weight sync: LoRA factors travel, the merge happens where the weights are served.

The trainer (``client``) sends A and B of every target in one packed buffer. The engine inside vLLM keeps the
pristine base W0 of the targets and serves ``merge.merged(W0, A, B, scale)``; nothing else of the model ever
changes. So the base cannot drift, the served weights are a function of the adapter alone, and both ends can
prove what they hold (``checksum``).

Nothing is imported here: ``engine`` and ``worker`` need vLLM, ``client`` needs TRL's process, ``adapter``
neither.
"""
