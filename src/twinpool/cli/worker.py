"""``twinpool worker``: one embedded engine, by hand on another machine, or as `serve` starts it."""

import importlib.util
import os
from functools import partial
from pathlib import Path

import click
import msgspec

from twinpool.cli.files import read_secret
from twinpool.cli.help import Option, Sections
from twinpool.cli.numbers import Number
from twinpool.errors import UserError

SECRET_VARIABLE = "TWINPOOL_HANDOFF_SECRET"  # noqa: S105  # the name of it; command lines are everybody's to read


FILE = click.Path(path_type=Path)


class CoreList(click.ParamType[tuple[int, ...]]):
    """``0,2-4``."""

    name = "cores"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        cores: set[int] = set()
        try:
            for part in str(value).split(","):
                first, _, last = part.partition("-")
                cores.update(range(int(first), int(last or first) + 1))
        except ValueError:
            cores.clear()
        if not cores or min(cores) < 0:
            self.fail(f"{value!r} is no list of cores: write 0,1 or 0-3", param, ctx)
        if hasattr(os, "sched_getaffinity") and (foreign := cores - os.sched_getaffinity(0)):
            self.fail(f"core {min(foreign)} is not one this process may use", param, ctx)
        return tuple(sorted(cores))


def require_engine() -> None:
    """Raises `UserError` when the embedded engine is not installed."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise UserError("the embedded engine is not installed: pip install 'twinpool[local]'")


ENGINE = partial(click.option, cls=Option, section="Engine")
LISTEN = partial(click.option, cls=Option, section="Where it is reached")
HANDOFF = partial(click.option, cls=Option, section="Handoff")


@click.command(cls=Sections, short_help="Run one embedded engine")
@ENGINE("--model", metavar="MODEL", help="GGUF file, or repo/name[:file] on the hub.  [default: SmolLM2-135M-Instruct]")
@ENGINE("--model-name", metavar="NAME", help="What clients call it.  [default: the file's name]")
@ENGINE("--cores", type=CoreList(), metavar="LIST", help="Bind it to these, such as 0,2-3.  [default: all]")
@ENGINE("--threads", type=click.IntRange(1), metavar="N", help="[default: as many as cores]")
@ENGINE("--slots", type=click.IntRange(1, 256), metavar="N", help="Sequences computed at once.  [default: 4]")
@ENGINE("--context-tokens", type=click.IntRange(1), metavar="N", help="Of a sequence.  [default: the model's, at most 8192]")
@ENGINE("--batch-tokens", type=click.IntRange(16), metavar="N", help="Computed in one step.  [default: 256]")
@ENGINE("--queue-limit", type=click.IntRange(0), metavar="N", help="Requests that may wait for a slot.  [default: 64]")
@LISTEN("--host", default="127.0.0.1", metavar="HOST", help="[default: 127.0.0.1]")
@LISTEN("--port", type=click.IntRange(0, 65535), default=8100, metavar="PORT", help="0 takes any free one.  [default: 8100]")
@LISTEN("--advertise-host", metavar="HOST", help="The name other workers reach it by.  [default: --host]")
@HANDOFF("--handoff-secret-file", type=FILE, metavar="FILE", help="The same on every worker of a fleet.")
@HANDOFF("--lease", "lease_s", type=Number(1), metavar="S", help="How long KV waits to be read.  [default: 30]")
@HANDOFF("--shared-memory/--no-shared-memory", default=None, help="Through memory on one machine.  [default: yes]")
@click.option("--exit-with-fd", type=click.IntRange(0), hidden=True)
def command(model: str | None, model_name: str | None, handoff_secret_file: Path | None, **settings: object) -> None:
    """Run one embedded engine (llama.cpp) that speaks OpenAI and hands KV over to its fellows.

    It does prefill, decode or both, as each request asks. On two machines, with the same secret file on both:

    \b
      A:  twinpool worker --host 0.0.0.0 --advertise-host A --handoff-secret-file secret
      B:  twinpool worker --host 0.0.0.0 --advertise-host B --handoff-secret-file secret
      gateway:  twinpool serve --prefill http://A:8100 --decode http://B:8100
    """
    require_engine()
    from twinpool.worker.app import run
    from twinpool.worker.models import open_progress, resolve_model
    from twinpool.worker.settings import WorkerSettings

    if handoff_secret_file:
        secret: str | None = read_secret(handoff_secret_file, "--handoff-secret-file")
    else:
        secret = os.environ.get(SECRET_VARIABLE)
    with open_progress() as progress:
        file = resolve_model(model, progress)
    given = {name: value for name, value in settings.items() if value is not None}
    known = {"model_path": str(file.path), "model_name": model_name or file.name, "handoff_secret": secret}
    run(msgspec.convert(known | given, WorkerSettings))
