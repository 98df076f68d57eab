"""Hundreds of requests over six workers with everything that goes wrong, the same for the same seed."""

import random
from collections.abc import Sequence

from tests.core.stage import Stage, prompt, worker

from twinpool.config import Routing
from twinpool.core.model import Dialect, Failure, Leg, Role

NAMES = ("c1", "d1", "d2", "p1", "p2", "p3")


def busy_afternoon(seed: int = 7, *, requests: int = 300, joins: Sequence[str] = NAMES, rules: Routing | None = None) -> Stage:
    """`joins` is the order in which the workers come. p3 speaks a dialect that no other does."""
    chance = random.Random(seed)
    stage = Stage(*(worker(n, slots=3, dialect=Dialect.SGLANG if n == "p3" else Dialect.NIXL) for n in joins), rules=rules)
    for n in range(requests):
        whose = {"tenant": chance.choice(["", "a", "b"]), "priority": chance.choice([0, 0, 0, 2])}
        stage.arrives(f"r{n}", prompt(chance.choice([50, 900, 4000]), **whose))
        for step in range(4):
            stage.waits(chance.random() / 4)
            _one_thing(stage, chance, f"r{chance.randint(max(0, n - 12), n)}", f"{n}.{step}")
    return stage


def _one_thing(stage: Stage, chance: random.Random, request: str, incarnation: str) -> None:
    name = chance.choice(NAMES)
    match chance.randint(0, 20):
        case 0 | 1 | 2 | 3 | 4 | 5:
            stage.prefilled(request, tokens=700)
        case 6 | 7 | 8:
            stage.first_token(request)
        case 9 | 10 | 11 | 12:
            stage.finishes(request)
        case 13:
            stage.leaves(request)
        case 14 | 15:
            stage.fails(request, chance.choice(list(Leg)), chance.choice(list(Failure)), retry_after_s=0.5)
        case 16:
            stage.released(request, freed=chance.random() < 0.5)
        case 17 | 18:
            stage.returns(name)
        case 19:
            stage.restarts(name, incarnation=incarnation)
        case 20:
            stage.asks(name, chance.choice(list(Role)))
