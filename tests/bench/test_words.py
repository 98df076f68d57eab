import pytest

from twinpool.bench.words import rate


@pytest.mark.parametrize(
    ("value", "said"),
    [(None, "-"), (0.0, "0 x/s"), (0.0886, "0.0886 x/s"), (12.345, "12.3 x/s"), (999.4, "999 x/s"), (1099.9, "1,100 x/s")],
)
def test_a_rate_is_written_out(value: float | None, said: str) -> None:
    assert rate(value, "x/s") == said
