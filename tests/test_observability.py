"""The dashboard and the alerts ask for no metric, label or value that the gateway does not have."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.gateway.house import house

from twinpool.core.decisions import Choice, Decision, Why
from twinpool.core.lifecycle import HandleState, PairState, WorkerState
from twinpool.core.model import Failure, Leg, Role
from twinpool.gateway.metrics import Metrics
from twinpool.measure.gaps import BOUNDS_S
from twinpool.measure.indicators import Limits

FOLDER = Path(__file__).parents[1] / "observability"
DASHBOARD = json.loads((FOLDER / "grafana-dashboard.json").read_text())
RULES = yaml.safe_load((FOLDER / "prometheus-rules.yml").read_text())
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"]}
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
SCRAPED = {"job", "instance"}
"""Labels that Prometheus adds."""
VALUES: dict[str, set[str]] = {
    "length_class": {"short", "long"},
    "outcome": {"ok", "client_left", "rejected", "refused", "failed", "turned_away"},
    "state": {*HandleState, *PairState, *WorkerState},
    "failure": {*Failure},
    "choice": {*Choice},
    "le": {str(bound) for bound in BOUNDS_S},
}


def expressions() -> Iterator[str]:
    for panel in PANELS:
        yield from (target["expr"] for target in panel["targets"])
    yield from (annotation["expr"] for annotation in DASHBOARD["annotations"]["list"])
    yield from (alert["expr"] for alert in ALERTS.values())


def exported(metrics: Metrics) -> dict[str, set[str]]:
    """The labels of each series that can be scraped."""
    found: dict[str, set[str]] = {}
    for family in metrics.registry.collect():
        labels = set(getattr(family, "_labelnames", ())).union(*(sample.labels for sample in family.samples))
        found |= {family.name + suffix: labels for suffix in SUFFIXES.get(family.type, ("",))}
    return found


async def test_every_metric_every_label_and_every_value_is_one_of_the_gateway_s() -> None:
    async with house(prefill=1, decode=1) as h:
        await h.chat("n1", stream=True)
        metrics = h.gateway._metrics
        metrics.decided(Decision(Choice.REFUSE, Why.QUEUE_FULL))
        metrics.predicted(Choice.COLOCATED, 0.1)
        metrics.regretted(Choice.COLOCATED, 0.1)
        metrics.leg_failed(Leg.DECODE, Failure.SUSPECT)
        metrics.role_changed(Role.PREFILL, "manual")
        metrics.pair_changed(PairState.ASIDE)
        known = exported(metrics)
    known["twinpool_canaries_total"] = {"outcome"}  # embedded engines need none
    for expression in expressions():
        named = re.findall(r"\btwinpool_\w+", expression)
        assert named or "up{" in expression
        for name in named:
            assert name in known, expression
        for name, matchers in re.findall(r"\b(twinpool_\w+)\{([^}]*)\}", expression):
            for label, value in re.findall(r'(\w+)=~?"([^"]*)"', matchers):
                assert label in known[name] | SCRAPED, expression
                assert value.startswith("$") or set(value.split("|")) <= VALUES[label], expression
        if len(set(named)) == 1:
            for labels in re.findall(r"\bby \(([^)]*)\)", expression):
                assert set(re.split(r"[, ]+", labels)) <= known[named[0]] | SCRAPED, expression


def test_the_expressions_look_like_promql() -> None:
    """What a parser would say first; Prometheus itself says the rest (`promtool check rules`)."""
    for expression in expressions():
        assert all(expression.count(opened) == expression.count(closed) for opened, closed in ("()", "{}", "[]")), expression
        for counter in re.findall(r"(?:rate|increase)\((\w+)", expression):
            assert counter.endswith(("_total", "_bucket", "_sum", "_count")), expression
        for plain in re.findall(r"(?<!rate\()(?<!increase\()\btwinpool_\w+_total\b", expression):
            raise AssertionError(f"{plain} only ever rises: {expression}")


# The alerts


def test_the_rules_have_the_shape_that_prometheus_reads() -> None:
    assert list(RULES) == ["groups"]
    names = [group["name"] for group in RULES["groups"]]
    assert len(set(names)) == len(names)
    assert len(ALERTS) == sum(len(group["rules"]) for group in RULES["groups"]), "each alert has a name of its own"
    for group in RULES["groups"]:
        assert group.keys() == {"name", "rules"}
    for name, alert in ALERTS.items():
        assert alert.keys() == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"Twinpool[A-Z]\w+", name)
        assert re.fullmatch(r"\d+[smh]", alert["for"])
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        assert alert["annotations"].keys() == {"summary", "description"}
        assert "{{ $labels.instance }}" in alert["annotations"]["summary"]


def test_the_two_indicators_have_the_limits_of_check() -> None:
    assert f"twinpool_indicator_ttft_long_seconds > {Limits().ttft_long_s}" in ALERTS["TwinpoolLongRequestsSlow"]["expr"]
    floor = Limits().utilization_floor_ratio
    assert ALERTS["TwinpoolIdleAtPeak"]["expr"] == f"twinpool_indicator_utilization_at_peak_ratio < {floor}"


@pytest.mark.parametrize("wanted", ["NoPairProved", "WorkersLost", "HandoffsFail", "RequestsRefused", "NoWorker"])
def test_an_operator_hears_of(wanted: str) -> None:
    assert f"Twinpool{wanted}" in ALERTS


# The dashboard


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= DASHBOARD.keys()
    assert DASHBOARD["schemaVersion"] >= 36
    assert DASHBOARD.get("id") is None, "the id is the importing Grafana's"
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in PANELS:
        assert {"type", "title", "targets", "gridPos", "fieldConfig", "options"} <= panel.keys()
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)


def test_panels_lie_side_by_side_and_never_over_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells, panel["title"]
        taken |= cells


def test_the_data_source_is_a_variable_everywhere() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    named = re.findall(r'"uid": "([^"]*)"', json.dumps(DASHBOARD))
    assert set(named) == {"twinpool", "${datasource}"}
    assert all(target["datasource"]["uid"] == "${datasource}" for panel in PANELS for target in panel["targets"])
