"""``python -m scripts.traces``: list and read the rollouts of a run, in the terminal and as one HTML file.

What an agent wrote is hostile: ``text`` makes control characters visible, ``html`` escapes, and the page's own policy
lets a browser run and load nothing else.
"""
