"""``twinpool profile``: measures a live engine, or asks a database, and writes what the simulator and the planner take for its
costs."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from twinpool.cli.files import read_key
from twinpool.cli.help import Option, Sections
from twinpool.cli.numbers import POSITIVE, Number
from twinpool.cli.outputs import check_writable, write_file
from twinpool.cli.printing import echo, json_text
from twinpool.errors import UserError
from twinpool.profile import MOST_TOKEN_BYTES, MOST_TOKENS

if TYPE_CHECKING:
    from twinpool.profile import Profile


_LIVE, _DATABASE, _EITHER = "A live engine", "NVIDIA AIConfigurator's database", "Either"
_KINDS = click.Choice(["vllm", "sglang", "trtllm"])
_SEQUENCES, _CONTEXT = click.IntRange(2, MOST_TOKENS), click.IntRange(64, MOST_TOKENS)
_TOKENS, _BYTES = click.IntRange(1, MOST_TOKENS), click.IntRange(1, MOST_TOKEN_BYTES)


@click.command(cls=Sections, short_help="Measure a live engine")
@click.argument("url", required=False)
@click.option("--decode", "decode_url", metavar="URL", cls=Option, section=_LIVE, help="Another, to measure the handoff to it.")
@click.option(
    "--beside",
    "beside_url",
    metavar="URL",
    cls=Option,
    section=_LIVE,
    help="Another of the same machine, which is to read prompts meanwhile.",
)
@click.option("--model", metavar="NAME", cls=Option, section=_LIVE, help="Where it serves several.")
@click.option("--api-key-file", type=click.Path(path_type=Path), metavar="FILE", cls=Option, section=_LIVE, help="Its key.")
@click.option(
    "--timeout",
    "timeout_s",
    type=POSITIVE,
    default=300.0,
    show_default=True,
    cls=Option,
    section=_LIVE,
    help="Seconds, of one request.",
)
@click.option(
    "--from-aiconfigurator", "estimated", metavar="MODEL", cls=Option, section=_DATABASE, help="Ask it, for this model."
)
@click.option("--system", metavar="NAME", cls=Option, section=_DATABASE, help="Its name for the machine: h100_sxm, for one.")
@click.option(
    "--tensor-parallel",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    cls=Option,
    section=_DATABASE,
    help="GPUs a worker.",
)
@click.option("--engine", type=_KINDS, default="vllm", show_default=True, cls=Option, section=_DATABASE)
@click.option("--engine-version", metavar="VERSION", cls=Option, section=_DATABASE, help="By default its current one.")
@click.option(
    "--gpu-memory-utilization",
    "memory_ratio",
    type=Number(0, 1, min_open=True),
    default=0.9,
    show_default=True,
    cls=Option,
    section=_DATABASE,
    help="What the engine takes of each GPU.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    cls=Option,
    section=_EITHER,
    help="The profile to write.",
)
@click.option(
    "--sequences",
    type=click.IntRange(2, MOST_TOKENS),
    cls=Option,
    section=_EITHER,
    help="At once, where nobody says; else 256.",
)
@click.option("--context", type=_CONTEXT, cls=Option, section=_EITHER, help="Tokens of context, where nobody says.")
@click.option("--kv-tokens", type=_TOKENS, cls=Option, section=_EITHER, help="Room for KV: an engine's log has it.")
@click.option("--kv-bytes-per-token", type=_BYTES, cls=Option, section=_EITHER, help="Where nobody says.")
@click.option("--json", "as_json", is_flag=True, cls=Option, section=_EITHER, help="The profile on standard output too.")
def command(
    url: str | None,
    estimated: str | None,
    system: str | None,
    tensor_parallel: int,
    engine: str,
    engine_version: str | None,
    memory_ratio: float,
    decode_url: str | None,
    beside_url: str | None,
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
    with --decode the handoff to another. Takes a few minutes.

    Without an engine, after `pip install aiconfigurator`, NVIDIA's estimates are a profile to begin with:

    \b
    twinpool profile --from-aiconfigurator meta-llama/Meta-Llama-3.1-70B \\
        --system h100_sxm --tensor-parallel 8 --out llama-70b.json
    """
    if (url is None) == (estimated is None):
        raise UserError("give either the URL of an engine to measure, or --from-aiconfigurator MODEL")
    check_writable(out=out)
    given = _Given(context, sequences, kv_tokens, kv_bytes_per_token)
    if estimated is not None:
        if decode_url is not None or beside_url is not None:
            raise UserError("--decode and --beside are for live engines: the database has none")
        if system is None:
            raise UserError("say for which machine: --system h100_sxm, for one")
        _write(
            _estimated(estimated, system, tensor_parallel, engine, engine_version, memory_ratio, given, out.stem),
            out,
            as_json=as_json,
        )
    elif url is not None:
        key = read_key(api_key_file)
        _write(_measured(url, decode_url, beside_url, model, key, timeout_s, given, out.stem), out, as_json=as_json)


