"""Reads which devices this process may use: GPUs, EFA, InfiniBand, RoCE.

All but NVML is read from files under `root`, so a folder that looks like another machine's /sys, /proc and /dev will do for it.
"""

import importlib
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from twinpool.deploy.devices import Devices, Gpu, RdmaPort

AMAZON = "0x1d0f"  # PCI vendor; the EFA cards' device ids are 0xefa0, 0xefa1, …

# What NIXL's plugin for EFA is linked with and its wheel does not bring: of AWS's installer, and of hwloc.
LIBFABRIC, HWLOC = "libfabric.so.1", "libhwloc.so.15"
_AMAZON_FOLDERS = ("opt/amazon/efa/lib64", "opt/amazon/efa/lib")
_LIBRARY_FOLDERS = (
    *("usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu"),
    *("usr/local/lib64", "usr/local/lib", "usr/lib"),
)

_NOWHERE = ("192.0.2.1", 9)  # an address of RFC 5737 that nobody has; to connect a UDP socket sends nothing


def read_devices(root: Path = Path("/"), env: Mapping[str, str] | None = None) -> Devices:
    """`env` says which GPUs were chosen already (``CUDA_VISIBLE_DEVICES``); None for another machine's."""
    efa, closed_efa = _efa(root)
    libfabric = _folder_of(root, LIBFABRIC)
    missing = [LIBFABRIC] if libfabric is None else []
    missing += [HWLOC] if _folder_of(root, HWLOC) is None else []
    gpus, closed = _gpus(root)
    chosen = (env or {}).get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        gpus = _chosen(gpus, chosen)
    return Devices(
        gpus=gpus,
        efa=efa,
        rdma=tuple(_rdma_ports(root)),
        closed_efa=closed_efa,
        closed_gpus=closed,
        libfabric=libfabric if efa else None,
        missing_libraries=tuple(missing) if efa else (),
        address=_address() if root == Path("/") else None,
        gpus_in_pci_order=chosen is None,
    )


def _efa(root: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of those this process may open, and of those it may not."""
    cards = {card.name: _can_open(root, card) for card in _cards(root) if _is_efa(card)}
    usable = tuple(name for name, can_open in cards.items() if can_open)
    if cards:
        return usable, tuple(name for name in cards if name not in usable)
    return (), tuple(device.name for device in _listed(root / "sys/bus/pci/devices") if _is_efa_function(device))


def _is_efa(card: Path) -> bool:
    driver = card / "device/driver"
    return _text(card / "device/vendor") == AMAZON or (driver.is_symlink() and driver.readlink().name == "efa")


def _is_efa_function(device: Path) -> bool:
    """One on the PCI bus that no driver has taken, or whose driver this container is not shown."""
    return _text(device / "vendor") == AMAZON and _text(device / "device").startswith("0xefa")


def _folder_of(root: Path, library: str) -> str | None:
    return next((f"/{name}" for name in (*_AMAZON_FOLDERS, *_LIBRARY_FOLDERS) if (root / name / library).exists()), None)


def _rdma_ports(root: Path) -> Iterator[RdmaPort]:
    for card in _cards(root):
        if _is_efa(card) or not _can_open(root, card):
            continue
        for port in _listed(card / "ports"):
            is_infiniband = _text(port / "link_layer") != "Ethernet"
            # A bonded InfiniBand card has the local id 0, with which UCX fails: it is of no use.
            has_id = not is_infiniband or int(_text(port / "lid") or "1", 0) != 0
            if port.name.isdecimal() and "ACTIVE" in _text(port / "state") and has_id:
                yield RdmaPort(card.name, int(port.name), is_infiniband)


def _cards(root: Path) -> list[Path]:
    return _listed(root / "sys/class/infiniband")


def _can_open(root: Path, card: Path) -> bool:
    """Its device of the verbs interface is in /dev. In a container it is only when a device plugin or --device put it there."""
    return any((root / "dev/infiniband" / verbs.name).exists() for verbs in _listed(card / "device/infiniband_verbs"))


def _gpus(root: Path) -> tuple[tuple[Gpu, ...], int]:
    """Those this process may open in the order of the PCI bus, and how many others there are."""
    if root == Path("/") and (told := _ask_nvml()):
        return told, 0
    cards = _listed(root / "proc/driver/nvidia/gpus")
    usable: list[Gpu] = []
    for card in cards:
        told_text = _text(card / "information")
        facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in told_text.splitlines())}
        if (root / f"dev/nvidia{facts.get('Device Minor', '')}").exists() and facts.get("Device Minor"):
            usable.append(Gpu(str(len(usable)), facts.get("Model")))
    if cards:
        return tuple(usable), len(cards) - len(usable)
    nodes = [node for node in _listed(root / "dev") if node.name.startswith("nvidia") and node.name[6:].isdecimal()]
    return tuple(Gpu(str(number)) for number in range(len(nodes))), 0


def _chosen(gpus: tuple[Gpu, ...], chosen: str) -> tuple[Gpu, ...]:
    """As CUDA reads it: indices or UUIDs, up to the first that makes no sense to it, such as -1 or nothing."""
    known = {gpu.id: gpu for gpu in gpus}
    ids = [one.strip() for one in chosen.split(",")]
    ends = next((number for number, one in enumerate(ids) if not one or one.startswith("-")), len(ids))
    return tuple(known.get(one, Gpu(one)) for one in ids[:ends])


def _ask_nvml() -> tuple[Gpu, ...]:
    """Empty where NVML's package (``pip install nvidia-ml-py``) or its driver is not there."""
    try:
        nvml: Any = importlib.import_module("pynvml")  # no dependency of ours: vLLM brings it
    except ImportError:
        return ()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        return tuple(_nvml_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    finally:
        nvml.nvmlShutdown()


def _nvml_gpu(nvml: Any, index: int) -> Gpu:
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    name = nvml.nvmlDeviceGetName(device)
    try:
        has_nvlink = bool(nvml.nvmlDeviceGetNvLinkState(device, 0))
    except nvml.NVMLError:
        has_nvlink = False  # a card without the links does not know the question
    return Gpu(
        id=str(index),
        name=name.decode() if isinstance(name, bytes) else name,
        memory_bytes=nvml.nvmlDeviceGetMemoryInfo(device).total,
        has_nvlink=has_nvlink,
    )


def _address() -> str | None:
    """The one by which packets leave this machine."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_NOWHERE)
        return str(probe.getsockname()[0])
    return None


def _listed(folder: Path) -> list[Path]:
    """In the order that people count in: mlx5_2 before mlx5_10."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [folder / name for name in sorted(names, key=lambda name: (len(name), name))]


def _text(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return ""
