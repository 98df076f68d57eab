"""HTTP/1.1 on asyncio protocols: the relay's hot path, in both directions.

    client ══► client_connection.py ─► handler(Request, Responder)     server.py    listens, drains, sweeps deadlines
    client ◄══ responder.py ◄────────┐                                 messages.py  what a handler is given
                                     │ Receiver.on_head, on_body, …    client.py    the pool; whole answers
    engine ══► engine_connection.py ─┘                                 lost.py      the ways to lose an engine
    engine ◄══ exchange.py: pause, abort                               framing.py   how bytes are laid out, both ways

Bytes go from an engine's socket to a client's socket inside one call of `data_received`: no task, queue or future is made
for a chunk. Anything that is not on that path (the admin port, probes) uses aiohttp.

All times are seconds on `time.monotonic`. It is the clock behind `loop.time()` too, but uvloop rounds that one to a
millisecond and reads it once per turn of the loop: do not subtract one from the other.
"""

from twinpool.http1.client import Pool, Response
from twinpool.http1.exchange import Deadlines, Exchange, Origin, Receiver
from twinpool.http1.lost import Loss, UpstreamLost
from twinpool.http1.messages import Limits, Request
from twinpool.http1.responder import Responder
from twinpool.http1.server import Handler, Server, serve

__all__ = [
    "Deadlines",
    "Exchange",
    "Handler",
    "Limits",
    "Loss",
    "Origin",
    "Pool",
    "Receiver",
    "Request",
    "Responder",
    "Response",
    "Server",
    "UpstreamLost",
    "serve",
]
