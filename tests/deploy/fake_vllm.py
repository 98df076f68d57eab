"""The outer life of ``vllm serve``: a process that answers /health on its port after a while, and others that it started.

python fake_vllm.py serve MODEL --port N [--say TEXT] [--fail CODE] [--never-healthy] [--deaf] [--pids FILE]

It starts two processes as vLLM starts its EngineCore, one of them in a session of its own and each deaf to SIGTERM; FILE gets
all three process ids, and FILE.shm the name of a piece of shared memory. Standard library only.
"""

import argparse
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

CHILD = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); signal.pause()"

parser = argparse.ArgumentParser()
parser.add_argument("command")
parser.add_argument("model")
parser.add_argument("--host", default="127.0.0.1")
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--say", default="")
parser.add_argument("--fail", type=int)
parser.add_argument("--never-healthy", action="store_true")
parser.add_argument("--deaf", action="store_true")
parser.add_argument("--pids", type=Path)
given, _ = parser.parse_known_args()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(503 if given.never_healthy or self.path != "/health" else 200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def child(*, in_session: bool) -> int:
    argv, tracker = [sys.executable, "-c", CHILD], (resource_tracker.getfd(),)  # it waits for all who could use it
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=in_session, pass_fds=tracker)
    assert process.stdout is not None
    process.stdout.readline()
    return process.pid


signal.signal(signal.SIGTERM, signal.SIG_IGN if given.deaf else lambda *_: sys.exit(0))
sys.stdout.write("INFO: this goes to standard output\n")
sys.stdout.flush()
if given.pids:
    memory = SharedMemory(create=True, size=64)  # which starts a resource tracker, a process more
    given.pids.with_suffix(".shm").write_text(memory.name)
    pids = [os.getpid(), child(in_session=False), child(in_session=True)]
    given.pids.with_suffix(".new").write_text(" ".join(map(str, pids)))
    given.pids.with_suffix(".new").replace(given.pids)
if given.say:
    sys.stderr.write(f"{given.say}\n")
if given.fail is not None:
    sys.exit(given.fail)
HTTPServer((given.host, given.port), Handler).serve_forever()
