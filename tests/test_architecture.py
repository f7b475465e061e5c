"""Holds the shape of the code: layer order, no import cycles, packaging that matches the folders."""

from __future__ import annotations

import ast
import configparser
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"tfdist": ROOT / "tfdist", "tfdist.callbacks": ROOT / "callbacks"}

# A module imports only from lower layers. Members of one layer don't import each other; files of one folder
# import each other only without cycles.
LAYERS: list[set[str]] = [
    {"tfdist", "errors", "checkpoint", "resources"},
    {"cluster", "cost", "keras_compat"},
    {"collectives", "control"},
    {"world"},
    {"process_sets", "compression", "graph_watch", "joint_step", "callback_roles"},
    {"operations"},
    {"gradients", "joining", "metric_merging", "variables", "data", "accumulation", "layers"},
    {"strategies", "reduction_arguments", "prediction_shares"},
    {"optimizer", "tape"},
    {"fit_session", "inference", "asynchronous"},
    {"fit_hook"},
    {"placed_session", "last_windows"},
    {"placed_hook"},
    {"runtime", "callbacks", "pipeline"},
    {"launch"},
    {"bench"},
    {"doctor"},
    {"cli"},
    {"__main__"},
]
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}


def modules() -> dict[str, Path]:
    found = {}
    for package, folder in PACKAGES.items():
        for path in folder.rglob("*.py"):
            parts = list(path.relative_to(folder).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            found[".".join([package, *parts])] = path
    return found


MODULES = modules()


def imports_of(module: str, *, top_level_only: bool) -> set[str]:
    """Modules of tfdist that `module` imports, without those for type checking alone."""
    tree = ast.parse(MODULES[module].read_text())
    found: set[str] = set()

    def visit(node: ast.AST, top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                if not top_level_only:
                    visit(child, False)
                continue
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{module}: write imports in full"
                for alias in child.names:
                    full = f"{child.module}.{alias.name}"
                    found.add(full if full in MODULES else str(child.module))
            visit(child, top)

    visit(tree, True)
    return {name for name in found if name in MODULES and name != module}


def component(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_only_lower_layers(module: str) -> None:
    own = component(module)
    assert own in LAYER_OF, f"{module} belongs to no layer: name it in LAYERS"
    for imported in imports_of(module, top_level_only=False) - {"tfdist"}:
        other = component(imported)
        if other != own:
            assert LAYER_OF[other] < LAYER_OF[own], f"{module} (layer {LAYER_OF[own]}) imports {imported}"


def test_no_import_cycle() -> None:
    graph = {module: imports_of(module, top_level_only=True) for module in MODULES}
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for imported in graph[module]:
                walk(imported, (*path, module))
            done.add(module)

    for module in graph:
        walk(module, ())


def test_no_bare_import_of_callbacks() -> None:
    for path in [*ROOT.glob("tfdist/**/*.py"), *ROOT.glob("callbacks/**/*.py"), *ROOT.glob("tests/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not any(name.split(".")[0] == "callbacks" for name in names), path


def test_listed_packages_match_folders() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    folders = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert listed == folders


def test_every_public_name_resolves() -> None:
    import tfdist

    for name in tfdist.__all__:
        assert getattr(tfdist, name) is not None


def test_import_starts_nothing() -> None:
    code = (
        "import json, sys, threading, os\n"
        "before = dict(os.environ)\n"
        "import tfdist, tfdist.cli, tfdist.cluster\n"
        "print(json.dumps({'heavy': [m for m in ('tensorflow', 'keras', 'numpy', 'horovod') if m in sys.modules],\n"
        "  'threads': threading.active_count(), 'env': dict(os.environ) == before}))\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    )
    assert json.loads(output.stdout) == {"heavy": [], "threads": 1, "env": True}


def test_import_leaves_keras_alone() -> None:
    code = (
        "import keras\n"
        "def methods():\n"
        "    model, scale = keras.Model, keras.optimizers.LossScaleOptimizer\n"
        "    return model.make_train_function, model.train_step, scale.apply\n"
        "before = methods()\n"
        "import tfdist, tfdist.optimizer, tfdist.runtime, tfdist.keras_compat\n"
        "assert methods() == before\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
