"""There is one way to a controller, and one set of policies: the gateway, the simulator and a replay all have them from
`assemble`, and the import contracts leave them no other."""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import twinpool
from twinpool import assemble
from twinpool.gateway import app
from twinpool.sim import run

SOURCE = Path(twinpool.__file__).parent
PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def made(tree: ast.AST) -> Iterator[str]:
    """Controllers and sets of policies that this code makes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("Controller", "Policies"):
                yield called


def test_gateway_and_simulator_build_by_the_same_call() -> None:
    assert app.build_controller is run.build_controller is assemble.build_controller


def test_nobody_else_makes_a_controller_or_its_policies() -> None:
    found = {
        str(path.relative_to(SOURCE)): sorted(names)
        for path in SOURCE.rglob("*.py")
        if (names := list(made(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert found == {"assemble.py": ["Controller", "Policies"]}


def contracts(folder: Path) -> subprocess.CompletedProcess[str]:
    """What import-linter says of the source in that folder, by this project's contracts."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--config", str(PROJECT), "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "500"}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)


@pytest.mark.parametrize(
    ("module", "imports", "broken"),
    [
        ("gateway/driver.py", "twinpool.policy.routing", "The gateway decides nothing either"),
        ("sim/driver.py", "twinpool.policy.routing", "The simulator runs in virtual time, and decides nothing"),
        ("sim/driver.py", "twinpool.gateway.driver", "The simulator runs in virtual time, and decides nothing"),
        ("policy/costs.py", "twinpool.sim.cost", "A policy guesses"),
    ],
)
def test_a_second_policy_breaks_a_contract(module: str, imports: str, broken: str, tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "twinpool", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "twinpool" / module).open("a", encoding="utf-8") as source:
        source.write(f"import {imports}\n")
    said = contracts(tmp_path)
    verdicts = [line for line in said.stdout.splitlines() if line.startswith(broken)]
    assert said.returncode == 1, said.stdout + said.stderr
    assert any("BROKEN" in line for line in verdicts), said.stdout


def test_as_it_stands_every_contract_is_kept() -> None:
    said = contracts(SOURCE.parent)
    assert said.returncode == 0, said.stdout + said.stderr
