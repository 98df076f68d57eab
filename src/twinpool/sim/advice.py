"""What a plan recommends, in words: the simplest way of serving that none of the others is better than by more than is
certain."""

from twinpool.sim.options import Fleet, Way
from twinpool.sim.planned import Planned

WORTH_IT_RATIO = 0.03
"""Under this, one way of serving is not recommended over a simpler one."""

NONE = "none"


def advise(
    best: dict[Way, Planned],
    margin: float | None,
    uncertainty: float | None,
    asked_req_s: float,
    fleet: Fleet,
    least_ttft_s: float,
) -> tuple[str, str]:
    """What to do, in one word and in words. `best` has each way's best option, where it has one; within `least_ttft_s` nine in
    ten requests could have their first token if each was alone."""
    carried = {way: each.capacity_req_s or 0.0 for way, each in best.items()}
    if not carried:
        return NONE, _nothing(fleet, least_ttft_s)
    most = max(carried.values())
    if most < asked_req_s:
        way = max(carried, key=lambda way: carried[way])
        needed = -(-asked_req_s * fleet.workers // most)
        return NONE, (
            f"No plan: {fleet.workers} workers carry {most:.1f} requests a second at best ({best[way].name()}), "
            f"{asked_req_s:.1f} are asked for. About {needed:.0f} workers would do."
        )
    worth = max(uncertainty or 0.0, WORTH_IT_RATIO)
    chosen = next(way for way in Way if way in carried)
    for way in Way:
        if way in carried and carried[way] > carried[chosen] * (1 + worth):
            chosen = way
    room = f"{carried[chosen]:.1f} requests a second carried, {asked_req_s:.1f} asked for"
    return chosen.value, f"{_lead(chosen, best[chosen])}: {room}. {_others(chosen, best, carried, margin, uncertainty)}"


def _nothing(fleet: Fleet, least_ttft_s: float) -> str:
    objectives = fleet.objectives
    fastest_ms = min(ms for _, _, ms in fleet.profile.decode_step_ms)
    if fastest_ms > objectives.slo_itl_s * 1e3:
        return (
            f"No plan: {objectives.slo_itl_s * 1e3:g} ms for a token are out of reach, this engine's fastest step takes "
            f"{fastest_ms:.1f} ms. Loosen the objective, or take another engine."
        )
    if least_ttft_s > objectives.slo_ttft_s:
        return (
            f"No plan: a first token within {objectives.slo_ttft_s:g} s is out of reach for more than one request in ten, even "
            f"alone on an idle worker. Nine in ten take up to {least_ttft_s:.2f} s there: loosen the objective, or take faster "
            "workers."
        )
    return (
        f"No plan: no way for {fleet.workers} workers to serve this meets the objectives at any rate that was tried. Loosen "
        "them, or take another engine: alone on an idle worker nine in ten requests could have their first token within "
        f"{least_ttft_s:.2f} s, and bursts come on top of it."
    )


def _lead(way: Way, chosen: Planned) -> str:
    if way is Way.COLOCATED:
        return f"Do not disaggregate, {chosen.name()}"
    return f"Two pools, {chosen.name()}"


def _others(
    chosen: Way, best: dict[Way, Planned], carried: dict[Way, float], margin: float | None, uncertainty: float | None
) -> str:
    """How far the ways are apart."""
    if margin is None or uncertainty is None:
        missing = [_word(way) for way in Way if way not in carried]
        return f"Nothing else comes near: {' and '.join(missing)} meet the objectives at no rate that was tried."
    base = carried[Way.COLOCATED]
    told = [
        f"{carried[way] / base - 1:+.1%} {_word(way)} ({best[way].name().removeprefix('balanced ')})"
        for way in (Way.POOLS, Way.BALANCED)
        if way in carried
    ]
    verdict = ""
    if chosen is Way.COLOCATED and margin > 0:
        verdict = ": no difference to build on"
    elif chosen is Way.POOLS and Way.BALANCED in carried and carried[Way.BALANCED] > carried[Way.POOLS]:
        verdict = ": balancing adds nothing to build on"
    against = "" if chosen is Way.COLOCATED else f" ({best[Way.COLOCATED].name()})"
    return f"Against the best colocated budget{against}: {', '.join(told)}, ± {uncertainty:.1%}{verdict}."


def _word(way: Way) -> str:
    return {Way.COLOCATED: "colocated workers", Way.POOLS: "fixed pools", Way.BALANCED: "balanced pools"}[way]


def remarks(best: dict[Way, Planned], fleet: Fleet, requests: int) -> list[str]:
    """What to know of the figures."""
    profile = fleet.profile
    notes = [f"step costs from profile {profile.name}: {profile.source}"]
    if not best:
        return notes
    if Way.BALANCED in best:
        notes.append(
            'balanced is [balance] mode = "auto" with [routing] policy = "least_cost": '
            "what it gains has been seen in simulation alone"
        )
    top = max(best.values(), key=lambda each: each.capacity_req_s or 0.0)
    carried = top.capacity_req_s or 0.0
    seconds = requests / carried
    over_ratio = fleet.objectives.slo_ttft_s / (0.9 * seconds)
    if over_ratio >= 1:
        notes.append(
            f"at what is carried the sample lasts {seconds:.0f} s, no longer than the objective for the first token allows: "
            "what queues come to was not seen, and nothing beyond the bound is carried for long (--sample plays longer)"
        )
    elif over_ratio > 0.03:
        notes.append(
            f"at what is carried the sample lasts {seconds:.0f} s: a queue that grows without end may still keep the objective "
            f"then, and up to {over_ratio:.0%} less is carried in the long run, in every way of serving (--sample plays longer)"
        )
    if top.beyond_table_ratio and top.beyond_table_ratio > 0.01:
        notes.append(
            f"{top.beyond_table_ratio:.0%} of the best option's engine time is beyond the profile's table and extrapolated"
        )
    over = carried / top.bound_req_s - 1
    if over > 0:
        notes.append(
            f"the best option is {over:.1%} over its bound, which is for endless traffic: at the end of a run "
            "a queue may remain, and one request in ten may miss"
        )
    if not profile.mixed_step_extra_ms:
        notes.append("mixed steps are taken to cost nothing extra: two pools gain with whatever they do cost; measure it")
    ingress = top.handoff_bytes_s_per_decode_worker
    if ingress and ingress > 0.6 * profile.handoff_bytes_per_s:
        notes.append(
            f"each decode worker takes in {ingress / 1e9:.1f} GB/s at capacity, over 60 % of the "
            f"{profile.handoff_bytes_per_s / 1e9:.0f} GB/s that the profile has for it"
        )
    return notes
