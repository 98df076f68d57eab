"""A worker's outer life without an engine: the ready line, the pipe to its parent, exit codes. Standard library only.

python fake_worker.py FD [--say TEXT] [--before-ready CODE] [--never-ready] [--deaf] [--noise BYTES] [--once FILE CODE]
"""

import argparse
import json
import os
import signal
import sys
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("fd", type=int)
parser.add_argument("--say", default="")
parser.add_argument("--before-ready", type=int)
parser.add_argument("--never-ready", action="store_true")
parser.add_argument("--deaf", action="store_true")
parser.add_argument("--noise", type=int, default=0)
parser.add_argument("--once", nargs=2, metavar=("FILE", "CODE"))
given = parser.parse_args()

if given.deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if given.say:
    sys.stderr.write(given.say + "\n")
if given.once and not Path(given.once[0]).exists():
    Path(given.once[0]).touch()
    sys.exit(int(given.once[1]))
if given.before_ready is not None:
    sys.exit(given.before_ready)
if not given.never_ready:
    sys.stdout.write("loading\n")
    ready = {"event": "ready", "url": f"http://127.0.0.1:{os.getpid() % 60000}", "incarnation": str(os.getpid())}
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
if given.noise:
    sys.stderr.write("x" * given.noise + "\n")
os.read(given.fd, 1)  # until the parent is gone
