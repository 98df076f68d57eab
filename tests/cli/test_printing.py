import json
import math

import pytest

from twinpool.cli.printing import json_text, printable

STRANGE = "a\x1b[2J\x07\x00\x9b31m\x7f\u202eb\u200b\ud800c\r"


def test_what_is_not_seen_is_left_out() -> None:
    assert printable(STRANGE) == "a[2J31mbc "
    assert printable("two\nlines\tand\u00a0ünï → 漢") == "two\nlines and ünï → 漢"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_has_not_is_null(value: float) -> None:
    assert json.loads(json_text({"a": [value, 1.5]}), parse_constant=pytest.fail) == {"a": [None, 1.5]}


def test_json_is_ascii_in_one_line() -> None:
    text = json_text({"name": "m\x1b[2J\x9b\n漢"})
    assert text.isascii()
    assert text.isprintable()
    assert json.loads(text) == {"name": "m\x1b[2J\x9b\n漢"}
