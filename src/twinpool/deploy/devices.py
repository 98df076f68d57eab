"""What a machine has for engines and for the KV between them, as plain records: `detect` reads them, plans are made of them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """`id` is what ``CUDA_VISIBLE_DEVICES`` takes. None is unknown: only NVML tells memory and links."""

    id: str
    name: str | None = None
    memory_bytes: int | None = None
    has_nvlink: bool | None = None


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """An active port of an RDMA card that is no EFA and that this process may open. `is_infiniband` or else RoCE."""

    device: str
    number: int
    is_infiniband: bool


@dataclass(frozen=True, slots=True)
class Devices:
    """`closed_efa` and `closed_gpus` are there, but not for this process: a container sees the machine's /sys and /proc whole,
    and of /dev what it was given. `libfabric` is the folder of that library, and `missing_libraries` are those that NIXL needs
    for EFA and that were not found. `address` is where other machines find this one, None when it is on no network."""

    gpus: tuple[Gpu, ...] = ()
    efa: tuple[str, ...] = ()
    rdma: tuple[RdmaPort, ...] = ()
    closed_efa: tuple[str, ...] = ()
    closed_gpus: int = 0
    libfabric: str | None = None
    missing_libraries: tuple[str, ...] = ()
    address: str | None = None
    gpus_in_pci_order: bool = True  # else somebody chose them with CUDA_VISIBLE_DEVICES, in an order of their own
