"""Who gets in."""

import pytest
from tests.core.stage import prompt

from twinpool.config import Routing
from twinpool.core.decisions import Why
from twinpool.core.policies import Entrance
from twinpool.policy.admission import bounded_queue


@pytest.mark.parametrize(
    ("waiting", "is_draining", "answer"),
    [
        (0, False, None),
        (3, False, None),
        (4, False, Why.QUEUE_FULL),
        (5, False, Why.QUEUE_FULL),
        (0, True, Why.DRAINING),
        (9, True, Why.DRAINING),
    ],
)
def test_admission(waiting: int, is_draining: bool, answer: Why | None) -> None:
    assert bounded_queue(Routing(max_waiting=4))(prompt(), Entrance(waiting, is_draining)) is answer
