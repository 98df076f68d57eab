import msgspec
import pytest
from tests.sim.plain import PROFILE

from twinpool.errors import UserError
from twinpool.profile import Profile, parse_profile
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
