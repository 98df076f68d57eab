"""Launch lines for stock vLLM engines on one machine, decided without touching it.

    devices ── choose_fabric ──┐
    machine, wanted, lease ────┼── plan_vllm ──▶ one environment and command line an engine, and what the gateway is to know
    what somebody asked for ───┘

Every engine is launched ``kv_both``, so that roles are the gateway's to give. vLLM logs that the value is deprecated, yet it is
the only one with which an engine may both give KV away and safely read that of others while a step of its own still runs.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from twinpool.config import Connector, Declared, KvRole
from twinpool.deploy.devices import Devices, Gpu
from twinpool.deploy.fabric import Fabric
from twinpool.deploy.plan import ROLES, CoreShare, Wanted, share_cores
from twinpool.errors import UserError
from twinpool.machine import Machine

# Tokens of one step at most, the same in either role. Every running answer waits for a step to end.
GPU_BUDGET_TOKENS = 2048  # vLLM's own default on most GPUs; on the largest its 8,192 to 16,384 hold answers up for longer
CPU_BUDGET_TOKENS = 256  # as the embedded engine: larger steps read prompts no faster there
GPU_SEQUENCES = 256  # vLLM's own default
CPU_SEQUENCES = 16  # each further one makes the step of a CPU longer

# Of each engine, where memory allows: it is taken at the start, and a laptop has other uses for it. The environment's
# VLLM_CPU_KVCACHE_SPACE says otherwise.
CPU_KV_GIB = 2
CPU_OVERHEAD_BYTES = 1_800_000_000  # an engine without weights and KV: three interpreters with torch, measured 1.7 GB
GPU_USABLE_RATIO = 0.9  # vLLM's share of a GPU's memory
SHORTEST_LEASE_S = 6  # vLLM counts in whole seconds and sends a heartbeat each sixth of it

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # where to reach what listens there: somebody may ask for it
_TUNING = ("UCX_", "FI_", "NIXL_", "VLLM_CPU_KVCACHE_SPACE")  # what somebody has set of these wins over the plan
_OURS = {  # options of vLLM that an engine's place in the fleet depends on, and what to give here instead
    "--host": "--engine-host",
    "--port": "",
    "--uds": "",
    "--model": "--model",
    "--served-model-name": "--model-name",
    "--kv-transfer-config": "--nixl-backend",
    "--max-num-batched-tokens": "--max-num-batched-tokens",
    "--max-num-seqs": "--max-num-seqs",
    "--tensor-parallel-size": "--tensor-parallel",
    "-tp": "--tensor-parallel",
    "--data-parallel-size": "more workers",
    "-dp": "more workers",
    "--pipeline-parallel-size": "--tensor-parallel",
    "-pp": "--tensor-parallel",
    "--api-key": "--engine-api-key-file",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What somebody asked of the engines. `weights_bytes` is None where the model does not lie on this machine yet.

    `budget_tokens` and `sequences` are None for the default. `host` is where HTTP listens: None for loopback, with this
    machine's address for the handoff where that reaches further. `environment` is what the engines inherit. `ports` has, for
    each engine, one for HTTP and one for the side channel.
    """

    model: str
    model_name: str
    executable: str
    wanted: Wanted
    lease_s: float
    ports: Sequence[tuple[int, int]]
    tensor_parallel: int = 1
    decode_tensor_parallel: int | None = None
    budget_tokens: int | None = None
    sequences: int | None = None
    host: str | None = None
    extra: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None
    weights_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """One ``vllm serve``. `env` comes on top of what it inherits, `cores` is empty where it is not bound to any. `declared` is
    what no route of vLLM tells, and the gateway must know."""

    id: str
    role: str
    url: str
    env: dict[str, str]
    argv: tuple[str, ...]
    gpus: tuple[str, ...]
    cores: tuple[int, ...]
    allowed_roles: tuple[str, ...]
    declared: Declared

    def line(self) -> str:
        """As it is pasted into a shell."""
        return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in self.env.items()), shlex.join(self.argv)])


