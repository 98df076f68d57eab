import pytest
from tests.sim.plain import profile
from tests.sim.scenes import group, play, scene

from twinpool import __version__
from twinpool.assemble import build_controller, replay
from twinpool.config import Routing
from twinpool.core import events as on
from twinpool.core.controller import Controller
from twinpool.core.journal import Header, encode_header, encode_step
from twinpool.core.model import Role
from twinpool.errors import UserError
from twinpool.sim.findings import findings_of
from twinpool.sim.run import Run, law_of
from twinpool.sim.scenario import Clients, Fault, FaultKind, Gateway, TrafficSpec
from twinpool.workload.arrivals import Poisson
from twinpool.workload.offered import Offered

CRASHES = (
    Fault(at_s=10, worker="w000", kind=FaultKind.CRASH, lasts_s=5),
    Fault(at_s=25, worker="w002", kind=FaultKind.CRASH, lasts_s=5),
)


def mean_ttft_s(run: Run) -> float:
    ttft = findings_of(run).report.ttft_s
    assert ttft is not None
    return ttft.mean


def test_the_gateway_s_own_controller_is_run_and_its_journal_replays() -> None:
    scenario = scene(faults=CRASHES, clients=Clients(patience_s=3))
    lines = [encode_header(Header(version=__version__, rules=scenario.routing, law=law_of(scenario, [])))]
    run = play(scenario, on_step=lambda event, commands: lines.append(encode_step(event, commands)))
    assert run.recording.outcomes["ok"] > 300
    outcome = replay(lines)
    assert (outcome.events, outcome.difference) == (len(lines) - 1, None)


@pytest.mark.parametrize("faults", [(), CRASHES])
def test_every_request_ends_once_and_leaves_nothing(faults: tuple[Fault, ...]) -> None:
    controllers: list[Controller] = []

    def build(rules: Routing) -> Controller:
        controllers.append(build_controller(rules))
        return controllers[0]

    def check(event: on.Event, commands: object) -> None:
        controllers[0].validate()

    arrived: list[str] = []
    scenario = scene(faults=faults, duration_s=40)
    run = play(
        scenario,
        build=build,
        on_step=lambda event, commands: (
            check(event, commands),
            arrived.append(event.request) if isinstance(event, on.RequestArrived) else None,
        ),
    )
    assert sum(run.recording.outcomes.values()) == len(arrived) == len(set(arrived))
    assert sum(controllers[0].handles_by_state().values()) == 0
    assert run.recording.outcomes["ok"] == len(arrived)


def test_an_answer_whose_engine_dies_is_gone_on_with_and_its_client_sees_the_gap() -> None:
    fault = Fault(at_s=5, worker="w000", kind=FaultKind.CRASH, lasts_s=2)
    scenario = scene(workers=(group(2, Role.COLOCATED),), faults=(fault,))
    ends: list[on.Event] = []
    run = play(scenario, requests=iter([Offered(0.0, 100, 800, False)]), on_step=lambda event, _: ends.append(event))
    assert run.recording.outcomes == {"ok": 1}
    assert any(isinstance(event, on.LegFailed) and event.can_continue for event in ends)
    assert run.recording.short[0].requests == 0  # of the warm-up
    assert sum(totals.written_tokens for totals in run.totals.values()) == pytest.approx(800, abs=2)


def crash(at_s: float, worker: str) -> Fault:
    return Fault(at_s=at_s, worker=worker, kind=FaultKind.CRASH, lasts_s=2)


@pytest.mark.parametrize(
    ("faults", "paths"),
    [
        ((crash(25, "w002"),), {"disaggregated": 1}),
        ((crash(25, "w002"), crash(28, "w003")), None),
        ((Fault(at_s=24, worker="w003", kind=FaultKind.ROLE, role=Role.PREFILL), crash(25, "w002")), None),
    ],
    ids=["one death", "two deaths", "a flip and a death"],
)
def test_a_pair_goes_on_with_the_answer_of_a_dead_engine(faults: tuple[Fault, ...], paths: dict[str, int] | None) -> None:
    scenario = scene(workers=(group(2, Role.PREFILL), group(2, Role.DECODE)), faults=faults)
    events: list[on.Event] = []
    run = play(scenario, requests=iter([Offered(20.0, 100, 1500, False)]), on_step=lambda event, _: events.append(event))
    deaths = sum(fault.kind is FaultKind.CRASH for fault in faults)
    assert sum(isinstance(event, on.LegFailed) and event.can_continue for event in events) == deaths
    assert {event.prompt_tokens for event in events if isinstance(event, on.PrefillFinished)} == {100}
    assert paths is None or run.recording.paths == paths
    assert sum(totals.written_tokens for totals in run.totals.values()) == 1500
    report = findings_of(run).report
    assert report.ttft_s is not None
    assert report.e2e_s is not None
    assert report.itl_worst_s is not None
    assert sum(block.tokens_out for block in run.recording.short) == 1500
    streamed_s = sum(block.stream_s for block in run.recording.short)
    assert streamed_s == pytest.approx(report.e2e_s.mean - report.ttft_s.mean)  # every gap once
    read_s = 0.06 if deaths == 1 else 0.09  # the prompt, and what was sent by the last death: 10 ms for 100 tokens
    assert report.itl_worst_s.max == pytest.approx(read_s + 0.015, abs=0.012)


