"""Who may import whom. Read from the source, so that what is imported inside a function counts too."""

from __future__ import annotations

import ast
import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOR_ALL = {"common", "run", "hub"}
ALSO = {"trainer": {"weight_sync"}, "policy": {"weight_sync"}}
"""Beside ``FOR_ALL``."""
LOWER: dict[str, set[str]] = {"common": set(), "run": {"common"}, "hub": {"common", "run"}}
"""Those of ``FOR_ALL`` themselves import only what is below them."""
LIBRARIES = {"pydantic"}
ALSO_LIBRARIES = {"services.common.metrics": {"prometheus_client"}}


def sources(folder: str) -> dict[str, ast.Module]:
    """Module name -> its syntax tree."""
    found = {}
    for path in (ROOT / folder).rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports(tree: ast.Module) -> set[str]:
    """Dotted names that a module imports; of ``from a import b`` both ``a`` and ``a.b``, which may be a module."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "relative imports are not used here"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def texts(tree: ast.Module) -> set[str]:
    """Every string of a module but its docstrings."""
    nodes = list(ast.walk(tree))
    told = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in told}


SERVICES = sources("services")


def test_a_service_imports_itself_what_is_for_all_and_what_is_listed() -> None:
    found = set()
    for module, tree in SERVICES.items():
        own = module.split(".")[1] if "." in module else ""
        allowed = {own} | LOWER.get(own, FOR_ALL | ALSO.get(own, set()))
        for name in imports(tree):
            room = name.split(".")
            if room[0] in ("scripts", "tests") or (room[0] == "services" and set(room[1:2]) - allowed):
                found.add(f"{module} imports {name}")
    assert found == set()


def test_a_service_runs_no_script_and_no_test() -> None:
    """A module's name in a command, such as ``-m scripts.run``, is an import too."""
    found = {f"{module}: {text}" for module, tree in SERVICES.items() for text in texts(tree)}
    assert {line for line in found if line.partition(": ")[2].startswith(("scripts.", "scripts/", "tests."))} == set()


def test_common_imports_the_standard_library_and_pydantic_only() -> None:
    for module, tree in SERVICES.items():
        if module.startswith("services.common"):
            packages = {name.split(".")[0] for name in imports(tree)} - {"services"} - sys.stdlib_module_names
            assert packages <= LIBRARIES | ALSO_LIBRARIES.get(module, set()), module


def test_no_script_imports_a_test() -> None:
    assert {name for tree in sources("scripts").values() for name in imports(tree) if name.startswith("tests")} == set()


def test_no_module_imports_itself_through_others() -> None:
    graph = {module: (imports(tree) & SERVICES.keys()) - {module} for module, tree in SERVICES.items()}
    # `from services.x import y` names the package too; what is imported then is the module.
    packages = {module for module in graph if any(other.startswith(f"{module}.") for other in graph)}
    try:
        TopologicalSorter({module: names - packages for module, names in graph.items()}).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_each_service_has_a_readme_of_one_form_that_names_all_of_its_files() -> None:
    for folder in sorted(path.parent for path in (ROOT / "services").glob("*/__init__.py")):
        text = (folder / "README.md").read_text(encoding="utf-8")
        for part in (f"# {folder.name}\n", "Files, in reading order", "**Promises.**"):
            assert part in text, f"services/{folder.name}/README.md lacks {part!r}"
        modules = {path.stem for path in folder.rglob("*.py")} - {"__init__", "__main__"}
        unnamed = {name for name in modules if f"`{name}`" not in text}
        assert unnamed == set(), f"services/{folder.name}/README.md does not say what these are for"


def test_every_test_and_file_that_docs_upstream_names_is_there() -> None:
    text = (ROOT / "docs/upstream.md").read_text(encoding="utf-8")
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert {name for name in re.findall(r"`(test_\w+)`", text) if f"def {name}(" not in tests} == set()
    roots = (ROOT, ROOT / "services", ROOT / "tests/contract")
    files = re.findall(r"`(\w+/[\w/]+\.py)`", text)
    assert {name for name in files if not any((root / name).is_file() for root in roots)} == set()
