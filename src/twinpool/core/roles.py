"""The pools."""

from enum import StrEnum


class Role(StrEnum):
    """The pool a worker stands in. Soft state of the controller: an engine may hold work of any role."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"