def test_without_continuation_it_is_lost() -> None:
    fault = Fault(at_s=5, worker="w000", kind=FaultKind.CRASH, lasts_s=2)
    scenario = scene(workers=(group(2, Role.COLOCATED),), faults=(fault,), gateway=Gateway(continues=False))
    run = play(scenario, requests=iter([Offered(0.0, 100, 800, False)]))
    assert run.recording.outcomes == {"failed": 1}


def test_a_slow_link_costs_what_bytes_over_bandwidth_says() -> None:
    def ttft(bytes_per_s: float) -> float:
        one = iter([Offered(10.0, 1000, 5, False)])
        run = play(scene(), profile=profile(handoff_bytes_per_s=bytes_per_s), requests=one)
        return mean_ttft_s(run)

    together = play(scene(workers=(group(1, Role.COLOCATED),)), requests=iter([Offered(10.0, 1000, 5, False)]))
    assert ttft(1e15) == pytest.approx(mean_ttft_s(together) + 0.001 + 0.010, rel=1e-6)  # the latency, and a step of D
    assert ttft(1e6) == pytest.approx(ttft(1e15) + 1.0, rel=1e-6)  # 1,000 tokens of 1,000 bytes
    assert ttft(1e5) > 10


def test_a_handoff_is_timed_by_the_one_that_decodes() -> None:
    """From the arrival of its leg, so that the leg's own way is no part of it."""
    ends: list[on.Event] = []
    play(
        scene(gateway=Gateway(dispatch_s=0.1)),
        requests=iter([Offered(10.0, 1000, 5, False)]),
        on_step=lambda event, _: ends.append(event),
    )
    (finished,) = (event for event in ends if isinstance(event, on.RequestFinished))
    assert finished.timeline.handoff_s == pytest.approx(0.001 + 1e6 / 1e9)
    parts = finished.timeline.ttft_parts_s()
    assert parts["first_decode"] == pytest.approx(0.110)


def test_a_lease_that_ends_before_the_kv_is_there_is_no_answer() -> None:
    scenario = scene(gateway=Gateway(lease_s=2.0))
    run = play(scenario, profile=profile(handoff_bytes_per_s=2e5), requests=iter([Offered(10.0, 1000, 5, False)]))
    assert run.lost_leases == 2  # two handoffs that failed are enough: the third try is one worker's
    assert run.recording.outcomes == {"ok": 1}
    assert run.recording.paths == {"colocated": 1}


def test_a_prompt_that_no_worker_can_hold_is_rejected() -> None:
    run = play(scene(), requests=iter([Offered(10.0, 200_000, 5, True), Offered(20.0, 100, 5, False)]))
    assert run.recording.outcomes == {"rejected": 1, "ok": 1}
    assert any("rejected" in note for note in findings_of(run).notes)


def test_what_is_offered_is_of_the_same_time_as_goodput() -> None:
    """Twice as many in the counted part as before it: all are served, and none that was not offered."""
    times = [*range(6), *(at / 2 for at in range(12, 114)), *range(57, 60)]
    found = findings_of(play(scene(), requests=iter([Offered(float(at), 100, 5, False) for at in times])))
    assert found.offered_req_s == found.report.goodput_req_s == pytest.approx(2.0)


def test_the_bound_is_for_those_that_can_be_served() -> None:
    def rows(long: int) -> list[Offered]:
        return [Offered(float(at), long if at % 2 else 100, 5, is_long=False) for at in range(60)]

    found = findings_of(play(scene(), requests=iter(rows(10**9))))
    served = findings_of(play(scene(), requests=iter(rows(100))))
    assert found.bound_req_s == pytest.approx(served.bound_req_s)
    assert found.offered_req_s == served.offered_req_s == 1.0
    assert any(note.startswith("30 requests are longer than any") for note in found.notes)
    with pytest.raises(UserError, match="all 3 requests are longer"):
        findings_of(play(scene(), requests=iter([Offered(float(at), 10**9, 5, True) for at in range(3)])))


