"""Import every module of services/ that an image holds: a broken image fails while it is built, not on a rented GPU.

``check_imports.py [PACKAGE]``: of one package only, where an image has several environments.
"""

import importlib
import pkgutil
import sys

package = importlib.import_module(sys.argv[1] if sys.argv[1:] else "services")

for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
    if not module.name.endswith(".__main__"):
        importlib.import_module(module.name)
