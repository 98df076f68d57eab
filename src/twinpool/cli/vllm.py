"""What `serve --engine vllm` finds out before the plan: the program, the model's files, free ports, the key."""

import errno
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from twinpool.cli.fleet import Given
from twinpool.config import Config
from twinpool.deploy.detect import read_devices
from twinpool.deploy.devices import Devices
from twinpool.deploy.fabric import Fabric, choose_fabric
from twinpool.deploy.plan import Wanted
from twinpool.deploy.vllm import VllmPlan, Wish, plan_vllm, side_channel_host
from twinpool.errors import UserError
from twinpool.machine import read_machine

PORTS_TRIED = 1000  # from the first on; a machine where all those are taken has another problem


def plan_dry(config: Config, given: Given, wanted: Wanted) -> VllmPlan:
    """Without vLLM being there: that it is not is a warning."""
    if given.device_root is not None:
        return plan_here(config, given, wanted, given.vllm or "vllm")
    found = _locate(given.vllm)
    plan = plan_here(config, given, wanted, found or given.vllm or "vllm")
    return plan if found else replace(plan, warnings=(*plan.warnings, _missing(given.vllm)))


def plan_here(config: Config, given: Given, wanted: Wanted, executable: str) -> VllmPlan:
    """For this machine as it is now, or for the one whose devices lie under `given.device_root`. Raises `UserError`."""
    if given.model is None:
        raise UserError("--engine vllm needs a model: --model FOLDER, or the name of one on the Hugging Face hub")
    here = given.device_root is None
    devices = read_devices(env=os.environ) if given.device_root is None else read_devices(given.device_root)
    fabric = choose_fabric(devices, given.nixl_backend or "auto")
    model = Path(given.model).expanduser()
    is_local = model.is_dir() or model.is_file()
    launch = config.launch
    return plan_vllm(
        read_machine() if given.device_root is None else read_machine(given.device_root),
        devices,
        fabric,
        Wish(
            model=str(model) if is_local else given.model,
            model_name=given.model_name or (model.resolve().name if is_local else given.model),
            executable=executable,
            wanted=wanted,
            lease_s=config.routing.lease_s,
            ports=_ports(config, given, fabric, devices, len(wanted.named()), look=here),
            tensor_parallel=given.tensor_parallel or 1,
            decode_tensor_parallel=given.decode_tensor_parallel,
            budget_tokens=given.max_num_batched_tokens or launch.max_num_batched_tokens,
            sequences=given.max_num_seqs or launch.max_num_seqs,
            host=given.engine_host,
            extra=_words(given.engine_args or ""),
            environment=os.environ if here else {},
            weights_bytes=_weights_bytes(model) if is_local else None,
        ),
    )


def with_floor(config: Config, fabric: Fabric) -> Config:
    """A floor that somebody stated wins; 0 is none."""
    if config.routing.handoff_floor_gb_s is not None:
        return config
    routing = msgspec.structs.replace(config.routing, handoff_floor_gb_s=fabric.handoff_floor_gb_s)
    return msgspec.structs.replace(config, routing=routing)


def find_vllm(given: str | None) -> str:
    """Its command, or a `UserError` that says how to come by it."""
    if (found := _locate(given)) is None:
        raise UserError(_missing(given))
    return found


def _locate(given: str | None) -> str | None:
    """As given, on the PATH, or beside this interpreter, where it is when both are in one environment."""
    if given is not None:
        return shutil.which(os.path.expanduser(given))
    return shutil.which("vllm") or shutil.which("vllm", path=str(Path(sys.executable).parent))


def _missing(given: str | None) -> str:
    if given is not None:
        return f"no such program: {given} (given with --vllm): give vLLM's own command, ENVIRONMENT/bin/vllm"
    return "vLLM is not installed here: pip install vllm nixl, or give its command with --vllm PATH"


def _ports(
    config: Config, given: Given, fabric: Fabric, devices: Devices, engines: int, *, look: bool
) -> tuple[tuple[int, int], ...]:
    """One for HTTP and one for the side channel each. `look` takes only those that are free now."""
    host = given.engine_host or "127.0.0.1"
    side_host = side_channel_host(fabric, given.engine_host, devices.address)
    http = _free(host, config.launch.port, look=look)
    # Older vLLMs take a further port of the side channel for each rank of tensor parallelism.
    ranks = max(given.tensor_parallel or 1, given.decode_tensor_parallel or 1)
    side = _free(side_host, config.launch.side_channel_port, step=ranks, look=look)
    return tuple((next(http), next(side)) for _ in range(engines))


def _free(host: str, first: int, *, look: bool, step: int = 1) -> Iterator[int]:
    for port in range(first, min(first + PORTS_TRIED * step, 65536), step):
        if not look or _is_free(host, port):
            yield port
    raise UserError(f"no free port for engines from {first} on: choose others in the configuration's [launch]")


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the engine does: old connections are no obstacle
        try:
            probe.bind((host, port))
        except OSError as problem:
            if problem.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise UserError(f"{host} is no address of this machine ({problem.strerror}): give --engine-host one") from None
            return False
        return True


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as problem:
        raise UserError(f"--engine-args {text!r}: {problem}") from None


def _weights_bytes(model: Path) -> int | None:
    """What the model's weights take, from their files. None where there are none of a known kind."""
    files: Iterable[Path] = [model] if model.is_file() else model.glob("*.safetensors")
    if not (sizes := [size for file in files if (size := _size(file))]):
        sizes = [size for file in model.glob("*.bin") if (size := _size(file))]
    return sum(sizes) or None


def _size(file: Path) -> int:
    with suppress(OSError):
        return file.stat().st_size
    return 0