class _Given(NamedTuple):
    """What the user says of the engine, which goes before what anybody else says."""

    context_tokens: int | None
    sequences: int | None
    kv_tokens: int | None
    kv_bytes_per_token: int | None


def _estimated(
    model: str,
    system: str,
    tensor_parallel: int,
    engine: str,
    engine_version: str | None,
    memory_ratio: float,
    given: _Given,
    name: str,
) -> "Profile":
    import msgspec

    from twinpool.bench.estimated import Asked, ask, profile_of

    sequences = given.sequences or 256  # vLLM's own default
    asked = Asked(model, system, tensor_parallel, engine, engine_version, memory_ratio, sequences, given.context_tokens)
    profile = profile_of(asked, ask(asked), name=name)
    return msgspec.structs.replace(
        profile,
        kv_tokens=given.kv_tokens or profile.kv_tokens,
        kv_bytes_per_token=given.kv_bytes_per_token or profile.kv_bytes_per_token,
    )


def _measured(
    url: str,
    decode_url: str | None,
    beside_url: str | None,
    model: str | None,
    key: str | None,
    timeout_s: float,
    given: _Given,
    name: str,
) -> "Profile":
    import uvloop

    from twinpool.bench.profiling import EngineSays, Limits
    from twinpool.bench.target import target_of

    target = target_of(url, api_key=key)
    others = [None if other is None else target_of(other, api_key=key) for other in (decode_url, beside_url)]

    def limits_of(says: EngineSays) -> Limits:
        found = {
            "--context": given.context_tokens or says.context_tokens,
            "--sequences": given.sequences or says.slots,
            "--kv-tokens": given.kv_tokens or says.kv_tokens or (says.context_tokens or 0) * (says.slots or 0) or None,
            "--kv-bytes-per-token": given.kv_bytes_per_token or says.kv_bytes_per_token,
        }
        missing = [option for option, value in found.items() if value is None]
        if missing:
            raise UserError(f"{url} does not say everything about itself: give {', '.join(missing)}")
        return Limits(*(value or 0 for value in found.values()))

    async def run() -> "Profile":
        from dataclasses import replace

        from twinpool.bench.prepare import prepare
        from twinpool.bench.profiling import Bench, engine_says, measure
        from twinpool.bench.target import find_model
        from twinpool.http1 import Pool

        pool = Pool()
        try:
            says = await engine_says(pool, target)
            limits = limits_of(says)
            prepared = await prepare(pool, target, model, timeout_s=timeout_s)
            decode, beside = [
                other and replace(other, model=await find_model(pool, other, prepared.target.model)) for other in others
            ]
            bench = Bench(pool, prepared, timeout_s, lambda text: echo(text, err=True))
            return await measure(bench, limits, says, name=name, decode=decode, beside=beside)
        finally:
            await pool.close()

    return uvloop.run(run())


def _write(profile: "Profile", out: Path, *, as_json: bool) -> None:
    import msgspec

    from twinpool.profile import parse_profile

    text = msgspec.json.format(msgspec.json.encode(profile), indent=1)
    parse_profile(text, str(out))  # what is written can be read
    write_file(out, text + b"\n", "--out")
    if as_json:
        click.echo(json_text(profile))
    else:
        echo(f"{out} is written: twinpool plan TRACE --profile {out}")
