"""A small slice of `benchmarks/survival.py`: workers killed under load, and every request ends right or with a clean error."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "survival.py"


@pytest.mark.model
@pytest.mark.timeout(240)
def test_workers_killed_under_load_cost_nobody_an_answer(default_model: Path) -> None:
    options = ["--requests", "40", "--concurrency", "10", "--kills", "1", "--kill-every", "3"]
    ran = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "killed: {'decode-0': 1, 'prefill-0': 1}" in ran.stdout, ran.stdout
