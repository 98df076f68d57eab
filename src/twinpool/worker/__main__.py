"""``python -m twinpool.worker``: the settings as JSON on standard input (a secret among them is in no process list)."""

import sys

import msgspec

from twinpool.errors import UserError
from twinpool.worker.app import run
from twinpool.worker.settings import WorkerSettings


def main() -> int:
    try:
        run(msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerSettings))
    except (UserError, msgspec.DecodeError) as error:
        print(f"twinpool worker: {error}", file=sys.stderr)  # noqa: T201 its one line
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
