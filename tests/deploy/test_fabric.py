from dataclasses import replace

import pytest

from twinpool.deploy.devices import Devices, Gpu, RdmaPort
from twinpool.deploy.fabric import choose_fabric
from twinpool.errors import UserError

GPUS = (Gpu("0"), Gpu("1"))
EFA = Devices(GPUS, efa=("rdmap79s0",))
INFINIBAND = Devices(GPUS, rdma=(RdmaPort("mlx5_0", 1, True), RdmaPort("mlx5_1", 2, True), RdmaPort("mlx5_2", 1, False)))


def test_efa_takes_libfabric_and_fails_rather_than_falls_back() -> None:
    fabric = choose_fabric(EFA)
    assert (fabric.backend, fabric.over, fabric.buffer_device, fabric.leaves_machine) == ("LIBFABRIC", "EFA", "cuda", True)
    assert dict(fabric.env) == {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_ENABLE_SHM_TRANSFER": "0"}
    assert fabric.reason == "1 EFA device (rdmap79s0), which UCX cannot drive with RDMA"
    assert fabric.handoff_floor_gb_s == 2.0
    assert not fabric.warnings


def test_libfabric_from_amazon_s_folder_is_shown_to_the_linker() -> None:
    assert dict(choose_fabric(replace(EFA, libfabric="/opt/amazon/efa/lib")).env)["LD_LIBRARY_PATH"] == "/opt/amazon/efa/lib"
    assert "LD_LIBRARY_PATH" not in dict(choose_fabric(replace(EFA, libfabric="/usr/lib64")).env)


def test_an_efa_machine_without_libfabric_is_loud() -> None:
    (warning,) = choose_fabric(replace(EFA, missing_libraries=("libfabric.so.1",))).warnings
    assert "needs libfabric.so.1, not found" in warning
    assert "aws-efa-installer" in warning


def test_infiniband_takes_its_own_ports_and_no_tcp() -> None:
    fabric = choose_fabric(INFINIBAND)
    assert (fabric.backend, fabric.over, fabric.leaves_machine) == ("UCX", "InfiniBand", True)
    assert dict(fabric.env) == {"UCX_TLS": "rc,cuda_copy,cuda_ipc,sm,self", "UCX_NET_DEVICES": "mlx5_0:1,mlx5_1:2"}


def test_ethernet_cards_are_roce_where_there_is_no_infiniband() -> None:
    fabric = choose_fabric(Devices(rdma=(RdmaPort("mlx5_2", 1, False),)))
    assert (fabric.over, fabric.buffer_device) == ("RoCE", "cpu")
    assert dict(fabric.env) == {"UCX_TLS": "rc,sm,self", "UCX_NET_DEVICES": "mlx5_2:1"}


@pytest.mark.parametrize(
    ("links", "over"),
    [
        ((True, True), "NVLink"),
        ((False, False), "PCIe"),
        ((True, False), "NVLink or PCIe"),
        ((None, None), "NVLink or PCIe"),
        ((False, None), "NVLink or PCIe"),
    ],
)
def test_gpus_alone_hand_over_from_one_to_the_other(links: tuple[bool | None, ...], over: str) -> None:
    fabric = choose_fabric(Devices(tuple(Gpu(str(n), has_nvlink=link) for n, link in enumerate(links))))
    assert (fabric.backend, fabric.over, fabric.buffer_device, fabric.leaves_machine) == ("UCX", over, "cuda", False)
    assert "cuda_ipc" in dict(fabric.env)["UCX_TLS"]
    assert "UCX_NET_DEVICES" not in dict(fabric.env)


def test_nothing_hands_over_through_the_host_and_has_no_floor() -> None:
    fabric = choose_fabric(Devices())
    assert (fabric.backend, fabric.buffer_device, fabric.handoff_floor_gb_s) == ("UCX", "cpu", None)
    assert dict(fabric.env) == {"UCX_TLS": "tcp,sm,self"}


def test_efa_out_of_reach_is_loud_and_says_what_to_do() -> None:
    fabric = choose_fabric(Devices(GPUS, closed_efa=("rdmap79s0", "rdmap80s0")))
    assert fabric.backend == "UCX"
    (warning,) = fabric.warnings
    for part in ("2 EFA devices", "rdmap79s0, rdmap80s0", "vpc.amazonaws.com/efa", "--device /dev/infiniband/uverbs0", "TCP"):
        assert part in warning


def test_some_efa_out_of_reach_is_told_too() -> None:
    fabric = choose_fabric(Devices(GPUS, efa=("a",), closed_efa=("b", "c", "d")))
    assert fabric.backend == "LIBFABRIC"
    assert fabric.warnings == ("3 of 4 EFA devices are not in /dev/infiniband: their bandwidth is missing",)


def test_gpus_out_of_reach_are_loud() -> None:
    (warning,) = choose_fabric(Devices(closed_gpus=8)).warnings
    assert "8 NVIDIA GPUs" in warning
    assert "--gpus all" in warning


def test_the_backend_may_be_chosen_where_it_can_work() -> None:
    assert choose_fabric(EFA, "ucx").over == "NVLink or PCIe"
    assert choose_fabric(EFA, "libfabric").over == "EFA"
    with pytest.raises(UserError, match="needs an EFA device: there is none"):
        choose_fabric(INFINIBAND, "libfabric")
    with pytest.raises(UserError, match="needs an EFA device: this machine has 1 EFA device"):
        choose_fabric(Devices(closed_efa=("a",)), "libfabric")
