"""The configuration: what cannot be is refused with its key, before anything starts."""

import pytest

from twinpool.config import Config, load
from twinpool.errors import UserError


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[objectives]\nslo_ttft_s = -1", "slo_ttft_s"),
        ("[routing]\npause_s = inf", "pause_s"),
        ("[routing]\nmax_attempts = 0", "max_attempts"),
        ("[server]\nport = 70000", "port"),
        ("[server]\nprot = 1", "prot"),
        ("[server]\nport = 'a'", "port"),
        ("[[workers]]\nrole = 'prefill'", "url"),
        ("[server", "TOML"),
    ],
)
def test_a_setting_that_cannot_be_is_named(text: str, key: str) -> None:
    with pytest.raises(UserError, match=key) as refused:
        load(text, "twinpool.toml")
    assert str(refused.value).startswith("twinpool.toml")
    assert "\n" not in str(refused.value)


def test_an_empty_file_is_every_default() -> None:
    assert load("", "twinpool.toml") == Config()
