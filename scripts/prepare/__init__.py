"""The parts of ``scripts.prepare_tasks``: Hub access, selection, materialising, verifying."""
