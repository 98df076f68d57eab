"""What must stand nowhere in the source: anything that turns bytes from the network, or from a file, into code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import twinpool

SOURCE = Path(twinpool.__file__).parent
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "torch"}
CALLS = {"eval", "exec", "compile", "__import__"}


def unsafe(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").partition(".")[0] in MODULES:
                yield node.module or ""
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in CALLS:
                yield called.id
            for keyword in node.keywords:
                if keyword.arg == "allow_pickle" and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                ):
                    yield "allow_pickle"
                if keyword.arg == "shell" and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False):
                    yield "shell"


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_that_comes_in_can_become_code(path: Path) -> None:
    assert list(unsafe(ast.parse(path.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import torch",
        "import yaml; yaml.load(x)",
        "import os, marshal",
        "eval(x)",
        "__import__('pickle')",
        "np.load(x, allow_pickle=True)",
        "np.load(x, allow_pickle=y)",
        "subprocess.run(x, shell=True)",
    ],
)
def test_the_gate_sees_what_it_is_for(code: str) -> None:
    assert list(unsafe(ast.parse(code)))
