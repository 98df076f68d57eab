"""``twinpool status``: what a running gateway does now, once or until Ctrl-C."""

from pathlib import Path
from typing import Any

import click

from twinpool.cli.files import read_secret
from twinpool.cli.fleet import engine_url
from twinpool.cli.printing import json_text
from twinpool.cli.state import DEFAULT_ADMIN_URL, fetch_state

EVERY_S = 2.0


@click.command(short_help="Show a running gateway's pools")
@click.argument("url", default=DEFAULT_ADMIN_URL)
@click.option("--admin-token-file", type=click.Path(path_type=Path), help="The token that `serve` was given.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, as the gateway gives it; with --watch one a line.")
@click.option("--watch", "-w", is_flag=True, help="Show it again and again, until Ctrl-C.")
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(min=0.1, max=3600.0),
    default=EVERY_S,
    show_default=True,
    help="Seconds between two looks, with --watch.",
)
def command(url: str, admin_token_file: Path | None, as_json: bool, watch: bool, every_s: float) -> None:
    """Show whether the service is well, the pools, what each worker does, and the last decisions with their reasons.

    URL is the gateway's admin port, where a browser finds the same as a page.  [default: http://127.0.0.1:8001]
    """
    token = read_secret(admin_token_file, "--admin-token-file") if admin_token_file else None
    admin_url = engine_url(url)

    def look() -> dict[str, Any]:
        return fetch_state(admin_url, token)

    state = look()
    if watch:
        from twinpool.cli.watching import watch_status

        watch_status(look, state, every_s, as_json=as_json)
    elif as_json:
        click.echo(json_text(state))
    else:
        from twinpool.cli.status_screen import show_status
        from twinpool.cli.terminal import open_screen

        show_status(open_screen(), state)
