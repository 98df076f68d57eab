"""Over what engines of one machine's kind hand KV to each other: the fastest way their devices allow, and how NIXL is told.

    EFA          ──▶ NIXL's LIBFABRIC backend     UCX cannot do RDMA on EFA and falls to a tenth of the speed without a word
    InfiniBand   ──▶ UCX over RDMA                without TCP to fall back to: a broken fabric fails at the start
    GPUs         ──▶ UCX over NVLink or PCIe      CUDA IPC, from GPU to GPU
    nothing      ──▶ UCX over shared memory       KV lies in the host's memory, and TCP reaches other machines

Sources: EC2's "Get started with EFA and NIXL", vLLM's NixlConnector guide, NIXL's libfabric plugin, libfabric's fi_efa(7), and
UCX's FAQ.
"""

from dataclasses import dataclass

from twinpool.deploy.devices import Devices
from twinpool.errors import UserError

# For `handoff_floor_gb_s`, in gigabytes a second. A floor is no wish: under it, the bytes have certainly gone another way.
EFA_FLOOR_GB_S = 2.0
RDMA_FLOOR_GB_S = 4.0
GPU_FLOOR_GB_S = 4.0

_EFA_FLOOR = "TCP and emulated RDMA reach 0.1 to 1 GB/s on the machines where four EFA cards reach 9.6"
_RDMA_FLOOR = "TCP reaches 1 to 3 GB/s where one 100 Gbit/s port reaches 10"
_GPU_FLOOR = "staging through the host reaches 1 to 3 GB/s where the slowest PCIe x16 link between two GPUs reaches 10"
_NO_FLOOR = "there is no faster way that it could have fallen from"


@dataclass(frozen=True, slots=True)
class Fabric:
    """`backend` is NIXL's; `over` and `reason` are for people. `env` is what the engines find in their environment.

    `buffer_device` is where the KV lies that is handed over; `leaves_machine` says whether it reaches engines elsewhere.
    `handoff_floor_gb_s` is None where none makes sense. `warnings` must not be overlooked.
    """

    backend: str
    over: str
    reason: str
    env: tuple[tuple[str, str], ...]
    buffer_device: str
    leaves_machine: bool
    handoff_floor_gb_s: float | None
    floor_reason: str
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def choose_fabric(devices: Devices, backend: str = "auto") -> Fabric:
    """`backend` is ``auto``, ``libfabric`` or ``ucx``. Raises `UserError` for LIBFABRIC where there is no EFA to use."""
    warnings = _warnings(devices)
    if backend == "libfabric" and not devices.efa:
        why = warnings[0] if devices.closed_efa else "there is none on this machine"
        raise UserError(f"--nixl-backend libfabric needs an EFA device: {why}")
    if devices.efa and backend != "ucx":
        return _efa(devices, warnings)
    if devices.rdma:
        return _rdma(devices, warnings)
    return _gpus(devices, warnings) if devices.gpus else _host(warnings)


def _efa(devices: Devices, warnings: tuple[str, ...]) -> Fabric:
    notes = ["EFA has no short cut within a machine: the KV of engines that share this one goes out by a card and back in"]
    linker: tuple[tuple[str, str], ...] = ()
    if devices.libfabric is not None and devices.libfabric.startswith("/opt/"):  # not a folder that the linker knows of itself
        linker = (("LD_LIBRARY_PATH", devices.libfabric),)
    if devices.missing_libraries:
        missing = " and ".join(devices.missing_libraries)
        warnings += (
            f"NIXL's LIBFABRIC backend needs {missing}, not found on this machine: engines will end at their start. "
            "Install AWS's EFA software (aws-efa-installer) and hwloc (libhwloc15)",
        )
    if devices.gpus:
        notes.append("where all engines are on this machine for good, --nixl-backend ucx hands over from GPU to GPU")
    return Fabric(
        backend="LIBFABRIC",
        over="EFA",
        reason=f"{_count(len(devices.efa), 'EFA device')} ({_some(devices.efa)}), which UCX cannot drive with RDMA",
        env=(
            *linker,
            ("FI_PROVIDER", "efa"),  # else libfabric takes TCP when EFA does not come up, and says nothing
            ("FI_EFA_USE_DEVICE_RDMA", "1"),  # ends the engine where the card has no RDMA, rather than emulating it
            ("FI_EFA_ENABLE_SHM_TRANSFER", "0"),  # its path within one machine copies GPU memory as if it were the host's
        ),
        buffer_device=_buffer_device(devices),
        leaves_machine=True,
        handoff_floor_gb_s=EFA_FLOOR_GB_S,
        floor_reason=_EFA_FLOOR,
        notes=tuple(notes),
        warnings=warnings,
    )


