from io import StringIO

import pytest
from rich.console import Console

from twinpool.cli.terminal import Screen, show_table, tell

HEAD = ("Time", "mean", "p50", "95 % of the mean")
ROWS = [("TTFT, all", "1.26 s", "1.31 s", "1.02 s to 1.50 s"), ("ITL, all", "25 ms", "24 ms", "24 ms to 26 ms")]


def screen(width: int) -> Screen:
    return Screen(width=width, file=StringIO(), force_terminal=True, color_system=None, highlight=False)


def written(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [12, 20, 30, 46, 47, 48, 49, 50, 80])
def test_a_figure_is_never_cut_or_split(width: int) -> None:
    console = screen(width)
    show_table(console, HEAD, ROWS, is_figures=True)
    lines = written(console).splitlines()
    assert max(map(len, lines)) <= width
    if width < 20:
        return  # no longer than a figure is long
    for figure in ("1.26 s", "1.31 s", "25 ms", "24 ms"):
        assert any(figure in line for line in lines), lines


def test_a_table_that_is_too_wide_is_told_row_by_row() -> None:
    console = screen(24)
    show_table(console, HEAD, ROWS, is_figures=True)
    assert written(console).split("\n")[:6] == ["", "Time", "", "TTFT, all", "  mean: 1.26 s", "  p50: 1.31 s"]


def test_words_wrap_before_a_table_is_given_up() -> None:
    rows = [("prefill-0", "nixl, kv_both", "http://127.0.0.1:41234")]
    for width, is_table in ((60, True), (48, True), (30, False)):
        console = screen(width)
        show_table(console, ("Worker", "Connector", "URL"), rows, whole={"URL"})
        lines = written(console).splitlines()
        assert any("prefill-0" in line and "http://127.0.0.1:41234" in line for line in lines) is is_table
        assert any("http://127.0.0.1:41234" in line for line in lines)


def test_a_paragraph_wraps_between_words_and_is_one_line_in_a_file() -> None:
    text = "running streams go at half of their pace while a long prompt is read"
    console = screen(20)
    tell(console, text)
    assert " ".join(written(console).split()) == text
    assert max(map(len, written(console).splitlines())) <= 20
    file = Screen(width=20, file=StringIO())
    tell(file, text)
    assert written(file) == f"{text}\n"


def test_strangers_command_nothing_and_our_own_colours_stay() -> None:
    console = Screen(width=80, file=StringIO(), force_terminal=True, color_system="standard", highlight=False)
    tell(console, "[red]fail[/] of m\x1b[2J\x9b31m\u202e")
    show_table(console, ("Worker\x1b[2J", "URL"), [("w\x1b]0;x\x07", "u\x9b")])
    assert (
        written(console).replace("\x1b[31m", "").replace("\x1b[1m", "").replace("\x1b[0m", "").replace("\n", "").isprintable()
    )
    assert "\x1b[31mfail\x1b[0m of m[2J31m" in written(console)
