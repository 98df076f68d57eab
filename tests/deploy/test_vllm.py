"""What must hold of every plan; the exact lines of four machines are in tests/cli/test_vllm.py."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.config import Connector, KvRole
from twinpool.deploy.devices import Devices, Gpu, RdmaPort
from twinpool.deploy.fabric import choose_fabric
from twinpool.deploy.plan import ROLES, Wanted
from twinpool.deploy.vllm import PlannedEngine, VllmPlan, Wish, plan_vllm
from twinpool.errors import UserError
from twinpool.machine import Machine

LAPTOP = Machine((0, 1, 2, 3), 4, memory_bytes=32_000_000_000)
GIB = 1 << 30


def ports(count: int) -> tuple[tuple[int, int], ...]:
    return tuple((8100 + number, 5600 + number) for number in range(count))


def wish(wanted: Wanted | None = None, **other: Any) -> Wish:
    wanted = wanted or Wanted()
    plain = {"model": "org/m", "model_name": "m", "executable": "vllm", "lease_s": 30.0, "ports": ports(len(wanted.named()))}
    return Wish(wanted=wanted, **plain | other)


def plan(devices: Devices | None = None, machine: Machine = LAPTOP, wanted: Wanted | None = None, **other: Any) -> VllmPlan:
    devices = devices or Devices()
    return plan_vllm(machine, devices, choose_fabric(devices), wish(wanted, **other))


def gpus(count: int, memory_bytes: int | None = None) -> Devices:
    return Devices(tuple(Gpu(str(number), memory_bytes=memory_bytes) for number in range(count)))


def option(engine: PlannedEngine, name: str) -> str:
    return engine.argv[engine.argv.index(name) + 1]


def transfer(engine: PlannedEngine) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(option(engine, "--kv-transfer-config"))
    return config


@given(
    st.tuples(*(st.integers(0, 3),) * 3).filter(any).map(lambda n: Wanted(*n)),
    st.integers(1, 4),
    st.integers(1, 2),
    st.booleans(),
)
def test_engines_share_neither_gpus_nor_ports_nor_side_channels(
    wanted: Wanted, prefill: int, factor: int, on_efa: bool
) -> None:
    devices = replace(gpus(64), efa=("rdmap79s0",) if on_efa else (), address="10.0.0.5")
    planned = plan(devices, wanted=wanted, tensor_parallel=prefill, decode_tensor_parallel=prefill * factor)
    engines = planned.engines
    used = [gpu for engine in engines for gpu in engine.env["CUDA_VISIBLE_DEVICES"].split(",")]
    assert len(used) == len(set(used)) == sum(len(engine.gpus) for engine in engines)
    for engine in engines:
        expected = prefill * (factor if engine.role == "decode" else 1)
        assert len(engine.gpus) == expected == int(option(engine, "--tensor-parallel-size")) == engine.declared.tensor_parallel
    side = [(engine.env["VLLM_NIXL_SIDE_CHANNEL_HOST"], engine.env["VLLM_NIXL_SIDE_CHANNEL_PORT"]) for engine in engines]
    assert len(set(side)) == len({engine.url for engine in engines}) == len(engines)
    assert {host for host, _ in side} == {"10.0.0.5" if on_efa else "127.0.0.1"}
    assert [(engine.id, engine.role) for engine in engines] == list(wanted.named())


def test_what_the_gateway_is_told_is_what_the_engine_is_told() -> None:
    for engine in plan(gpus(2), lease_s=20.0, budget_tokens=1024, sequences=64, extra=("--dtype", "float16")).engines:
        told = engine.declared
        assert (told.connector, told.kv_role) == (Connector.NIXL, KvRole.BOTH)
        assert told.kv_role == transfer(engine)["kv_role"]
        assert told.lease_s == transfer(engine)["kv_connector_extra_config"]["kv_lease_duration"] == 20
        assert told.budget_tokens == int(option(engine, "--max-num-batched-tokens")) == 1024
        assert told.slots == int(option(engine, "--max-num-seqs")) == 64
        assert told.dtype == option(engine, "--dtype") == "float16"
        assert transfer(engine)["kv_load_failure_policy"] == "fail"
        assert "--enable-prompt-tokens-details" in engine.argv


def test_roles_are_soft_unless_tensor_parallel_sizes_differ() -> None:
    assert {engine.allowed_roles for engine in plan(gpus(2)).engines} == {ROLES}
    prefill, decode = plan(gpus(3), decode_tensor_parallel=2).engines
    assert (prefill.allowed_roles, decode.allowed_roles) == (("prefill", "colocated"), ("decode", "colocated"))
    only = plan(gpus(4), wanted=Wanted(0, 2, 0), decode_tensor_parallel=2).engines
    assert {engine.allowed_roles for engine in only} == {ROLES}  # they are all alike


def test_a_lease_that_vllm_cannot_count_is_refused() -> None:
    for lease_s in (5.0, 29.5):
        with pytest.raises(UserError, match=r"lease_s = .* in \[routing\]"):
            plan(lease_s=lease_s)


@pytest.mark.parametrize(
    ("extra", "instead"),
    [
        (("--port", "1"), "--port, which is set here$"),
        (("--api-key=secret",), "--engine-api-key-file"),
        (("--max_num_seqs", "4"), "--max-num-seqs"),
        (("--kv-transfer-config.kv_role", "kv_producer"), "--nixl-backend"),
        (("-tp", "4"), "--tensor-parallel"),
        (("--data-parallel-size", "2"), "more workers"),
    ],
)
def test_what_the_fleet_depends_on_cannot_be_given_behind_its_back(extra: tuple[str, ...], instead: str) -> None:
    with pytest.raises(UserError, match=f"--engine-args has .*{instead}"):
        plan(extra=extra)


def test_other_arguments_pass_as_they_are_and_last() -> None:
    extra = ("--max-model-len", "8192", "--hf-overrides", '{"a": "b c"}')
    assert all(engine.argv[-4:] == extra for engine in plan(extra=extra).engines)


def test_no_secret_is_in_a_plan_and_the_hub_is_not_forbidden() -> None:
    for engine in plan().engines:
        assert not {"VLLM_API_KEY", "HF_HUB_OFFLINE"} & engine.env.keys()
        assert "--api-key" not in engine.argv


def test_what_somebody_has_tuned_stays_and_what_must_be_unique_does_not() -> None:
    tuned = {"UCX_TLS": "rc", "VLLM_CPU_KVCACHE_SPACE": "40", "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600"}
    planned = plan(environment=tuned)
    for engine in planned.engines:
        assert not {"UCX_TLS", "VLLM_CPU_KVCACHE_SPACE"} & engine.env.keys()
    assert {engine.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for engine in planned.engines} == {"5600", "5601"}
    assert "UCX_TLS from the environment, not from here" in planned.notes


def test_folders_for_the_linker_are_added_to_those_it_knows() -> None:
    devices = replace(gpus(2), efa=("rdmap79s0",), libfabric="/opt/amazon/efa/lib")
    alone, beside = plan(devices), plan(devices, environment={"LD_LIBRARY_PATH": "/mine"})
    assert alone.engines[0].env["LD_LIBRARY_PATH"] == "/opt/amazon/efa/lib"
    assert beside.engines[0].env["LD_LIBRARY_PATH"] == "/opt/amazon/efa/lib:/mine"


def test_an_environment_made_for_efa_without_efa_is_loud() -> None:
    made_for_efa = {"FI_PROVIDER": "efa"}
    (warning,) = plan(gpus(2), environment=made_for_efa).warnings
    assert "FI_PROVIDER=efa, but KV will go over NVLink or PCIe" in warning
    assert not plan(replace(gpus(2), efa=("rdmap79s0",)), environment=made_for_efa).warnings


def test_cores_are_bound_where_they_can_be_and_never_twice() -> None:
    prefill, decode = plan().engines
    assert (prefill.env["VLLM_CPU_OMP_THREADS_BIND"], decode.env["VLLM_CPU_OMP_THREADS_BIND"]) == ("0,1", "2,3")
    assert "--enforce-eager" in prefill.argv
    (rank_pairs,) = plan(wanted=Wanted(0, 0, 1), tensor_parallel=2).engines
    assert rank_pairs.env["VLLM_CPU_OMP_THREADS_BIND"] == "1|2,3"  # one core for the gateway
    quota = plan(machine=Machine(tuple(range(64)), 4)).engines[0].env
    assert (quota["VLLM_CPU_OMP_THREADS_BIND"], quota["OMP_NUM_THREADS"]) == ("nobind", "2")
    with pytest.raises(UserError, match="6 ranks of tensor parallelism for 4 cores"):
        plan(tensor_parallel=3)


@pytest.mark.parametrize(
    ("memory_bytes", "weights_bytes", "gib"),
    [(32_000_000_000, None, 2), (None, None, 2), (8 * GIB, None, 2), (8 * GIB, GIB, 1)],
)
def test_kv_takes_what_memory_allows(memory_bytes: int | None, weights_bytes: int | None, gib: int) -> None:
    for engine in plan(machine=Machine((0, 1), 2, memory_bytes), weights_bytes=weights_bytes).engines:
        assert engine.env["VLLM_CPU_KVCACHE_SPACE"] == str(gib)


def test_too_little_memory_is_said_before_anything_is_started() -> None:
    with pytest.raises(UserError, match=r"2 vLLM engines with this model take at least 7\.7 GB, 6\.0 GB are free"):
        plan(machine=Machine((0, 1), 2, 6_000_000_000), weights_bytes=1_000_000_000)


def test_too_few_or_too_small_gpus_are_said_before_anything_is_started() -> None:
    with pytest.raises(
        UserError, match=r"2 vLLM engines take 8 GPUs, this machine has 4: .*--colocated-workers.*--tensor-parallel"
    ):
        plan(gpus(4), tensor_parallel=4)
    big = 140_000_000_000
    with pytest.raises(UserError, match="140 GB of weights for each GPU of 80 GB"):
        plan(gpus(2, 80_000_000_000), weights_bytes=big)
    assert plan(gpus(8, 80_000_000_000), weights_bytes=big, tensor_parallel=4)


def test_a_decode_engine_reads_whole_shares_of_a_prefill_engine() -> None:
    for decode in (1, 3):
        with pytest.raises(UserError, match="no multiple of --tensor-parallel 2"):
            plan(gpus(8), tensor_parallel=2, decode_tensor_parallel=decode)


def test_idle_gpus_and_an_open_side_channel_are_told() -> None:
    devices = replace(gpus(8), rdma=(RdmaPort("mlx5_0", 1, True),), address="10.0.0.5")
    notes = plan(devices).notes
    assert any(note.startswith("6 of 8 GPUs stay idle") for note in notes)
    assert any("side channel on 10.0.0.5, ports 5600 to 5601" in note for note in notes)


def test_a_fabric_that_leaves_the_machine_wants_a_side_channel_that_does() -> None:
    devices = replace(gpus(2), efa=("rdmap79s0",))
    assert any("--engine-host" in note for note in plan(devices).notes)
    everywhere = plan(replace(devices, address="10.0.0.5"), host="0.0.0.0").engines[0]  # noqa: S104
    assert option(everywhere, "--host") == "0.0.0.0"  # noqa: S104
    assert everywhere.url == "http://127.0.0.1:8100"
    assert everywhere.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.5"
    named = plan(devices, host="fe80::5").engines[0]
    assert (named.url, named.env["VLLM_NIXL_SIDE_CHANNEL_HOST"]) == ("http://[fe80::5]:8100", "fe80::5")


def test_gpus_in_somebody_s_own_order_keep_it() -> None:
    assert plan(gpus(2)).engines[0].env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "CUDA_DEVICE_ORDER" not in plan(replace(gpus(2), gpus_in_pci_order=False)).engines[0].env


def test_a_step_holds_at_least_a_token_of_each_sequence() -> None:
    assert option(plan(budget_tokens=8).engines[0], "--max-num-seqs") == "8"
