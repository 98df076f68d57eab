"""Understands the command line of ``vllm serve`` as far as Twinpool writes it, and plays a stock vLLM: the in-tree scripted
engine, and a process of its own that has to be ended with it.

--fail makes it end as vLLM does when its engine core cannot start. The folder SCRIPTED_VLLM_PIDS gets a file for each run,
named by the port and the process id, with the id of its child.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import uvloop

from twinpool.engines.scripted.engine import ScriptedEngine
from twinpool.engines.scripted.script import Script

parser = argparse.ArgumentParser()
parser.add_argument("command", choices=["serve"])
parser.add_argument("model")
parser.add_argument("--host", required=True)
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--served-model-name", required=True)
parser.add_argument("--tensor-parallel-size", type=int, required=True)
parser.add_argument("--max-num-batched-tokens", type=int, required=True)
parser.add_argument("--max-num-seqs", type=int, required=True)
parser.add_argument("--enable-prompt-tokens-details", action="store_true")
parser.add_argument("--enforce-eager", action="store_true")
parser.add_argument("--kv-transfer-config", type=json.loads, required=True)
parser.add_argument("--fail", action="store_true")
given = parser.parse_args()

if given.fail:
    sys.stderr.write(
        "(EngineCore pid=7) ValueError: no room for the KV cache\nRuntimeError: Engine core initialization failed.\n"
    )
    sys.exit(1)

child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
(Path(os.environ["SCRIPTED_VLLM_PIDS"]) / f"{given.port}-{os.getpid()}").write_text(str(child.pid))


async def serve() -> None:
    transfer = given.kv_transfer_config
    assert transfer["kv_connector"] == "NixlConnector"
    script = Script(
        models=(given.served_model_name,),
        api_key=os.environ["VLLM_API_KEY"],
        slots=given.max_num_seqs,
        lease_s=transfer["kv_connector_extra_config"]["kv_lease_duration"],
    )
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with ScriptedEngine(script, host=given.host, port=given.port):
        sys.stdout.write("INFO: Application startup complete.\n")
        await stopped.wait()


uvloop.run(serve())
