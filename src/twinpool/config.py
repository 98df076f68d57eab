"""The whole configuration as one frozen tree, read once from one TOML file.

Every default has its reason beside it. `load` turns TOML text into the tree or raises a one-line `UserError` that names the
key; command-line options are laid over it in `cli`.
"""

import tomllib
from enum import StrEnum
from typing import Annotated

import msgspec

from twinpool.errors import UserError

Seconds = Annotated[float, msgspec.Meta(gt=0, le=10_000_000)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]  # 0 takes any free one


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the file: unknown keys are errors, so that a typing mistake cannot pass for a setting."""


class Objectives(_Section, frozen=True):
    """What the service promises; the policies and the indicators serve these."""

    slo_ttft_s: Seconds = 1.3  # the article's limit for long prompts
    slo_itl_s: Seconds = 0.05  # 20 tokens a second: faster than anyone reads
    long_prompt_tokens: Count = 1500  # the article's border between short and long


class RoutingPolicy(StrEnum):
    """How a request's way is chosen."""

    LEAST_LOADED = "least_loaded"  # a pair where there is one, the least loaded first
    LEAST_COST = "least_cost"  # the way that costs least by what has been learnt of the engines


class Routing(_Section, frozen=True):
    """The bounds within which requests are routed. Part of the journal: a replay builds its controller from them."""

    policy: RoutingPolicy = RoutingPolicy.LEAST_LOADED  # the other has proved itself in simulation alone
    prefill_window_tokens: Count = 2048  # given to one prefill worker at a time: later prompts wait where they can still choose
    max_waiting: Count = 1024  # requests in the router's queue; each holds its body in memory
    queue_timeout_s: Seconds = 60.0  # nobody waits longer than this for a first byte without an answer
    priority_lead_s: Seconds = (
        10.0  # a step of priority is worth so long a wait: nobody is overtaken for longer than steps times this
    )
    refuse_late: bool = False  # what would miss `slo_ttft_s` by what it must wait for: at once, so that it can go elsewhere
    worker_wait_s: Seconds = 10.0  # where no worker is up at all: a restarted one is back within seconds
    request_timeout_s: Seconds = 600.0  # from arrival to the first byte, all attempts together
    max_attempts: Count = 3  # one request is tried on at most this many engines
    lease_s: Seconds = 30.0  # what stock vLLM grants where the engine does not say
    lease_margin_s: Seconds = 2.0  # a first token is trusted until so long before the lease ends: networks and clocks are slow
    pair_strikes: Count = 3  # requests in a row whose handoff fails set a pair aside: one may be the request's own fault
    canary_share: Annotated[float, msgspec.Meta(gt=0, le=0.5)] = 0.01  # of a worker's time, at most
    canary_tolerance: Seconds = 0.3  # of log-probability: bfloat16 on two engines differs by up to 0.1
    canary_interval_s: Seconds = 5.0  # between two looks at a pair in use, at least: what broke is seen within seconds
    canary_idle_s: Seconds = 60.0  # the same while nothing goes that way
    # A pair whose canary moves KV more slowly is said to be slow: it goes another way than was meant. 0 is none. None: what the
    # devices of engines started here lead one to expect, and none for those that run already.
    handoff_floor_gb_s: Annotated[float, msgspec.Meta(ge=0, le=100_000)] | None = None
    # How long at least a worker that said 429 or 503 is left alone: "Retry-After: 0" would be a busy loop.
    pause_s: Seconds = 1.0
    max_pause_s: Seconds = 30.0  # a Retry-After beyond this is a worker's mistake, not ours to obey


class BalanceMode(StrEnum):
    """What comes of a proposal to change a worker's role."""

    AUTO = "auto"  # it is done
    ADVISE = "advise"  # it is shown, and left to people
    OFF = "off"  # nobody asks


