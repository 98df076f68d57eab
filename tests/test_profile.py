import msgspec
import pytest
from tests.sim.plain import PROFILE

from twinpool.errors import UserError
from twinpool.profile import Profile, parse_profile, rising
from twinpool.sim.shelf import load_profile, names


def text(**changes: object) -> bytes:
    return msgspec.json.encode({**msgspec.to_builtins(PROFILE), **changes})


def test_what_is_written_is_read() -> None:
    assert parse_profile(msgspec.json.encode(PROFILE), "here") == PROFILE


def test_every_profile_of_the_package_is_one() -> None:
    profiles = [load_profile(name) for name in names("profiles", ".json")]
    assert len(profiles) >= 3
    assert all(isinstance(profile, Profile) and profile.source for profile in profiles)


def test_a_table_with_holes_is_refused_by_its_holes() -> None:
    with pytest.raises(UserError, match=r"holes at \(batch, context\) \(8, 200\)"):
        parse_profile(text(decode_step_ms=PROFILE.decode_step_ms[:-1]), "here")


@pytest.mark.parametrize("points", [[(100, 1.0)], [(200, 2.0), (100, 1.0)], [(100, 1.0), (100, 2.0)]])
def test_lengths_rise(points: object) -> None:
    with pytest.raises(UserError, match="prefill_ms"):
        parse_profile(text(prefill_ms=points), "here")


@pytest.mark.parametrize(
    ("table", "points"),
    [
        ("prefill_ms", [(100, 10.0), (200, 7.9)]),
        ("prefill_ms", [(100, 10.0), (200, 9.0), (300, 7.9)]),
        ("decode_step_ms", [(1, 100, 10.0), (1, 200, 12.0), (8, 100, 7.9), (8, 200, 12.0)]),
    ],
)
def test_more_work_takes_no_less_time_beyond_noise(table: str, points: list[tuple[float, ...]]) -> None:
    with pytest.raises(UserError, match=rf"{table} falls to 7.9 ms at .*, where less work takes 10 ms"):
        parse_profile(text(**{table: points}), "here")
    noisy = [tuple(8.1 if value == 7.9 else value for value in point) for point in points]
    assert parse_profile(text(**{table: noisy}), "here")


@pytest.mark.parametrize(
    "field",
    ["kv_bytes_per_token", "kv_tokens", "context_tokens", "max_sequences", "handoff_bytes_per_s", "tensor_parallel", "gpus"],
)
@pytest.mark.parametrize("value", [10**12, 10**18, 0])
def test_sizes_that_nothing_has(field: str, value: int) -> None:
    if field == "handoff_bytes_per_s":
        value *= 10_000
    with pytest.raises(UserError, match=f"{field}|does not fit"):
        parse_profile(text(**{field: value}), "here")


@pytest.mark.parametrize("ms", [1e300, 1e-300, 0.0])
def test_times_that_no_engine_has(ms: float) -> None:
    with pytest.raises(UserError, match="prefill_ms"):
        parse_profile(text(prefill_ms=[(100, ms), (200, ms)]), "here")
    if ms:
        with pytest.raises(UserError, match="decode_step_ms"):
            parse_profile(text(decode_step_ms=[(b, c, ms) for b in (1, 8) for c in (100, 200)]), "here")


def test_the_running_maximum_goes_over_every_size() -> None:
    points = {(1, 1): 3.0, (1, 2): 2.0, (2, 1): 1.0, (2, 2): 2.5, (3, 1): 4.0}
    assert rising(points.items()) == {(1, 1): 3.0, (1, 2): 3.0, (2, 1): 3.0, (2, 2): 3.0, (3, 1): 4.0}


def test_a_model_that_does_not_fit() -> None:
    with pytest.raises(UserError, match="does not fit"):
        parse_profile(text(kv_tokens=-5), "here")


def test_a_misspelt_key_is_no_setting() -> None:
    with pytest.raises(UserError, match="prefil_ms"):
        parse_profile(text(prefil_ms=[]), "here")


@pytest.mark.parametrize(
    "expected", [{"kv_tokens": 1_000_000}, {"engine": "e 2"}, {"model": "other"}, {"tensor_parallel": 2}, {"flags": {"x": 2}}]
)
def test_the_profile_of_another_configuration_is_refused(expected: dict[str, object]) -> None:
    profile = msgspec.structs.replace(PROFILE, flags={"x": 1})
    with pytest.raises(UserError, match=f"taken with {'x' if 'flags' in expected else next(iter(expected))}"):
        profile.require(**expected)  # type: ignore[arg-type]


def test_the_profile_of_this_configuration_is_taken() -> None:
    PROFILE.require(model="m", engine="e 1", kv_tokens=100_000, tensor_parallel=1, flags={"y": 3})