@dataclass(frozen=True, slots=True)
class VllmPlan:
    """`notes` is what the person who asked should know, `warnings` what they must not overlook."""

    engines: tuple[PlannedEngine, ...]
    fabric: Fabric
    gateway_cores: tuple[int, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def plan_vllm(machine: Machine, devices: Devices, fabric: Fabric, wish: Wish) -> VllmPlan:
    """Raises `UserError` for what cannot work, before an engine spends minutes on finding out."""
    named = wish.wanted.named()
    if len(wish.ports) != len(named):
        raise ValueError(f"{len(named)} engines need as many pairs of ports, not {len(wish.ports)}")
    _check_extra(wish.extra)
    parallel = dict.fromkeys(ROLES, wish.tensor_parallel) | {"decode": _decode_parallel(wish)}
    ranks = [parallel[role] for _, role in named]
    gateway_cores: tuple[int, ...] = ()
    if devices.gpus:
        _check_gpu_memory(devices.gpus, min(ranks), wish.weights_bytes)
        places = _on_gpus(devices, ranks)
    else:
        gateway_cores, places = _on_cores(machine, wish, ranks)
    common = _settle(fabric, devices, wish)
    engines = tuple(
        _engine(common, name, role, ports, place, may_swap=len(set(ranks)) == 1)
        for (name, role), ports, place in zip(named, wish.ports, places, strict=True)
    )
    notes = (*_notes(devices, sum(ranks), common), *fabric.notes)
    return VllmPlan(engines, fabric, gateway_cores, notes, (*fabric.warnings, *_expected_efa(fabric, wish)))


def side_channel_host(fabric: Fabric, host: str | None, address: str | None) -> str:
    """Where a decode engine finds a prefill engine to shake hands. On loopback only this machine's engines can."""
    if host is not None and host not in _EVERYWHERE:
        return host
    return address if address and (fabric.leaves_machine or host) else "127.0.0.1"


@dataclass(frozen=True, slots=True)
class _Common:
    """What all engines of a plan share."""

    wish: Wish
    fabric: Fabric
    side_host: str
    lease_s: int
    budget_tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class _Place:
    """What one engine computes on, and how it is told."""

    tensor_parallel: int
    env: dict[str, str]
    gpus: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()


def _settle(fabric: Fabric, devices: Devices, wish: Wish) -> _Common:
    budget_tokens = wish.budget_tokens or (GPU_BUDGET_TOKENS if devices.gpus else CPU_BUDGET_TOKENS)
    return _Common(
        wish,
        fabric,
        side_host=side_channel_host(fabric, wish.host, devices.address),
        lease_s=_whole_lease(wish.lease_s),
        budget_tokens=budget_tokens,
        sequences=min(wish.sequences or (GPU_SEQUENCES if devices.gpus else CPU_SEQUENCES), budget_tokens),
    )


def _engine(common: _Common, name: str, role: str, ports: tuple[int, int], place: _Place, *, may_swap: bool) -> PlannedEngine:
    """`may_swap` is false where tensor parallel sizes differ: the larger could not hand KV to the smaller."""
    wish, fabric, (port, side_port) = common.wish, common.fabric, ports
    tuning = {key: _in_front(wish, key, value) for key, value in fabric.env if not _is_set(wish, key)}
    side_channel = {"VLLM_NIXL_SIDE_CHANNEL_HOST": common.side_host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)}
    listen = wish.host or "127.0.0.1"
    reach = _EVERYWHERE.get(listen, listen)
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": KvRole.BOTH.value,
        "kv_buffer_device": fabric.buffer_device,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"backends": [fabric.backend], "kv_lease_duration": common.lease_s},
    }
    argv = (
        *(wish.executable, "serve", wish.model, "--host", listen, "--port", str(port)),
        *("--served-model-name", wish.model_name),
        *("--tensor-parallel-size", str(place.tensor_parallel)),
        *("--max-num-batched-tokens", str(common.budget_tokens), "--max-num-seqs", str(common.sequences)),
        "--enable-prompt-tokens-details",
        *("--kv-transfer-config", json.dumps(transfer, separators=(",", ":"))),
        *(() if place.gpus else ("--enforce-eager",)),  # compiling for a CPU takes a C++ compiler, and minutes
        *wish.extra,
    )
    return PlannedEngine(
        id=name,
        role=role,
        url=f"http://[{reach}]:{port}" if ":" in reach else f"http://{reach}:{port}",
        env={**place.env, **tuning, **side_channel},
        argv=argv,
        gpus=place.gpus,
        cores=place.cores,
        allowed_roles=ROLES if may_swap else tuple(dict.fromkeys((role, "colocated"))),
        declared=Declared(
            connector=Connector.NIXL,
            kv_role=KvRole.BOTH,
            lease_s=float(common.lease_s),
            budget_tokens=common.budget_tokens,
            tensor_parallel=place.tensor_parallel,
            dtype=_option(wish.extra, "--dtype"),
            slots=common.sequences,
        ),
    )