class Balance(_Section, frozen=True):
    """How workers change pool as traffic shifts. Only those whose `allowed_roles` let them."""

    mode: BalanceMode = BalanceMode.AUTO
    # Between two looks; 250 ms to 5 s carried the same in simulation, 60 s a third less. Far below, nothing else is done.
    period_s: Annotated[float, msgspec.Meta(ge=0.01, le=10_000_000)] = 1.0
    dwell_s: Seconds = 2.0  # between two changes, so that the first one shows; up to 10 s made no difference
    hysteresis: Annotated[float, msgspec.Meta(ge=1, le=100)] = (
        1.06  # how much worse the present split must be, by the estimates
    )
    fewest_pressed: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.5  # under half of what a pool can do nobody waits


class Timeouts(_Section, frozen=True):
    """Deadlines on the network, seconds."""

    connect_s: Seconds = 5.0  # loopback and data-centre links answer in milliseconds
    prefill_s: Seconds = 300.0  # a very long prompt on a slow engine is alive without saying so
    first_byte_s: Seconds = 300.0  # the same, where one worker does all
    idle_s: Seconds = 120.0  # between two pieces of one stream
    release_s: Seconds = 5.0  # giving a handle back is a courtesy: the lease ends it anyway
    probe_s: Seconds = 2.0  # a worker's own pages answer at once even when it computes


class Server(_Section, frozen=True):
    """The gateway's two ports."""

    host: str = "127.0.0.1"
    port: Port = 8000
    admin_host: str = "127.0.0.1"
    admin_port: Port = 8001
    max_body_bytes: Count = 32 * 1024 * 1024  # a few images in base64
    header_timeout_s: Seconds = 10.0
    body_timeout_s: Seconds = 30.0  # half a request then silence
    keep_alive_s: Seconds = 75.0
    expose_route: bool = False  # x-twinpool-* answer headers: topology is nobody's business by default
    client_priorities: bool = False  # x-twinpool-priority counts: a service for everybody lets nobody jump its queue
    engine_api_key_file: str | None = None  # for engines that have no key of their own; a client's key never goes to one
    probe_interval_s: Seconds = 1.0
    drain_s: Seconds = 30.0  # how long running answers may go on once the gateway was told to stop


class Ceilings(_Section, frozen=True):
    """What one request may ask for, so that none can use up an engine alone. Over a ceiling it is refused with 400, field and
    limit named; None is no ceiling. The size of a body is `server.max_body_bytes`."""

    n: Count | None = 128  # OpenAI's own
    best_of: Count | None = 128
    logprobs: Count | None = 20  # for each token, as `top_logprobs` too: OpenAI's own, and vLLM's default
    prompt_logprobs: Count | None = 20  # for each token of the prompt: without a ceiling, one long prompt ends an engine
    max_tokens: Count | None = None  # the context ends it
    temperature: Annotated[float, msgspec.Meta(gt=0)] | None = 100.0  # beyond, samplers divide by what they should not
    stop_sequences: Count | None = 256  # each is looked for after every token
    regex_bytes: Count | None = 4096  # compiled into an automaton, which can be exponentially larger
    grammar_bytes: Count | None = 64 * 1024
    schema_bytes: Count | None = 256 * 1024
    schema_depth: Count | None = 64  # levels of a JSON schema, and of tools
    choices: Count | None = 4096  # of a guided choice
    logit_bias: Count | None = 4096  # entries
    media_domains: tuple[str, ...] | None = None  # None: engines fetch what URLs say. []: data URLs only. Else these hosts too


class Connector(StrEnum):
    """Through what an engine hands KV over: vLLM's `kv_connector`, which no route of it tells."""

    NIXL = "nixl"
    LMCACHE = "lmcache"
    MOONCAKE = "mooncake"
    NONE = "none"


class KvRole(StrEnum):
    """vLLM's `kv_role`, which no route of it tells. Not an empty flag: without the consumer's half the scheduler does not
    protect freed blocks from a step that still runs."""

    BOTH = "kv_both"
    PRODUCER = "kv_producer"
    CONSUMER = "kv_consumer"


