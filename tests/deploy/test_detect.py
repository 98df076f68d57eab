from pathlib import Path

import pytest
from tests.deploy.machines import (
    EFA_CARDS,
    card,
    efa_machine,
    gpu_machine,
    gpus,
    infiniband_machine,
    plain_machine,
    port,
    write,
)

from twinpool.deploy.detect import read_devices
from twinpool.deploy.devices import Devices, Gpu, RdmaPort


def test_this_machine_is_read() -> None:
    assert isinstance(read_devices(), Devices)


def test_efa_is_told_from_infiniband_and_from_roce(tmp_path: Path) -> None:
    devices = read_devices(efa_machine(tmp_path))
    assert (devices.efa, devices.closed_efa, devices.rdma) == (EFA_CARDS, (), ())
    assert [(gpu.id, gpu.name) for gpu in devices.gpus] == [("0", "NVIDIA H100 80GB HBM3"), ("1", "NVIDIA H100 80GB HBM3")]


def test_what_nixl_needs_for_efa_is_looked_for_where_there_is_efa(tmp_path: Path) -> None:
    devices = read_devices(efa_machine(tmp_path / "efa"))
    assert (devices.libfabric, devices.missing_libraries) == ("/opt/amazon/efa/lib", ())
    card(tmp_path / "bare", "efa_0", 0, vendor="0x1d0f", driver="efa")
    assert read_devices(tmp_path / "bare").missing_libraries == ("libfabric.so.1", "libhwloc.so.15")
    assert read_devices(gpu_machine(tmp_path / "gpus")).missing_libraries == ()


@pytest.mark.parametrize(("vendor", "driver"), [("0x1d0f", "other"), ("", "efa")])
def test_either_the_vendor_or_the_driver_makes_it_efa(tmp_path: Path, vendor: str, driver: str) -> None:
    card(tmp_path, "efa_0", 0, vendor=vendor, driver=driver)
    assert read_devices(tmp_path).efa == ("efa_0",)


def test_a_container_sees_the_cards_and_may_open_only_those_it_was_given(tmp_path: Path) -> None:
    efa_machine(tmp_path, is_open=False)
    devices = read_devices(tmp_path)
    assert (devices.efa, devices.closed_efa) == ((), EFA_CARDS)
    write(tmp_path, {"dev/infiniband/uverbs2": ""})
    devices = read_devices(tmp_path)
    assert devices.efa == (EFA_CARDS[2],)
    assert set(devices.closed_efa) == set(EFA_CARDS) - {EFA_CARDS[2]}


def test_a_card_on_the_bus_that_no_driver_has_taken_is_closed(tmp_path: Path) -> None:
    for address, device in (("0000:00:06.0", "0xefa1"), ("0000:00:05.0", "0xec20")):  # the second is Amazon's Ethernet card
        folder = f"sys/bus/pci/devices/{address}"
        write(tmp_path, {f"{folder}/vendor": "0x1d0f\n", f"{folder}/device": f"{device}\n"})
    assert read_devices(tmp_path).closed_efa == ("0000:00:06.0",)


def test_ports_that_are_down_or_bonded_or_closed_are_of_no_use(tmp_path: Path) -> None:
    infiniband_machine(tmp_path)
    port(card(tmp_path, "mlx5_3", 3, vendor="0x15b3", driver="mlx5_core", is_open=False), 1, link_layer="InfiniBand")
    assert read_devices(tmp_path).rdma == (
        RdmaPort("mlx5_0", 1, is_infiniband=True),
        RdmaPort("mlx5_1", 1, is_infiniband=True),
        RdmaPort("mlx5_10", 1, is_infiniband=False),
    )


def test_gpus_that_are_not_in_dev_are_not_ours(tmp_path: Path) -> None:
    gpus(tmp_path, 4, opened=0)
    devices = read_devices(tmp_path)
    assert (devices.gpus, devices.closed_gpus) == ((), 4)
    write(tmp_path, {"dev/nvidia2": "", "dev/nvidiactl": "", "dev/nvidia-uvm": ""})
    devices = read_devices(tmp_path)
    assert [gpu.id for gpu in devices.gpus] == ["0"]  # CUDA counts what it can open
    assert devices.closed_gpus == 3


def test_where_the_driver_tells_nothing_dev_does(tmp_path: Path) -> None:
    write(tmp_path, {"dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidiactl": ""})
    assert read_devices(tmp_path).gpus == (Gpu("0"), Gpu("1"))


@pytest.mark.parametrize(
    ("chosen", "ids"),
    [("2,0", ["2", "0"]), ("GPU-8932f937", ["GPU-8932f937"]), ("", []), ("1,-1,3", ["1"]), (" 1 , 3 ", ["1", "3"])],
)
def test_gpus_that_somebody_chose_are_all_there_are(tmp_path: Path, chosen: str, ids: list[str]) -> None:
    devices = read_devices(gpu_machine(tmp_path), {"CUDA_VISIBLE_DEVICES": chosen})
    assert [gpu.id for gpu in devices.gpus] == ids
    assert not devices.gpus_in_pci_order


def test_a_machine_without_any_of_it(tmp_path: Path) -> None:
    assert read_devices(plain_machine(tmp_path), {}) == Devices()
