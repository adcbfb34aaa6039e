import os

# Before TRL is imported: its async trainer is marked experimental, and test_trl_seams.py pins what we use of it.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
