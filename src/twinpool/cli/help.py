"""Help in sections, for commands with more options than one list bears."""

from typing import Any

import click


class Option(click.Option):
    """Stands in a `section` of the help. Says nothing of ranges that nobody would leave."""

    def __init__(self, *args: Any, section: str = "Other", **attrs: Any) -> None:
        super().__init__(*args, **attrs)
        self.section = section

    def get_help_extra(self, ctx: click.Context) -> Any:
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra


class Sections(click.Command):
    """Lists its options section by section, in the order of their first option."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                sections.setdefault(getattr(param, "section", "Other"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)