def _on_gpus(devices: Devices, ranks: Sequence[int]) -> list[_Place]:
    """Neighbours on the bus to one engine: they are the likeliest to share a switch or a node of memory."""
    if sum(ranks) > len(devices.gpus):
        raise UserError(
            f"{_engines(len(ranks))} take {sum(ranks)} GPUs, this machine has {len(devices.gpus)}: ask for fewer "
            "(--prefill-workers, --decode-workers, or one pool: --colocated-workers), or take a smaller --tensor-parallel"
        )
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if devices.gpus_in_pci_order else {}
    places, start = [], 0
    for count in ranks:
        gpus = tuple(gpu.id for gpu in devices.gpus[start : start + count])
        places.append(_Place(count, order | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}, gpus=gpus))
        start += count
    return places


def _on_cores(machine: Machine, wish: Wish, ranks: Sequence[int]) -> tuple[tuple[int, ...], list[_Place]]:
    """The gateway's cores too."""
    if max(ranks) > 1 and sum(ranks) > machine.cpus:
        raise UserError(f"{sum(ranks)} ranks of tensor parallelism for {machine.cpus} cores: take a smaller --tensor-parallel")
    space = {}
    if not _is_set(wish, "VLLM_CPU_KVCACHE_SPACE"):
        space = {"VLLM_CPU_KVCACHE_SPACE": str(_kv_gib(machine.memory_bytes, len(ranks), wish.weights_bytes))}
    gateway, shares = share_cores(machine, len(ranks))
    return gateway, [
        _Place(count, space | _threads(share, count), cores=share.cores) for count, share in zip(ranks, shares, strict=True)
    ]


def _threads(share: CoreShare, ranks: int) -> dict[str, str]:
    if not share.cores:  # vLLM's own "auto" would bind every engine of a machine to the same ones
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(max(1, share.threads // ranks))}
    bounds = [len(share.cores) * rank // ranks for rank in range(ranks + 1)]
    parts = (share.cores[start:stop] for start, stop in pairwise(bounds))
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, part)) for part in parts)}


