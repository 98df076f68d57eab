"""``python llama_server.py MODEL PORT CORE``: llama.cpp's own HTTP server with its own defaults and four slots, as anyone runs
it. Prints a line when it answers, and ends with its standard input."""

import os
import sys
import time
import urllib.request

import xllamacpp

model, port, core = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {core})
params = xllamacpp.CommonParams()
params.model.path = model
params.hostnames = ["127.0.0.1"]
params.port = port
params.n_ctx = 4 * 4096
params.n_parallel = 4
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.cache_ram_mib = 0
server = xllamacpp.Server(params)
for _ in range(600):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):  # our own
            break
    except OSError:
        time.sleep(0.1)
print("ready", flush=True)  # noqa: T201
sys.stdin.read()
