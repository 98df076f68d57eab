"""Turns what was asked of `serve` into what it runs. All that can be wrong is found here, before anything is started."""

import os
import secrets
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from twinpool.cli.files import read_api_keys, read_config, read_engine_key, read_secret
from twinpool.cli.fleet import Engine, Given, choose_fleet
from twinpool.cli.outputs import check_writable
from twinpool.cli.started import Local, LocalVllm
from twinpool.cli.vllm import find_vllm, plan_dry, plan_here, with_floor
from twinpool.cli.worker import SECRET_VARIABLE, require_engine
from twinpool.cli.worker_log import Terminal, WorkerLog
from twinpool.config import BalanceMode, Config, RoutingPolicy
from twinpool.deploy.plan import Footprint, Plan, Wanted, plan_workers
from twinpool.deploy.vllm import VllmPlan
from twinpool.errors import UserError
from twinpool.machine import read_machine

if TYPE_CHECKING:
    from twinpool.worker.models import ModelFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(Given):
    """The options of `serve`. None was not given, and leaves the configuration's value."""

    config: Path | None = None
    host: str | None = None
    port: int | None = None
    admin_port: int | None = None
    admin_token_file: Path | None = None
    api_key_file: Path | None = None
    engine_api_key_file: Path | None = None
    slo_ttft_s: float | None = None
    slo_itl_s: float | None = None
    balance: str | None = None
    refuse_late: bool | None = None
    learnt: str | None = None
    handoff_floor_gb_s: float | None = None
    expose_route: bool | None = None
    journal: Path | None = None
    access_log: Path | None = None
    log: str | None = None


@dataclass(frozen=True, slots=True)
class Service:
    """All that was decided. `fleet`: engines that run already, or workers to start. `engine_keys`: what each engine wants to
    see before it answers, by its id; `engine_key` is for those that join later."""

    config: Config
    api_keys: frozenset[str]
    admin_token: str | None
    journal: Path | None
    access_log: Path | None
    fleet: tuple[Engine, ...] | Local | LocalVllm
    learnt: Path | None = None
    engine_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    engine_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class DryRun:
    """What would be served from what."""

    url: str
    admin_url: str
    model: str | None
    engines: tuple[Engine, ...]
    plan: Plan | None
    vllm: VllmPlan | None = None
    vllm_key: str | None = None  # where the engines' key is from, which is shown nowhere
    handoff_floor_gb_s: float | None = None


def prepare(asked: Asked) -> Service:
    """May take minutes when the model has to be fetched. Raises `UserError`."""
    config = configure(asked)
    fleet = choose_fleet(config, asked)
    api_keys = read_api_keys(asked.api_key_file)
    admin_token = read_secret(asked.admin_token_file, "--admin-token-file") if asked.admin_token_file else None
    check_writable(journal=asked.journal, access_log=asked.access_log, log=asked.log)
    _check_port(config.server.host, config.server.port, "--port")
    _check_port(config.server.admin_host, config.server.admin_port, "--admin-port")
    common = asked.engine_api_key_file or config.server.engine_api_key_file
    engine_key = read_engine_key(Path(common)) if common is not None else None
    engines: tuple[Engine, ...] | Local | LocalVllm
    if not isinstance(fleet, Wanted):
        engines, engine_keys = fleet, _engine_keys(fleet, engine_key)
    elif asked.is_vllm:
        engines = _local_vllm(asked, config, fleet, engine_key)
        config, engine_keys = with_floor(config, engines.plan.fabric), dict.fromkeys(engines.ids, engines.api_key)
    else:
        engines, engine_keys = _local(asked, config, fleet), {}
    learnt = _learnt_file(asked.learnt, config)
    return Service(config, api_keys, admin_token, asked.journal, asked.access_log, engines, learnt, engine_keys, engine_key)


def _engine_keys(engines: Iterable[Engine], common: str | None) -> dict[str, str]:
    """A file each, or one for all that have none: a key that stands in a configuration is a key in every backup of it."""
    keys = {engine.id: read_engine_key(Path(engine.api_key_file)) if engine.api_key_file else common for engine in engines}
    return {engine: key for engine, key in keys.items() if key is not None}


def dry_run(asked: Asked) -> DryRun:
    """Fetches nothing and starts nothing."""
    config = configure(asked)
    fleet = choose_fleet(config, asked)
    server = config.server
    url, admin_url = f"http://{server.host}:{server.port}", f"http://{server.admin_host}:{server.admin_port}"
    if not isinstance(fleet, Wanted):
        return DryRun(url, admin_url, None, fleet, None)
    if asked.is_vllm:
        plan = plan_dry(config, asked, fleet)
        file = asked.engine_api_key_file or config.server.engine_api_key_file
        floor = with_floor(config, plan.fabric).routing.handoff_floor_gb_s
        return DryRun(url, admin_url, asked.model, (), None, plan, f"the key in {file}" if file else "a fresh key", floor)
    name, footprint = _peek(asked.model)
    return DryRun(url, admin_url, name, (), plan_workers(read_machine(), fleet, footprint))


