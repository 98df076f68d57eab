"""How the program ends when it cannot do what it was asked to: never with the code of a verdict, which 1 is for `check`, `plan`
and `replay`.

    2     a person's mistake, or standard output takes no more (a full disk): one line says so
    70    an error of ours: the traceback
    130   Ctrl-C
    143   SIGTERM, which ends a command as Ctrl-C does: what it started ends with it
    141   whoever read standard output went away, as `head` does: not a word
"""

import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import click

from twinpool.cli.printing import echo
from twinpool.cli.signals import INTERRUPTED

MISTAKE = 2
OUR_ERROR = 70
NO_READER = 141
TERMINATED = 143

_terminated = threading.Event()

_TAKES_NO_MORE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def open_missing_streams() -> None:
    """A standard stream that is closed goes nowhere. Its number would else be given to the next file, and be written to."""
    for number, name, flags in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_WRONLY), (2, "stderr", os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, flags), True)  # the lowest number that is free: this one
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def end_on_sigterm() -> None:
    """Commands that run a service listen for themselves."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """As Ctrl-C would now: an event loop has a handler of its own for that. A shell's background jobs have none."""
    _terminated.set()
    handler = signal.getsignal(signal.SIGINT)
    (handler if callable(handler) else signal.default_int_handler)(number, frame)


class LeftAloneError(Exception):
    """Nobody reads standard output any more."""


@contextmanager
def no_reader_told_apart() -> Iterator[None]:
    """click and rich end the program with 1 when a pipe breaks; they do not get to see it."""
    try:
        yield
    except BrokenPipeError as broken:
        raise LeftAloneError from broken
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):
            raise LeftAloneError from ended
        raise


@contextmanager
def with_codes() -> Iterator[None]:
    """Ends the program with the code of what went wrong."""
    try:
        yield
    except click.ClickException as mistake:
        mistake.show()
        sys.exit(mistake.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(TERMINATED if _terminated.is_set() else INTERRUPTED)
    except LeftAloneError:
        _silence()
        sys.exit(NO_READER)
    except OSError as problem:
        if problem.filename is not None or problem.errno not in _TAKES_NO_MORE:
            echo(traceback.format_exc(), err=True)
            sys.exit(OUR_ERROR)
        _silence()
        echo(f"twinpool: cannot write standard output: {(problem.strerror or '').lower()}", err=True)
        sys.exit(MISTAKE)
    except Exception:  # whatever it is, it is no verdict
        echo(traceback.format_exc(), err=True)
        sys.exit(OUR_ERROR)


def _silence() -> None:
    """What is still to be written goes nowhere: Python would try again at its end, and complain."""
    with suppress(OSError):  # a stream without a number, in a test
        number = sys.stdout.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
