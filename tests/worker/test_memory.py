"""What does not fit is told before it is tried."""

from pathlib import Path

import pytest

from twinpool.errors import UserError
from twinpool.machine import read_machine
from twinpool.worker import memory
from twinpool.worker.gguf_header import GgufHeader
from twinpool.worker.settings import WorkerSettings
from twinpool.worker.shared_memory import KvFolder

SMALL = GgufHeader("llama", 8192, 23_040)
HUGE = GgufHeader("llama", 8192, 10**12)


def test_weights_and_kv_must_fit(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    settings = WorkerSettings(model_path=str(model), model_name="m")
    memory.check(settings, SMALL, model)
    if read_machine().memory_bytes is None:
        pytest.skip("this system does not tell")
    with pytest.raises(UserError, match=r"fewer --slots or --context-tokens"):
        memory.check(settings, HUGE, model)


def test_the_longest_prompts_kv_must_fit_into_shared_memory(tmp_path: Path) -> None:
    folder = KvFolder("a" * 32, tmp_path)
    settings = WorkerSettings(model_path="m", model_name="m")
    memory.check_shared(settings, SMALL, folder)
    with pytest.raises(UserError, match="--shm-size"):
        memory.check_shared(settings, HUGE, folder)
    folder.close()
