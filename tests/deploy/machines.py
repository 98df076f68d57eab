"""Folders that look like the /sys, /proc and /dev of four machines, for `detect` and for ``--device-root``."""

from pathlib import Path

EFA_CARDS = ("rdmap79s0", "rdmap80s0", "rdmap96s0", "rdmap97s0")  # as a p5 instance names them
MLX_CARDS = ("mlx5_0", "mlx5_1", "mlx5_2")


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def host(root: Path, *, cores: str = "0-3", memory_kb: int = 32_000_000) -> Path:
    return write(root, {"sys/devices/system/cpu/online": cores, "proc/meminfo": f"MemAvailable: {memory_kb} kB\n"})


def gpus(root: Path, count: int, *, opened: int | None = None, model: str = "NVIDIA H100 80GB HBM3") -> Path:
    """`opened` of them, or all, are in /dev."""
    for number in range(count):
        information = f"Model: \t\t {model}\nIRQ:   \t\t 16\nGPU UUID: \t GPU-{number}\nDevice Minor: \t {number}\n"
        write(root, {f"proc/driver/nvidia/gpus/0000:{number:02x}:00.0/information": information})
    return write(root, {f"dev/nvidia{number}": "" for number in range(count if opened is None else opened)})


def card(root: Path, name: str, number: int, *, vendor: str, driver: str, is_open: bool = True) -> Path:
    base = root / "sys/class/infiniband" / name
    write(root, {f"sys/class/infiniband/{name}/device/vendor": f"{vendor}\n"})
    (base / "device/infiniband_verbs" / f"uverbs{number}").mkdir(parents=True)
    (root / "sys/bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
    (base / "device/driver").symlink_to(Path("../../../../bus/pci/drivers") / driver)
    if is_open:
        write(root, {f"dev/infiniband/uverbs{number}": ""})
    return base


def port(base: Path, number: int, *, link_layer: str, state: str = "4: ACTIVE", lid: str = "0x1") -> None:
    write(base / "ports" / str(number), {"link_layer": f"{link_layer}\n", "state": f"{state}\n", "lid": f"{lid}\n"})


def efa_machine(root: Path, *, is_open: bool = True) -> Path:
    """Two GPUs, four EFA cards. In a container without the device plugin the cards are not `is_open`."""
    gpus(host(root), 2)
    write(root, {"opt/amazon/efa/lib/libfabric.so.1": "", "usr/lib/x86_64-linux-gnu/libhwloc.so.15": ""})
    for number, name in enumerate(EFA_CARDS):
        card(root, name, number, vendor="0x1d0f", driver="efa", is_open=is_open)
    return root


def infiniband_machine(root: Path) -> Path:
    """Eight GPUs; two InfiniBand ports that are up, one that is down, one bond without a local id, and Ethernet for storage."""
    gpus(host(root), 8)
    for number, name in enumerate(MLX_CARDS):
        base = card(root, name, number, vendor="0x15b3", driver="mlx5_core")
        port(base, 1, link_layer="InfiniBand", state="1: DOWN" if name == "mlx5_2" else "4: ACTIVE")
    port(card(root, "mlx5_10", 10, vendor="0x15b3", driver="mlx5_core"), 1, link_layer="Ethernet", lid="0x0")
    port(card(root, "mlx5_bond_0", 11, vendor="0x15b3", driver="mlx5_core"), 1, link_layer="InfiniBand", lid="0x0")
    return root


def gpu_machine(root: Path) -> Path:
    return gpus(host(root), 4, model="NVIDIA L40S")


def plain_machine(root: Path) -> Path:
    return host(root)


MACHINES = {"efa": efa_machine, "infiniband": infiniband_machine, "gpus": gpu_machine, "none": plain_machine}
