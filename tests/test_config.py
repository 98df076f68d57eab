"""The configuration: what cannot be is refused with its key, before anything starts."""

import pytest

from twinpool.config import Ceilings, Config, Connector, Declared, KvRole, declared_of, load
from twinpool.errors import UserError


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[objectives]\nslo_ttft_s = -1", "slo_ttft_s"),
        ("[routing]\npause_s = inf", "pause_s"),
        ("[routing]\nmax_attempts = 0", "max_attempts"),
        ("[balance]\nperiod_s = 1e-9", "period_s"),
        ("[server]\nport = 70000", "port"),
        ("[server]\nprot = 1", "prot"),
        ("[server]\nport = 'a'", "port"),
        ("[[workers]]\nrole = 'prefill'", "url"),
        ("[[workers]]\nurl = 'a:1'\nconnector = 'nixel'", "connector"),
        ("[[workers]]\nurl = 'a:1'\nkv_role = 'both'", "kv_role"),
        ("[[workers]]\nurl = 'a:1'\nlease_s = 0", "lease_s"),
        ("[[workers]]\nurl = 'a:1'\napi_key = 'sk-1'", "api_key"),
        ("[limits]\nn = 0", "n"),
        ("[limits]\nnn = 1", "nn"),
        ("[limits]\nmedia_domains = 'all'", "media_domains"),
        ("[server", "TOML"),
        ("n = " + "[" * 5000, "TOML"),
    ],
)
def test_a_setting_that_cannot_be_is_named(text: str, key: str) -> None:
    with pytest.raises(UserError, match=key) as refused:
        load(text, "twinpool.toml")
    assert str(refused.value).startswith("twinpool.toml")
    assert "\n" not in str(refused.value)


def test_an_empty_file_is_every_default() -> None:
    assert load("", "twinpool.toml") == Config()


def test_engines_are_declared_and_requests_limited() -> None:
    config = load(
        "[limits]\nn = 4\nmedia_domains = []\n"
        "[[workers]]\nurl = 'a:1'\nconnector = 'lmcache'\nkv_role = 'kv_producer'\nlease_s = 6\nbudget_tokens = 2048",
        "twinpool.toml",
    )
    assert (config.limits.n, config.limits.media_domains, config.limits.best_of) == (4, (), Ceilings().best_of)
    (engine,) = config.workers
    declared = Declared(connector=Connector.LMCACHE, kv_role=KvRole.PRODUCER, lease_s=6, budget_tokens=2048)
    assert declared_of(engine) == declared
