"""A decode leg that is late, on a machine of any speed: it waits not for a time but for what time brings about."""

from tests.live import prompts
from tests.live.waiting import until
from tests.vllm.engine import BLOCK_TOKENS, BLOCKS, MODEL, Engine, ask
from tests.vllm.relay import Relay

ON_ITS_WAY_S = 240.0
OTHER_TOKENS = 750


def arrive_late(network: Relay, prefill: Engine) -> None:
    """Hold the next decode leg back until the lease on its KV has ended and `prefill` has read so many other prompts that all
    of its memory was used anew; then let it go. The request is to be under way, or to come."""
    held, expired = network.held, prefill.expired()
    network.hold()
    try:
        until(lambda: network.held > held, within_s=ON_ITS_WAY_S)
        until(lambda: prefill.expired() > expired, within_s=prefill.lease_s + 60.0)
        for _ in range(2 * BLOCKS * BLOCK_TOKENS // OTHER_TOKENS):
            body = {"model": MODEL, "prompt": prompts.tokens(OTHER_TOKENS), "max_tokens": 1}
            status, answer = ask(f"{prefill.url}/v1/completions", body)
            assert status == 200, answer
    finally:
        network.let_go()
