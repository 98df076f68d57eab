"""``twinpool`` and ``python -m twinpool``."""

from twinpool.cli.ending import end_on_sigterm, open_missing_streams
from twinpool.cli.group import cli


def main() -> None:
    open_missing_streams()
    end_on_sigterm()
    cli.main(prog_name="twinpool")


if __name__ == "__main__":
    main()
