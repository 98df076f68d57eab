"""How a service looks when it has just started."""

import pytest
from tests.live import wire
from tests.live.service import Service, is_alive

pytestmark = [pytest.mark.model, pytest.mark.timeout(30, func_only=True)]


def test_it_says_what_it_serves_and_where(service: Service) -> None:
    assert service.ready["event"] == "ready"
    assert len(service.ready["gateway"]["models"]) == 1
    assert {worker["role"] for worker in service.ready["workers"]} == {"prefill", "decode"}
    assert {worker["state"] for worker in service.ready["workers"]} == {"ready"}
    assert all(worker["hands_off"] for worker in service.ready["workers"])


def test_it_is_ready_in_under_five_seconds(service: Service) -> None:
    """From the command to the ready line, once the model lies on this machine."""
    if service.load_when_spawned > 1.5:
        pytest.skip(f"this machine does much else: {service.load_when_spawned:.1f} processes a core")
    assert service.spawned_to_ready_s < 5


def test_reading_and_writing_are_processes_of_their_own(service: Service) -> None:
    assert service.prefill.pid != service.decode.pid
    assert is_alive(service.prefill.pid)
    assert is_alive(service.decode.pid)


def test_the_admin_port_shows_both_pools(service: Service) -> None:
    state = wire.ask(service.admin_url, "GET", "/admin/state").json()
    roles = {worker["id"]: worker["role"] for worker in state["workers"]}
    assert roles == {service.prefill.id: "prefill", service.decode.id: "decode"}
    scrape = service.scrape()
    assert scrape.total("twinpool_pool_workers", role="prefill") == scrape.total("twinpool_pool_workers", role="decode") == 1
