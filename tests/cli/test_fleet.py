import pytest

from twinpool.cli.fleet import ALL_ROLES, Engine, Given, choose_fleet, engine_url
from twinpool.config import Attached, Config, Declared, KvRole
from twinpool.deploy.plan import Wanted
from twinpool.errors import UserError

NOTHING = Config()
FILE = Config(workers=(Attached(url="http://a:1", role="prefill", allowed_roles=("prefill", "decode")),))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (Given(), Wanted(1, 1, 0)),
        (Given(prefill_workers=3), Wanted(3, 1, 0)),
        (Given(decode_workers=2), Wanted(1, 2, 0)),
        (Given(prefill_workers=0), Wanted(0, 1, 0)),
        (Given(colocated_workers=2), Wanted(0, 0, 2)),
        (Given(colocated_workers=1, prefill_workers=1, decode_workers=1), Wanted(1, 1, 1)),
        (Given(colocated_workers=0), Wanted(1, 1, 0)),
    ],
)
def test_numbers_of_workers(given: Given, wanted: Wanted) -> None:
    assert choose_fleet(NOTHING, given) == wanted


def test_one_number_beside_colocated_ones_brings_no_other() -> None:
    assert choose_fleet(NOTHING, Given(colocated_workers=1, prefill_workers=1)) == Wanted(1, 0, 1)


def test_engines_are_named_by_their_role_and_keep_it() -> None:
    assert choose_fleet(NOTHING, Given(prefill=("a:1", "b:1"), decode=("c:1",))) == (
        Engine("prefill-0", "http://a:1", "prefill", ("prefill",)),
        Engine("prefill-1", "http://b:1", "prefill", ("prefill",)),
        Engine("decode-0", "http://c:1", "decode", ("decode",)),
    )


def test_engines_of_the_file_may_be_allowed_more_and_flags_win_over_them() -> None:
    assert choose_fleet(FILE, Given()) == (Engine("prefill-0", "http://a:1", "prefill", ("prefill", "decode")),)
    assert choose_fleet(FILE, Given(colocated=("c:1",))) == (Engine("colocated-0", "http://c:1", "colocated", ("colocated",)),)


@pytest.mark.parametrize(
    ("config", "given", "said"),
    [
        (NOTHING, Given(prefill=("a:1",), model="m"), "--model starts some here"),
        (NOTHING, Given(decode=("a:1",), decode_workers=1), "--decode-workers starts some here"),
        (FILE, Given(colocated_workers=1), "the workers of the config file .* --colocated-workers"),
        (NOTHING, Given(prefill=("a:1",), decode=("http://a:1/",)), "http://a:1 is given twice"),
        (Config(workers=(Attached(url="a:1", role="both"),)), Given(), "the role 'both': it can be prefill, decode, colocated"),
        (Config(workers=(Attached(url="a:1", role="prefill", allowed_roles=("decode",)),)), Given(), "allowed_roles leave out"),
    ],
)
def test_what_contradicts_itself_is_refused(config: Config, given: Given, said: str) -> None:
    with pytest.raises(UserError, match=said):
        choose_fleet(config, given)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://host:8100", "http://host:8100"),
        ("host:8100", "http://host:8100"),
        (" host:8100/ ", "http://host:8100"),
        ("https://host/v1/", "https://host"),
        ("http://[::1]:8100/v1", "http://[::1]:8100"),
    ],
)
def test_urls_as_people_paste_them(text: str, url: str) -> None:
    assert engine_url(text) == url


@pytest.mark.parametrize(
    "text", ["", "http://", "ftp://host", "http://host:port", "http://host:99999", "http://user@host", "a b"]
)
def test_what_is_no_url(text: str) -> None:
    with pytest.raises(UserError, match="write http://host:port"):
        engine_url(text)


def test_the_roles_are_the_contract_s() -> None:
    assert ALL_ROLES == ("prefill", "decode", "colocated")


def test_what_is_declared_of_an_engine_goes_with_it() -> None:
    declared = Attached(url="a:1", role="prefill", lease_s=6.0, kv_role=KvRole.PRODUCER, api_key_file="key")
    (engine,) = choose_fleet(Config(workers=(declared,)), Given())  # type: ignore[misc]
    assert engine.declared == Declared(lease_s=6.0, kv_role=KvRole.PRODUCER)
    assert engine.api_key_file == "key"


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (Attached(url="a:1", role="decode", kv_role=KvRole.PRODUCER), "a kv_producer must never decode"),
        (Attached(url="a:1", role="prefill", kv_role=KvRole.CONSUMER), "a kv_consumer gives no KV away"),
    ],
)
def test_an_engine_whose_flag_rules_its_role_out_is_refused_before_any_traffic(engine: Attached, said: str) -> None:
    with pytest.raises(UserError, match=said):
        choose_fleet(Config(workers=(engine,)), Given())
