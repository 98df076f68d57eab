"""Which engines a `serve` is about: some that run already, or some to be started here. Never both: two fleets that cannot hand
KV to each other would look like one."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from twinpool.config import Attached, Config, Declared, declared_of
from twinpool.core.model import Role
from twinpool.deploy.plan import Wanted
from twinpool.engines.facts import why_not_roles
from twinpool.errors import UserError
from twinpool.http1.urls import parse_url, without_password

ALL_ROLES = tuple(role.value for role in Role)

_COUNTS = ("prefill_workers", "decode_workers", "colocated_workers")
_EMBEDDED_ONLY = ("handoff_secret_file",)
_VLLM_ONLY = (
    *("vllm", "model_name", "tensor_parallel", "decode_tensor_parallel", "max_num_batched_tokens", "max_num_seqs"),
    *("nixl_backend", "engine_host", "engine_args", "device_root"),
)


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine that the gateway is to attach to. It may only take the roles that it is allowed."""

    id: str
    url: str
    role: str
    allowed_roles: tuple[str, ...]
    declared: Declared = Declared()
    api_key_file: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What the command line says of engines. A number is None when it was not given."""

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    colocated: tuple[str, ...] = ()
    prefill_workers: int | None = None
    decode_workers: int | None = None
    colocated_workers: int | None = None
    model: str | None = None
    handoff_secret_file: Path | None = None
    engine: str | None = None
    vllm: str | None = None
    model_name: str | None = None
    tensor_parallel: int | None = None
    decode_tensor_parallel: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    nixl_backend: str | None = None
    engine_host: str | None = None
    engine_args: str | None = None
    device_root: Path | None = None

    @property
    def is_vllm(self) -> bool:
        return self.engine == "vllm"

    def local_options(self) -> list[str]:
        """The options given that only make sense for engines started here."""
        return self._given("engine", *_COUNTS, "model", *_EMBEDDED_ONLY, *_VLLM_ONLY)

    def check_engine(self) -> None:
        """Raises `UserError` for an option that the engines to be started do not have."""
        if self.is_vllm and (foreign := self._given(*_EMBEDDED_ONLY)):
            raise UserError(f"{foreign[0]} is for the embedded engine, and vLLM has no use for it")
        if not self.is_vllm and (foreign := self._given(*_VLLM_ONLY)):
            raise UserError(f"{foreign[0]} is for vLLM: give --engine vllm as well")

    def _given(self, *names: str) -> list[str]:
        return [f"--{name.replace('_', '-')}" for name in names if getattr(self, name) is not None]


def choose_fleet(config: Config, given: Given) -> tuple[Engine, ...] | Wanted:
    """Engines to attach to, or numbers of workers to start. Raises `UserError` when asked for both."""
    flags = [
        Attached(url=url, role=role)
        for role, urls in (("prefill", given.prefill), ("decode", given.decode), ("colocated", given.colocated))
        for url in urls
    ]
    attached = flags or config.workers
    if not attached:
        given.check_engine()
        return _wanted(given)
    if clash := given.local_options():
        where = "--prefill, --decode and --colocated attach" if flags else "the workers of the config file mean attaching"
        raise UserError(f"{where} to engines that run already, {clash[0]} starts some here: give one or the other")
    return tuple(_engines(attached))


def _wanted(given: Given) -> Wanted:
    """One of each by default; whoever asks for colocated workers wants of the others only what was asked for."""
    default = 0 if given.colocated_workers else 1
    return Wanted(
        prefill=default if given.prefill_workers is None else given.prefill_workers,
        decode=default if given.decode_workers is None else given.decode_workers,
        colocated=given.colocated_workers or 0,
    )


def _engines(attached: Iterable[Attached]) -> Iterable[Engine]:
    counts = dict.fromkeys(ALL_ROLES, 0)
    seen: set[str] = set()
    for one in attached:
        for role in (one.role, *one.allowed_roles):
            if role not in counts:
                raise UserError(f"{one.url} has the role {role!r}: it can be {', '.join(ALL_ROLES)}")
        url = engine_url(one.url)
        if url in seen:
            raise UserError(f"{url} is given twice: an engine that does both is --colocated, or has allowed_roles in --config")
        seen.add(url)
        allowed = one.allowed_roles or (one.role,)
        if one.role not in allowed:
            raise UserError(f"{one.url} has the role {one.role} that its allowed_roles leave out")
        if why_not := why_not_roles(tuple(map(Role, allowed)), one):
            raise UserError(f"{one.url} may be {', '.join(allowed)}: {why_not}")
        yield Engine(f"{one.role}-{counts[one.role]}", url, one.role, allowed, declared_of(one), one.api_key_file)
        counts[one.role] += 1


def engine_url(text: str) -> str:
    """The engine's root, from what people paste: ``host:port``, a trailing slash, or the ``/v1`` that clients want."""
    try:
        found = parse_url(text)
    except ValueError as why:
        raise UserError(f"{without_password(text)!r} is not an engine's URL, {why}: write http://host:port") from None
    if found.path.rstrip("/").removesuffix("/v1"):
        raise UserError(f"{text!r} is not an engine's URL: write http://host:port")
    host = f"[{found.host}]" if ":" in found.host else found.host
    return f"{found.scheme}://{host}{f':{found.port}' if found.port else ''}"
