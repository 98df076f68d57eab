"""Takes out of a stream what only engines may see: where KV lies, and who may read it.

An engine that writes for another (vLLM, where both directions are on) puts a handle into the last event of its stream. Nothing
is parsed unless such a field is there: inside a text its quotes would be escaped.
"""

import msgspec

from twinpool.handoff.body import OURS, put_together

_FIELDS = tuple(b'%b"' % name.encode() for name in sorted(OURS) if name.endswith("_transfer_params"))
_DATA = b"data: "
_EVENT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def hide_handoff(events: bytes) -> bytes:
    """Whole events, each without the fields of `OURS`; byte for byte the same where there are none."""
    if not any(field in events for field in _FIELDS):
        return events
    return b"\n".join(map(_hide, events.split(b"\n")))


def _hide(line: bytes) -> bytes:
    if not line.startswith(_DATA) or not any(field in line for field in _FIELDS):
        return line
    try:
        fields = _EVENT.decode(line[len(_DATA) :])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return line
    return _DATA + put_together({name: value for name, value in fields.items() if name not in OURS})
