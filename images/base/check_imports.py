"""Import every module of services/ that an image holds: a broken image fails while it is built, not on a rented GPU."""

import importlib
import pkgutil

import services

for module in pkgutil.walk_packages(services.__path__, "services."):
    if not module.name.endswith(".__main__"):
        importlib.import_module(module.name)
