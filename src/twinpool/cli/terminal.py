"""Consoles, and what is drawn on them: paragraphs and tables that can be read at any width."""

import os
from collections.abc import Iterable, Sequence, Set

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from twinpool.cli.printing import printable

_BETWEEN = 2  # blanks between two columns, and one at each edge
_WIDTH_OF_FILES = 160  # they have no edge; rich takes 80


class Screen(Console):
    """rich's own sequences pass, those in the text that it is given do not."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def open_screen(*, stderr: bool = False) -> Screen:
    found = Screen(stderr=stderr, highlight=False)
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found.width = _WIDTH_OF_FILES
    return found


def tell(console: Console, markup: str) -> None:
    """A paragraph: wrapped between words on a terminal, one line anywhere else."""
    console.print(markup, soft_wrap=not console.is_terminal)


def show_table(
    console: Console,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    is_figures: bool = False,
    whole: Set[str] = frozenset(),
) -> None:
    """Cells are markup. What stays whole is all but the first column where these are figures, else the first and those named in
    `whole`; other cells wrap between words. Where that is too wide still, the table is told row by row: a figure that is cut
    off is another figure."""
    kept = [(number > 0) == is_figures or name in whole for number, name in enumerate(head)]
    cells = list(zip(head, *rows, strict=True))
    widest = [max(cell_len(_plain(cell)) for cell in column) for column in cells]
    least = [
        width if keeps else max(cell_len(word) for cell in column for word in (_plain(cell).split() or [""]))
        for width, keeps, column in zip(widest, kept, cells, strict=True)
    ]
    widths = _fitted(widest, least, console.width - _BETWEEN * len(head))
    if widths is None:
        _show_stacked(console, head, rows)
        return
    table = Table(box=box.SIMPLE, header_style="bold", pad_edge=False, collapse_padding=True)
    for number, (name, width) in enumerate(zip(head, widths, strict=True)):
        table.add_column(name, justify="right" if is_figures and number else "left", width=width)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _fitted(widest: Sequence[int], least: Sequence[int], room: int) -> list[int] | None:
    """Widths of columns, the widest of them wrapped first; None where there is no room for their words."""
    if sum(least) > room:
        return None
    widths = list(widest)
    while sum(widths) > room:
        _, at = max((width, at) for at, width in enumerate(widths) if width > least[at])
        widths[at] -= 1
    return widths


def _show_stacked(console: Console, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if head[0]:
        console.print(f"\n[bold]{head[0]}[/]")
    for row in rows:
        console.print(f"\n{row[0]}")
        for name, cell in zip(head[1:], row[1:], strict=True):
            console.print(f"  {name}: {cell}" if name else f"  {cell}")
    console.print()


def _plain(markup: str) -> str:
    return Text.from_markup(markup).plain
