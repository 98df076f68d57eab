"""``twinpool status``: what a running gateway does now."""

from pathlib import Path

import click

from twinpool.cli.files import read_secret
from twinpool.cli.fleet import engine_url
from twinpool.cli.printing import json_text
from twinpool.cli.state import DEFAULT_ADMIN_URL, fetch_state


@click.command(short_help="Show a running gateway's pools")
@click.argument("url", default=DEFAULT_ADMIN_URL)
@click.option("--admin-token-file", type=click.Path(path_type=Path), help="The token that `serve` was given.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, as the gateway gives it.")
def command(url: str, admin_token_file: Path | None, as_json: bool) -> None:
    """Show the pools, what each worker does, and the last decisions with their reasons.

    URL is the gateway's admin port.  [default: http://127.0.0.1:8001]
    """
    token = read_secret(admin_token_file, "--admin-token-file") if admin_token_file else None
    state = fetch_state(engine_url(url), token)
    if as_json:
        click.echo(json_text(state))
        return
    from twinpool.cli.screen import show_status
    from twinpool.cli.terminal import open_screen

    show_status(open_screen(), state)
