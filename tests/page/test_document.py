"""Pages out of parts."""

import json
import re

from twinpool.page.document import PALETTE, Chart, Table, Text, Tile, Tiles, chart_config, line, render, time_axis, value_axis

LINE = line("a line", [0.0, 1.0], [1.0, None], PALETTE[0])
CHART = Chart("A chart", chart_config([LINE], {"x": time_axis(1.0), "y": value_axis("s")}))


def test_it_is_one_file_of_a_reasonable_size_with_its_library_and_licence() -> None:
    page = render("A title", "below", [CHART])
    assert len(page) < 300_000
    assert "Chart.js v4" in page
    assert "Released under the MIT License" in page


def test_it_forbids_itself_the_network_and_names_no_other_place() -> None:
    page = render("A title", "below", [CHART])
    assert "default-src 'none'" in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)


def test_what_others_wrote_is_shown_and_not_run() -> None:
    bad = "</script><script>alert(1)</script>"
    chart = Chart(bad, chart_config([line(bad, [0.0], [1.0], "#000")], {}))
    page = render(bad, bad, [Text([bad], bad), Table([bad], [[bad]], bad), Tiles([Tile(bad, bad, bad)]), chart])
    assert bad not in page
    assert page.count("<script") == 3


def test_charts_come_in_order_with_their_configurations() -> None:
    page = render("t", "s", [CHART, Text(["between"]), CHART])
    configs = json.loads(re.search(r'id="configs">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    assert [one["data"]["datasets"][0]["label"] for one in configs] == ["a line", "a line"]
    assert len(set(re.findall(r'id="chart-(\d)"', page))) == len(configs)