class Declared(_Section, frozen=True):
    """What is to be known of an engine and cannot be asked. None: what it says itself, or the default named here."""

    connector: Connector | None = None  # nixl where it may prefill or decode, none where it is colocated only
    kv_role: KvRole = KvRole.BOTH
    lease_s: Seconds | None = None  # `routing.lease_s`, which is vLLM's own default
    budget_tokens: Count | None = None  # `max_num_batched_tokens`: tokens a step
    tensor_parallel: Count | None = None  # 1
    dtype: str | None = None
    slots: Count | None = None  # `max_num_seqs`: sequences at once


def declared_of(engine: Declared) -> Declared:
    """That part alone of a record that has more."""
    return Declared(**{name: getattr(engine, name) for name in Declared.__struct_fields__})


class Attached(Declared, frozen=True, kw_only=True):
    """One engine that runs already. Its key is sent with every request to it; without one, `server.engine_api_key_file`."""

    url: str
    role: str = "colocated"
    allowed_roles: tuple[str, ...] = ()  # empty: only its role
    api_key_file: str | None = None


class Launch(_Section, frozen=True):
    """vLLM engines that are started here, ``serve --engine vllm``. None: by whether they compute on GPUs or on the CPU."""

    max_num_batched_tokens: Count | None = None  # 2,048 on GPUs, 256 on the CPU: every running answer waits for a step to end
    max_num_seqs: Count | None = None  # 256 on GPUs, which is vLLM's own default, 16 on the CPU
    port: Count = 8100  # of the first engine; the next free ones are for the others
    side_channel_port: Count = 5600  # the same for NIXL's handshake; vLLM's own default, which all engines would take
    start_s: Seconds = 1800.0  # hundreds of GB from a slow disk, then compiling


class Kept(_Section, frozen=True):
    """How much is kept of a record that grows with every request."""

    max_bytes: Annotated[int, msgspec.Meta(ge=1)] = 64 * 1024 * 1024  # some 50,000 requests, and any editor opens it
    keep: Annotated[int, msgspec.Meta(ge=0)] = 4  # older files, FILE.1 the newest: with FILE a third of a gigabyte at most


class Config(_Section, frozen=True):
    """The tree. `workers` are engines to attach to; without any, `serve` starts its own."""

    server: Server = Server()
    objectives: Objectives = Objectives()
    routing: Routing = Routing()
    balance: Balance = Balance(mode=BalanceMode.OFF)  # the law has proved itself in simulation alone: who wants it says so
    timeouts: Timeouts = Timeouts()
    limits: Ceilings = Ceilings()
    launch: Launch = Launch()
    journal: Kept = Kept()
    access_log: Kept = Kept()
    workers: tuple[Attached, ...] = ()


def load(text: str, origin: str, balance: BalanceMode | None = None) -> Config:
    """Read the TOML `text`; `origin` (a path) only serves the message of the `UserError` raised when it is not valid. `balance`
    wins over the text's.

    Where pools are balanced, requests go by least cost unless the text names a policy: how many workers a pool should have is
    reckoned for that policy. Where balance is only advised, they go as before: advice changes nothing.
    """
    try:
        tree = tomllib.loads(text)
        config = msgspec.convert(tree, Config)
    except (tomllib.TOMLDecodeError, RecursionError) as broken:
        raise UserError(f"{origin} is not valid TOML: {broken}") from broken
    except msgspec.ValidationError as wrong:
        raise UserError(f"{origin}: {wrong}") from wrong
    if balance is not None:
        config = msgspec.structs.replace(config, balance=msgspec.structs.replace(config.balance, mode=balance))
    if config.balance.mode is BalanceMode.AUTO and "policy" not in tree.get("routing", {}):
        routing = msgspec.structs.replace(config.routing, policy=RoutingPolicy.LEAST_COST)
        config = msgspec.structs.replace(config, routing=routing)
    return config