def configure(asked: Asked) -> Config:
    """The configuration tree with the options laid over it."""
    config = read_config(asked.config, None if asked.balance is None else BalanceMode(asked.balance))
    server = {name: getattr(asked, name) for name in ("host", "port", "admin_port", "expose_route")}
    objectives = {name: getattr(asked, name) for name in ("slo_ttft_s", "slo_itl_s")}
    routing = {name: getattr(asked, name) for name in ("handoff_floor_gb_s", "refuse_late")}
    config = msgspec.structs.replace(
        config,
        server=msgspec.structs.replace(config.server, **_given(server)),
        objectives=msgspec.structs.replace(config.objectives, **_given(objectives)),
        routing=msgspec.structs.replace(config.routing, **_given(routing)),
    )
    if config.routing.refuse_late and config.routing.policy is not RoutingPolicy.LEAST_COST:
        raise UserError('refusing what would be late takes predictions: --balance auto, or [routing] policy = "least_cost"')
    return config


def _given(values: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}


def _check_port(host: str, port: int, option: str) -> None:
    """Before a model is fetched and engines start for nothing. The gateway finds out for certain when it binds."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as taken:
        raise UserError(f"cannot listen on {host}:{port} ({taken.strerror}): choose another with {option}") from None


def _local(asked: Asked, config: Config, wanted: Wanted) -> Local:
    require_engine()
    model = _fetch_model(asked.model)
    plan = plan_workers(read_machine(), wanted, _footprint(model.path))
    secret = read_secret(asked.handoff_secret_file, "--handoff-secret-file") if asked.handoff_secret_file else None
    # Workers of one `serve` need to know no other: a fresh secret is as good as any.
    secret = secret or os.environ.get(SECRET_VARIABLE) or secrets.token_hex(32)
    return Local(plan, model.path, model.name, config.routing.lease_s, _open_log(asked.log, config.server.port), secret)


def _local_vllm(asked: Asked, config: Config, wanted: Wanted, key: str | None) -> LocalVllm:
    """Without a key of their own the engines get a fresh one: nobody but this gateway needs to know it."""
    if asked.device_root is not None:
        raise UserError("--device-root is another machine's devices: it goes with --dry-run only")
    plan = plan_here(config, asked, wanted, find_vllm(asked.vllm))
    return LocalVllm(plan, config.launch.start_s, _open_log(asked.log, config.server.port), key or secrets.token_hex(32))


def _fetch_model(spec: str | None) -> "ModelFile":
    from twinpool.worker.models import open_progress, resolve_model

    with open_progress() as progress:
        return resolve_model(spec, progress)


def _footprint(model: Path) -> Footprint:
    from twinpool.worker.gguf_header import read_header

    header = read_header(model)
    return Footprint(model.stat().st_size, header.kv_bytes_per_token, header.context_tokens)


def _peek(spec: str | None) -> tuple[str, Footprint]:
    """A model's name and what is known of it without fetching it."""
    from twinpool.worker.models.catalogue import DEFAULT_MODEL, models_folder

    if spec is None:
        path = models_folder() / DEFAULT_MODEL.result.name
        return DEFAULT_MODEL.name, _footprint(path) if path.exists() else Footprint(DEFAULT_MODEL.result.size_bytes)
    path = Path(spec).expanduser()
    return spec, _footprint(path) if path.exists() or path.suffix == ".gguf" else Footprint(0)


def _learnt_file(where: str | None, config: Config) -> Path | None:
    """None where nothing is learnt or kept. A service on any free port is not told from others: its file would be theirs."""
    learns = config.balance.mode is not BalanceMode.OFF or config.routing.policy is RoutingPolicy.LEAST_COST
    if where == "-" or not learns:
        return None
    if where:
        return Path(where)
    from twinpool.worker.models.catalogue import models_folder

    with suppress(UserError):  # no home: nothing is kept
        return models_folder().parent / "learnt" / f"serve-{config.server.port}.json" if config.server.port else None
    return None


def _open_log(where: str | None, port: int) -> WorkerLog | Terminal:
    from twinpool.worker.models.catalogue import models_folder

    if where == "-":
        return Terminal()
    return WorkerLog(Path(where) if where else models_folder().parent / "logs" / f"serve-{port}.log")
