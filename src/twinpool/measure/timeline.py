"""Where the time of one request went.

    arrived ──queue── sent ──prefill── prefilled ──handoff── in place ──first_decode── first token ── … ── ended

A colocated request has no handoff: its prefill lasts until the first token. Where the engine that decodes does not tell when
the KV was in place, the last two parts are one, `handoff_and_first_decode`. The parts always add up to the TTFT, and none of
them is an estimate.
"""

import msgspec

PARTS = ("queue", "prefill", "handoff", "first_decode", "handoff_and_first_decode")


class Timeline(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Moments of one request in seconds on one clock; None for what did not happen.

    `sent` is when the leg that led to the answer went out: time lost in attempts that failed counts as queue. `handoff_s` is
    what the decoding engine measured from the arrival of its leg until the KV was in place.
    """

    arrived: float
    ended: float
    sent: float | None = None
    prefilled: float | None = None
    first_token: float | None = None
    handoff_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """From arrival to the first token with content; None where the answer was not streamed or empty."""
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def e2e_s(self) -> float:
        return self.ended - self.arrived

    def ttft_parts_s(self) -> dict[str, float]:
        """The TTFT taken apart, seconds by part (of `PARTS`); empty where there is no TTFT."""
        if self.first_token is None or self.sent is None:
            return {}
        parts = {"queue": self.sent - self.arrived}
        if self.prefilled is None:
            parts["prefill"] = self.first_token - self.sent
            return parts
        prefilled = min(self.prefilled, self.first_token)  # where both legs run at once, P's answer can come last
        parts["prefill"] = prefilled - self.sent
        rest = self.first_token - prefilled
        if self.handoff_s is None:
            parts["handoff_and_first_decode"] = rest
        else:
            parts["handoff"] = min(self.handoff_s, rest)
            parts["first_decode"] = rest - parts["handoff"]
        return parts