def _kv_gib(memory_bytes: int | None, engines: int, weights_bytes: int | None) -> int:
    if memory_bytes is None:
        return CPU_KV_GIB
    room = memory_bytes / engines - (weights_bytes or 0) - CPU_OVERHEAD_BYTES
    gib = int(room // (1 << 30))
    if gib < 1:
        needed = engines * ((weights_bytes or 0) + CPU_OVERHEAD_BYTES + (1 << 30))
        raise UserError(
            f"too little memory: {_engines(engines)} with this model take at least {needed / 1e9:.1f} GB, "
            f"{memory_bytes / 1e9:.1f} GB are free; ask for fewer workers or take a smaller --model"
        )
    return min(gib, CPU_KV_GIB)


def _check_gpu_memory(gpus: tuple[Gpu, ...], tensor_parallel: int, weights_bytes: int | None) -> None:
    smallest = min((gpu.memory_bytes for gpu in gpus if gpu.memory_bytes is not None), default=None)
    if smallest is None or weights_bytes is None:
        return
    share_bytes = weights_bytes / tensor_parallel
    if share_bytes > GPU_USABLE_RATIO * smallest:
        raise UserError(
            f"the model does not fit: {share_bytes / 1e9:.0f} GB of weights for each GPU of {smallest / 1e9:.0f} GB; "
            f"spread each engine over more of them than --tensor-parallel {tensor_parallel}"
        )


def _decode_parallel(wish: Wish) -> int:
    """A decode engine's ranks each read from one rank of a prefill engine: 4 may read from 1, but not 1 from 4."""
    decode = wish.decode_tensor_parallel or wish.tensor_parallel
    if decode % wish.tensor_parallel:
        raise UserError(
            f"--decode-tensor-parallel {decode} is no multiple of --tensor-parallel {wish.tensor_parallel}: "
            "the engines could not hand KV over"
        )
    return decode


def _whole_lease(lease_s: float) -> int:
    if lease_s < SHORTEST_LEASE_S or lease_s != int(lease_s):
        raise UserError(
            f"vLLM's lease is a whole number of seconds, {SHORTEST_LEASE_S} or more: lease_s = {lease_s:g} in [routing] is not"
        )
    return int(lease_s)


def _check_extra(extra: tuple[str, ...]) -> None:
    for word in extra:
        name = word.partition("=")[0].partition(".")[0].replace("_", "-")
        if name in _OURS:
            instead = f": give {_OURS[name]} instead" if _OURS[name] else ""
            raise UserError(f"--engine-args has {name}, which is set here{instead}")


def _option(words: tuple[str, ...], name: str) -> str | None:
    """The last value of one of vLLM's options, however it is written."""
    found = None
    for position, word in enumerate(words):
        given, equals, value = word.partition("=")
        if given == name:
            found = value if equals else "".join(words[position + 1 : position + 2])
    return found or None


def _is_set(wish: Wish, name: str) -> bool:
    return name.startswith(_TUNING) and name in (wish.environment or {})


def _in_front(wish: Wish, name: str, value: str) -> str:
    """A folder for the linker goes before those that it is told already."""
    told = (wish.environment or {}).get(name) if name == "LD_LIBRARY_PATH" else None
    return f"{value}:{told}" if told else value


def _expected_efa(fabric: Fabric, wish: Wish) -> tuple[str, ...]:
    """Images for EFA set this; on a machine or in a container without the cards nothing else would tell."""
    if (wish.environment or {}).get("FI_PROVIDER") != "efa" or fabric.over == "EFA":
        return ()
    return (f"the environment says FI_PROVIDER=efa, but KV will go over {fabric.over}: no EFA device is used",)


def _notes(devices: Devices, used: int, common: _Common) -> list[str]:
    notes = []
    if idle := max(0, len(devices.gpus) - used):
        notes.append(
            f"{idle} of {len(devices.gpus)} GPUs stay idle: --prefill-workers, --decode-workers and --tensor-parallel use them"
        )
    if common.side_host != "127.0.0.1":
        first, last = common.wish.ports[0][1], common.wish.ports[-1][1]
        notes.append(
            f"NIXL's side channel on {common.side_host}, ports {first} to {last}, asks for no key: a private network only"
        )
    elif common.fabric.leaves_machine:
        notes.append("NIXL's side channel is on loopback, for this machine's engines only: --engine-host opens it to others")
    if kept := [name for name, _ in common.fabric.env if _is_set(common.wish, name)]:
        notes.append(f"{', '.join(kept)} from the environment, not from here")
    return notes


def _engines(count: int) -> str:
    return f"{count} vLLM engine{'s' * (count != 1)}"
