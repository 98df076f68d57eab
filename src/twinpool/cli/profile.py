"""``twinpool profile``: measures a live engine, and writes what the simulator and the planner take for its costs."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from twinpool.errors import UserError

if TYPE_CHECKING:
    from twinpool.profile import Profile


@click.command(short_help="Measure a live engine")
@click.argument("url")
@click.option("--decode", "decode_url", metavar="URL", help="A second engine that KV is handed to, to measure the handoff.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The profile to write.")
@click.option("--model", metavar="NAME", help="Where it serves several.")
@click.option("--api-key-file", type=click.Path(path_type=Path), metavar="FILE", help="Its key.")
@click.option("--sequences", type=click.IntRange(2), help="It runs at once, where it does not say.")
@click.option("--context", type=click.IntRange(64), help="Tokens of context, where it does not say.")
@click.option("--kv-tokens", type=click.IntRange(1), help="Room for KV, where it does not say (its log does).")
@click.option("--kv-bytes-per-token", type=click.IntRange(1), help="Where it does not say.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(0, min_open=True), default=300.0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="The profile on standard output too, and nothing else.")
def command(
    url: str,
    decode_url: str | None,
    out: Path,
    model: str | None,
    api_key_file: Path | None,
    sequences: int | None,
    context: int | None,
    kv_tokens: int | None,
    kv_bytes_per_token: int | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Measure the idle engine at URL: prefill by length, decode steps by batch and context, what a mixed step costs extra, and
    with --decode the handoff to another. Takes a few minutes."""
    import msgspec
    import uvloop

    from twinpool.bench.profiling import EngineSays, Limits
    from twinpool.bench.target import target_of
    from twinpool.cli.bench import read_key
    from twinpool.profile import parse_profile

    key = read_key(api_key_file)
    target = target_of(url, api_key=key)
    decode = None if decode_url is None else target_of(decode_url, api_key=key)

    def limits_of(says: EngineSays) -> Limits:
        """The user's word goes before the engine's."""
        found = {
            "--context": context or says.context_tokens,
            "--sequences": sequences or says.slots,
            "--kv-tokens": kv_tokens or says.kv_tokens or (says.context_tokens or 0) * (says.slots or 0) or None,
            "--kv-bytes-per-token": kv_bytes_per_token or says.kv_bytes_per_token,
        }
        missing = [option for option, value in found.items() if value is None]
        if missing:
            raise UserError(f"{url} does not say everything about itself: give {', '.join(missing)}")
        return Limits(*(value or 0 for value in found.values()))

    async def run() -> "Profile":
        from dataclasses import replace

        from twinpool.bench.prepare import prepare
        from twinpool.bench.profiling import Bench, engine_says, measure
        from twinpool.http1 import Pool

        pool = Pool()
        try:
            says = await engine_says(pool, target)
            limits = limits_of(says)
            prepared = await prepare(pool, target, model, timeout_s=timeout_s)
            partner = None if decode is None else replace(decode, model=prepared.target.model)
            bench = Bench(pool, prepared, timeout_s, lambda text: click.echo(text, err=True))
            return await measure(bench, limits, says, name=out.stem, decode=partner)
        finally:
            await pool.close()

    text = msgspec.json.format(msgspec.json.encode(uvloop.run(run())), indent=1)
    parse_profile(text, str(out))  # what is written can be read
    try:
        out.write_bytes(text + b"\n")
    except OSError as problem:
        raise UserError(f"cannot write {out}: {problem.strerror}") from None
    click.echo(text.decode() if as_json else f"{out} is written: twinpool plan TRACE --profile {out}")
