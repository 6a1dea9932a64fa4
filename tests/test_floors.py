"""A module imports from floors below its own, or from its own floor without cycles."""
import ast
import pathlib

import gpuaccel

ROOT = pathlib.Path(gpuaccel.__file__).parent
FLOORS = [
    ["errors", "backend"], ["source", "nvrtc", "simt", "kernel"], ["arena"],
    ["fused_linear", "accumulate", "clip", "adamw", "optimizer", "segments", "encoder", "embedding", "richards", "poly_attention"],
    ["meter", "ledger", "timeline", "exchange", "tape", "capture", "graphs", "rendezvous", "distributed", "sharded", "early", "peers", "ranks"], ["models", "data", "micro", "checkpoint", "lora", "step", "train", "launch"],
    ["picture", "figures", "diagrams", "token_figures", "layer_figures", "rank_figures", "panels", "recorded", "show", "puzzles", "encoder_puzzles",
     "layer_puzzles", "rank_puzzles", "exercises", "widgets", "magics", "cli"]]
FLOOR = {name: i for i, names in enumerate(FLOORS) for name in names}


def imports(path):
    """Names of the package's own modules that a file imports, wherever it does so."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield from [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]


def test_no_module_imports_upward_or_in_a_circle():
    found = {path.stem: set(imports(path)) - {"__version__"} for path in ROOT.glob("*.py") if not path.stem.startswith("__")}
    assert found.keys() | {"simt"} == FLOOR.keys(), "a module is missing from this test's list of floors, or gone"
    upward = [(name, other) for name, others in found.items() for other in others if FLOOR[other] > FLOOR[name]]
    assert not upward, f"imports from a higher floor: {upward}"
    done = set()
    while todo := [name for name in found if name not in done]:
        free = [name for name in todo if found[name] - {name, "simt"} <= done]
        assert free, f"a circle of imports among {todo}"
        done.update(free)