def test_a_run_whose_requests_all_lie_in_the_warm_up_says_so() -> None:
    alone = findings_of(play(scene(), requests=iter([Offered(0.0, 100, 5, False)])))
    assert any("no request comes in the counted part of the time, from 6 s to 57 s" in note for note in alone.notes)


def test_what_a_client_left_while_it_was_on_its_way_is_not_taken_when_it_comes() -> None:
    for workers in ((group(2, Role.COLOCATED),), scene().workers):
        scenario = scene(workers=workers, clients=Clients(patience_s=0.2), gateway=Gateway(dispatch_s=0.5), duration_s=10)
        run = play(scenario)
        assert set(run.recording.outcomes) == {"left"}
        assert sum(totals.read_tokens for totals in run.totals.values()) == 0


def test_a_client_without_patience_leaves() -> None:
    slow = scene(clients=Clients(patience_s=0.05))
    run = play(slow, requests=iter([Offered(10.0, 1000, 5, False)]))
    assert run.recording.outcomes == {"left": 1}


def test_an_engine_that_wants_half_the_figures_is_refused_the_profile() -> None:
    with pytest.raises(UserError, match="kv_tokens 100000, not 5"):
        play(scene(workers=(group(1, Role.COLOCATED, kv_tokens=5),)))


def test_a_fault_names_a_worker_that_is_there() -> None:
    with pytest.raises(UserError, match="w099"):
        play(scene(faults=(Fault(at_s=1, worker="w099", kind=FaultKind.SLOW),)))


def test_a_slow_worker_is_slow_for_as_long_as_it_lasts() -> None:
    one = scene(workers=(group(1, Role.COLOCATED),), faults=(Fault(at_s=5, worker="w000", kind=FaultKind.SLOW, lasts_s=10),))
    requests = [Offered(at_s, 1000, 2, False) for at_s in (7.0, 30.0)]
    slow = play(one, requests=iter(requests[:1]))
    usual = play(one, requests=iter(requests[1:]))
    assert mean_ttft_s(slow) == pytest.approx(2 * mean_ttft_s(usual))


def test_the_report_has_the_contract_s_keys() -> None:
    found = findings_of(play(scene(duration_s=400))).as_json()
    keys = """requests failed throughput_req_s throughput_output_tok_s goodput_req_s ttft_s itl_s e2e_s
        itl_worst_s stalled_time_ratio short long utilization_mean_ratio utilization_at_peak_ratio
        useful_work_ratio verdict reasons bound_req_s"""
    assert set(keys.split()) <= set(found)
    assert found["goodput_req_s"] <= found["bound_req_s"]
    assert found["utilization_at_peak_ratio"] is not None
    assert 0 < found["useful_work_ratio"] < found["utilization_mean_ratio"]


def test_memory_follows_the_requests_in_flight_alone() -> None:
    live: list[int] = []
    controllers: list[Controller] = []

    def build(rules: Routing) -> Controller:
        controllers.append(build_controller(rules))
        return controllers[0]

    def look(event: on.Event, commands: object) -> None:
        if isinstance(event, on.TimePassed | on.RequestFinished):
            live.append(controllers[0].live_requests)

    run = play(scene(duration_s=120), build=build, on_step=look)
    assert sum(run.recording.outcomes.values()) > 5 * max(live)


def test_a_worker_that_was_told_a_role_gets_the_budget_of_that_role() -> None:
    roles = (Fault(at_s=5, worker="w000", kind=FaultKind.ROLE, role=Role.DECODE),)
    both = (group(2, Role.PREFILL, budget_by_role={"prefill": 500, "decode": 100}), group(1, Role.DECODE))
    run = play(scene(workers=both, faults=roles))
    assert [(worker, role) for _, worker, role, _ in run.role_changes] == [("w000", Role.DECODE)]
    assert any("what-if" in note for note in findings_of(run).notes)


def test_traffic_from_a_mix_is_the_same_at_another_rate_but_for_its_times() -> None:
    def lengths(rate: float) -> list[int]:
        seen: list[int] = []
        play(
            scene(traffic=TrafficSpec(mix="mixed-90-10", arrivals=Poisson(rate=rate)), duration_s=5),
            on_step=lambda event, _: seen.append(event.facts.prompt_chars) if isinstance(event, on.RequestArrived) else None,
        )
        return seen

    few, many = lengths(4), lengths(8)
    assert few == many[: len(few)]
    assert len(many) > len(few)


def test_a_scenario_of_nothing_has_nothing_to_tell() -> None:
    with pytest.raises(UserError, match="before its first request"):
        findings_of(play(scene(), requests=iter(())))
