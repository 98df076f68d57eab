"""``twinpool`` and ``python -m twinpool``."""

from twinpool.cli.group import cli


def main() -> None:
    cli.main(prog_name="twinpool")


if __name__ == "__main__":
    main()
