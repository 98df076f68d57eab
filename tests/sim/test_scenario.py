import pytest

from twinpool.errors import UserError
from twinpool.sim.run import kind_of, traffic
from twinpool.sim.scenario import parse_scenario
from twinpool.sim.shelf import load_scenario, names, open_trace

TEXT = """
name = "x"
duration_s = 10
[traffic]
mix = "short"
arrivals = {shape = "constant", rate = 1}
[[workers]]
count = 1
role = "colocated"
profile = "llama-3.1-8b-h100-tp1"
"""

ARM = """
[[arms]]
name = "a"
[[arms.workers]]
count = 1
role = "decode"
profile = "llama-3.1-8b-h100-tp1"
"""


@pytest.mark.parametrize("name", names("gallery", ".toml"))
def test_every_scenario_of_the_gallery_can_be_run(name: str) -> None:
    scenario = load_scenario(name)
    assert (scenario.name, bool(scenario.about)) == (name, True)
    for arm in scenario.all_arms():
        for group in arm.workers:
            kind_of(group)
    first = next(traffic(scenario.traffic, seed=1, duration_s=scenario.duration_s, long_prompt_tokens=1500))
    assert first.at_s < scenario.duration_s


def test_the_article_has_its_claims() -> None:
    assert {1.45, 0.70, 0.92} <= {claim.claimed for claim in load_scenario("article").claims}


def test_traces_of_the_package_name_their_sources() -> None:
    for name in [*names("traces", ".csv"), *names("traces", ".jsonl")]:
        assert sum(1 for _ in open_trace(name)) >= 999


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("rate = 1}", "rate = 1"), "not valid TOML"),
        (("count = 1", "count = 0"), "workers"),
        (("count = 1", "cuont = 1"), "cuont"),
        (('mix = "short"', ""), "either a trace, or a mix"),
        (('role = "colocated"', 'role = "both"'), "both"),
        (("[[workers]]", "[[arms]]\nname = 'a'\nworkers = []\n[[workers]]"), "an arm has workers"),
        (("[[workers]]", ARM + "[[workers]]"), "either workers or arms"),
        (("[[workers]]", "[[faults]]\nat_s = 1\nworker = 'w000'\nkind = 'role'\n[[workers]]"), "names a role"),
        (("rate = 1}", "rate = -1}"), "above 0"),
        (("rate = 1}", "rate = 1e300}"), "1,000,000 at most"),
        (('"constant", rate = 1}', '"ramp", rate = 1, to_rate = 2, over_s = nan}'), "over_s above 0"),
        (('"constant", rate = 1}', '"burst", rate = 1, starts_s = nan}'), "a burst has"),
        (("[[workers]]", "rate_scale = inf\n[[workers]]"), "rate_scale"),
        (("[[workers]]", "length_divisor = 1e-300\n[[workers]]"), "length_divisor"),
        (("count = 1", "count = 1_000_000_000"), "count"),
        (("count = 1", "count = 1\nslowness = inf"), "slowness"),
        (("count = 1", "count = 1\nmixed_step_extra_ms = 1e300"), "mixed_step_extra_ms"),
        (("[[workers]]", "[[faults]]\nat_s = 1\nworker = 'w000'\nkind = 'slow'\nfactor = inf\n[[workers]]"), "factor"),
        (("[[workers]]", "[[faults]]\nat_s = inf\nworker = 'w000'\nkind = 'slow'\n[[workers]]"), "at_s"),
        (("[[workers]]", "[gateway]\nload_reports_s = 1e-9\n[[workers]]"), "load_reports_s"),
        (("[[workers]]", "[gateway]\nprobe_interval_s = 1e-9\n[[workers]]"), "probe_interval_s"),
        (("[[workers]]", "[gateway]\ndispatch_s = inf\n[[workers]]"), "dispatch_s"),
        (("[[workers]]", "[clients]\nchars_per_token = 1e-300\n[[workers]]"), "chars_per_token"),
        (("duration_s = 10", "duration_s = 10\nwarmup_s = 1"), "warmup_s"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(change: tuple[str, str], why: str) -> None:
    assert parse_scenario(TEXT, "here").duration_s == 10
    with pytest.raises(UserError, match=why) as raised:
        parse_scenario(TEXT.replace(*change), "here")
    assert str(raised.value).startswith("here")


def test_an_unknown_mix_or_file_names_what_there_is() -> None:
    spec = parse_scenario(TEXT.replace('"short"', '"shrot"'), "here").traffic
    with pytest.raises(UserError, match="mixed-60-40"):
        traffic(spec, seed=1, duration_s=1, long_prompt_tokens=1500)
    with pytest.raises(UserError, match="article"):
        load_scenario("artcile")
