"""Same events, same commands: in another order of joining, in another process, with another hash seed."""

import hashlib
import os
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import pytest
from tests.core.afternoon import NAMES, busy_afternoon
from tests.core.stage import Stage

from twinpool.assemble import build_controller
from twinpool.config import Routing
from twinpool.core.journal import encode_step


def fingerprint(stage: Stage) -> str:
    digest = hashlib.sha256()
    for event, commands in zip(stage.events[len(NAMES) :], stage.commands[len(NAMES) :], strict=True):
        digest.update(encode_step(event, commands))
    return digest.hexdigest()


def test_a_fresh_controller_repeats_every_command() -> None:
    stage = busy_afternoon(requests=500)
    again = build_controller(Routing())
    assert [again.handle(event) for event in stage.events] == stage.commands
    assert again.next_wakeup() == stage.controller.next_wakeup()


def test_another_seed_is_another_afternoon() -> None:
    assert fingerprint(busy_afternoon(1, requests=50)) != fingerprint(busy_afternoon(2, requests=50))


def test_the_order_of_joining_does_not_matter() -> None:
    orders = list(permutations(NAMES))[::97]
    assert len({fingerprint(busy_afternoon(requests=50, joins=order)) for order in orders}) == 1


@pytest.mark.parametrize("hash_seed", ["0", "1", "4242"])
def test_the_hash_seed_does_not_matter(hash_seed: str) -> None:
    program = (
        "from tests.core.afternoon import busy_afternoon\n"
        "from tests.core.test_determinism import fingerprint\n"
        "print(fingerprint(busy_afternoon()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == fingerprint(busy_afternoon())
