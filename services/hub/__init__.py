"""The one client of the Hugging Face Hub: every request has a bound, failures that pass are waited out, the others are
one message each. Trainer, evaluator and scripts share it as they share ``services.common``.

``client`` connects; ``files`` lists and checks; ``adapters`` finds and fetches checkpoints; ``datasets`` and ``tasks``
fetch tasks; ``commits`` writes; ``pushes`` mirrors a run. ``python -m services.hub`` does it from the command line.
"""