def _rdma(devices: Devices, warnings: tuple[str, ...]) -> Fabric:
    """Where there is InfiniBand, Ethernet ports are for storage and for people."""
    ports = tuple(port for port in devices.rdma if port.is_infiniband) or devices.rdma
    over = "InfiniBand" if ports[0].is_infiniband else "RoCE"
    names = tuple(f"{port.device}:{port.number}" for port in ports)
    tls = "rc,cuda_copy,cuda_ipc,sm,self" if devices.gpus else "rc,sm,self"
    return Fabric(
        backend="UCX",
        over=over,
        reason=f"{_count(len(ports), f'active {over} port')} ({_some(names)}), of which UCX takes those near each GPU",
        env=(("UCX_TLS", tls), ("UCX_NET_DEVICES", ",".join(names))),
        buffer_device=_buffer_device(devices),
        leaves_machine=True,
        handoff_floor_gb_s=RDMA_FLOOR_GB_S,
        floor_reason=_RDMA_FLOOR,
        warnings=warnings,
    )


def _gpus(devices: Devices, warnings: tuple[str, ...]) -> Fabric:
    links = [gpu.has_nvlink for gpu in devices.gpus]
    over = "NVLink" if all(links) else "NVLink or PCIe" if None in links or any(links) else "PCIe"
    return Fabric(
        backend="UCX",
        over=over,
        reason=f"{_count(len(devices.gpus), 'GPU')} and no RDMA card, so CUDA IPC from GPU to GPU, and TCP to other machines",
        env=(("UCX_TLS", "cuda_ipc,cuda_copy,sm,self,tcp"),),
        buffer_device="cuda",
        leaves_machine=False,
        handoff_floor_gb_s=GPU_FLOOR_GB_S,
        floor_reason=_GPU_FLOOR,
        warnings=warnings,
    )


def _host(warnings: tuple[str, ...]) -> Fabric:
    return Fabric(
        backend="UCX",
        over="shared memory and TCP",
        reason="no GPU and no RDMA card that this process may use",
        env=(("UCX_TLS", "tcp,sm,self"),),
        buffer_device="cpu",
        leaves_machine=False,
        handoff_floor_gb_s=None,
        floor_reason=_NO_FLOOR,
        warnings=warnings,
    )


def _warnings(devices: Devices) -> tuple[str, ...]:
    said = []
    seen = len(devices.closed_efa) + len(devices.efa)
    if devices.closed_efa and not devices.efa:
        said.append(
            f"this machine has {_count(seen, 'EFA device')} ({_some(devices.closed_efa)}), but none of them is in this "
            "process's /dev/infiniband: KV for other machines will crawl over TCP. Kubernetes: request vpc.amazonaws.com/efa; "
            "docker: --device /dev/infiniband/uverbs0; on the machine itself: install AWS's EFA driver"
        )
    elif devices.closed_efa:
        said.append(f"{len(devices.closed_efa)} of {seen} EFA devices are not in /dev/infiniband: their bandwidth is missing")
    if devices.closed_gpus and not devices.gpus:
        said.append(
            f"this machine has {_count(devices.closed_gpus, 'NVIDIA GPU')}, but none of them is in this process's /dev: "
            "engines will compute on the CPU. Docker: --gpus all; Kubernetes: request nvidia.com/gpu"
        )
    return tuple(said)


def _buffer_device(devices: Devices) -> str:
    return "cuda" if devices.gpus else "cpu"


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names if len(names) <= 4 else (*names[:3], "…", names[-1]))


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
