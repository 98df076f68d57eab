"""What a person is told to do about an engine that is attached as it is."""

import msgspec
import pytest
from tests.core.stage import worker

from twinpool.engines.advice import advice

KNOWN = msgspec.structs.replace(worker("d1", lease_s=30.0), kind="vllm", budget_tokens=2048, has_metrics=True)


def test_of_a_vllm_that_is_declared_there_is_nothing_to_say() -> None:
    assert advice(KNOWN) == ()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"budget_tokens": None}, "declare budget_tokens"),
        ({"budget_tokens": 8192}, "set --max-num-batched-tokens 4096 or less"),
        ({"lease_s": None}, "declare lease_s"),
        ({"has_metrics": False}, "--disable-log-stats"),
    ],
)
def test_what_is_missing_is_named(changes: dict[str, object], said: str) -> None:
    (line,) = advice(msgspec.structs.replace(KNOWN, **changes))
    assert said in line


@pytest.mark.parametrize("changes", [{"kind": "embedded"}, {"kind": "llama.cpp"}])
def test_who_tells_everything_needs_no_advice(changes: dict[str, object]) -> None:
    assert advice(msgspec.structs.replace(KNOWN, budget_tokens=None, lease_s=None, **changes)) == ()


def test_who_hands_nothing_over_needs_no_lease() -> None:
    assert advice(msgspec.structs.replace(KNOWN, dialect=None, lease_s=None, has_metrics=False)) == ()
