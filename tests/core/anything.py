"""Any record of a type, for hypothesis: read off the type, so that a new event or field is covered as soon as it is there."""

from enum import Enum
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
from hypothesis import strategies as st

_PLAIN: dict[type, st.SearchStrategy[Any]] = {
    str: st.text(max_size=8),
    bool: st.booleans(),
    int: st.integers(-(2**53), 2**53),
    float: st.floats(allow_nan=False, allow_infinity=False),
    type(None): st.none(),
}


def anything(wanted: Any, fields: dict[str, st.SearchStrategy[Any]] | None = None) -> st.SearchStrategy[Any]:
    """Values of the type; `fields` has the strategies of the fields whose names are in it, at any depth."""
    given = fields or {}
    if wanted in _PLAIN:
        return _PLAIN[wanted]
    if get_origin(wanted) is Annotated:
        plain, bounds = get_args(wanted)
        low = bounds.ge if bounds.ge is not None else bounds.gt
        if plain is int:
            return st.integers(low, bounds.le if bounds.le is not None else 2**53)
        return st.floats(low, bounds.le, exclude_min=bounds.gt is not None)
    if get_origin(wanted) in (Union, UnionType):
        return st.one_of([anything(option, given) for option in get_args(wanted)])
    if get_origin(wanted) is tuple and get_args(wanted)[-1] is not Ellipsis:
        return st.tuples(*(anything(part, given) for part in get_args(wanted)))
    if get_origin(wanted) is tuple:
        return st.lists(anything(get_args(wanted)[0], given), max_size=3).map(tuple)
    if issubclass(wanted, Enum):
        return st.sampled_from(wanted)
    return st.builds(
        wanted,
        **{
            field.name: given[field.name] if field.name in given else anything(field.type, given)
            for field in msgspec.structs.fields(wanted)
        },
    )
