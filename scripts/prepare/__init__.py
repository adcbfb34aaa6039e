"""How ``scripts.prepare_tasks pin`` chooses tasks; what a Job needs too is in ``services.hub.tasks``."""
