import json
import sys

import pytest

from twinpool.errors import UserError
from twinpool.worker.models import resolve_model
from twinpool.worker.models.hub import choose_gguf, served_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Repositories as the hub shows them."""

    def __init__(self):
        self.repositories = {"org/one": {"Model-Q8_0.gguf": b"GGUF-q8", "README.md": b"hello"}}
        self.refusals = {}  # repository -> (status, error code)
        self.tokens = set()
        self.paths = []

    def answer(self, request):
        self.paths.append(request.path)
        self.tokens.add(request.headers["Authorization"])
        parts = request.path.strip("/").split("/")
        listing = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if listing else parts[:2])
        status, code = self.refusals.get(repo, (404, "RepoNotFound"))
        headers, body = {"X-Error-Code": code}, b""
        if repo in self.repositories and repo not in self.refusals:
            files = self.repositories[repo]
            if listing:
                siblings = [{"rfilename": name} for name in files]
                status, headers = 200, {"Content-Type": "application/json"}
                body = json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode()
            else:
                name = "/".join(parts[4:])
                status, body = 200, files[name]
                headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{name.replace("/", "-")}"'}
        request.send_response(status)
        for header in headers.items():
            request.send_header(*header)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)


@pytest.fixture
def hub(serve_http, monkeypatch, tmp_path):
    fake = FakeHub()
    url = serve_http(fake.answer)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return fake


def test_the_only_gguf(hub, progress):
    model = resolve_model("org/one", progress)
    assert model.path.read_bytes() == b"GGUF-q8"
    assert model.name == "org/one"
    assert "Bearer hf_secret" in hub.tokens


def test_a_file_by_name(hub, progress):
    hub.repositories["org/two"] = {"a/M-Q4_0.gguf": b"GGUF-4", "a/M-Q8_0.gguf": b"GGUF-8"}
    assert resolve_model("org/two:a/M-Q4_0.gguf", progress).path.read_bytes() == b"GGUF-4"


def test_all_shards_are_fetched(hub, progress):
    shards = {f"M-Q8_0-0000{n}-of-00002.gguf": b"GGUF%d" % n for n in (1, 2)}
    hub.repositories["org/big"] = shards
    path = resolve_model("org/big", progress).path
    assert path.name == "M-Q8_0-00001-of-00002.gguf"
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == shards


def test_a_cached_one_needs_no_hub(hub, progress, monkeypatch):
    first = resolve_model("org/one", progress)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    asked = len(hub.paths)
    assert resolve_model("org/one", progress) == first
    assert len(hub.paths) == asked  # the library would try for 20 s before it looks into its cache


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (404, "RepoNotFound", "no org/x on the hub"),
        (401, "RepoNotFound", "no org/x on the hub"),
        (403, "GatedRepo", "gated: accept its terms"),
        (500, "", "it answered 500"),
    ],
)
def test_refusals(hub, progress, status, code, message):
    hub.refusals["org/x"] = (status, code)
    with pytest.raises(UserError, match=message) as caught:
        resolve_model("org/x", progress)
    assert "\n" not in str(caught.value)


def test_no_connection(hub, progress, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="no connection"):
        resolve_model("org/one", progress)


def test_offline_by_choice(hub, progress, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        resolve_model("org/one", progress)
    assert hub.paths == []


def test_an_impossible_name(hub, progress):
    with pytest.raises(UserError, match="cannot be a name"):
        resolve_model("a--b/c", progress)


def test_missing_extra(progress, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"pip install 'twinpool\[local\]'"):
        resolve_model("org/one", progress)


MANY = ["README.md", "M-Q4_0.gguf", "M-Q4_K_M.gguf", "M-f16.gguf", "mmproj-M-Q8_0.gguf", "M.imatrix.gguf"]


@pytest.mark.parametrize(
    ("names", "wanted", "expected"),
    [
        (MANY, None, ["M-Q4_K_M.gguf"]),
        ([*MANY, "M-Q8_0.gguf"], None, ["M-Q8_0.gguf"]),
        ([*MANY, "sub/m.q8_0.gguf"], None, ["sub/m.q8_0.gguf"]),
        (MANY, "f16", ["M-f16.gguf"]),
        (MANY, "q4_0", ["M-Q4_0.gguf"]),
        (MANY, "M-Q4_0.gguf", ["M-Q4_0.gguf"]),
        (["weights.gguf"], None, ["weights.gguf"]),
        (
            ["Q8_0/M-00002-of-00002.gguf", "Q8_0/M-00001-of-00002.gguf"],
            None,
            ["Q8_0/M-00001-of-00002.gguf", "Q8_0/M-00002-of-00002.gguf"],
        ),
    ],
)
def test_choice(names, wanted, expected):
    assert choose_gguf("o/r", names, wanted) == expected


@pytest.mark.parametrize(
    ("names", "wanted", "message"),
    [
        (["model.safetensors"], None, "has no GGUF"),
        (["mmproj-M-Q8_0.gguf"], None, "has no GGUF"),
        (["A-IQ2_M.gguf", "B-IQ3_M.gguf"], None, "out of A-IQ2_M.gguf, B-IQ3_M.gguf"),
        (["A-Q8_0.gguf", "B-Q8_0.gguf"], None, "has several"),
        (MANY, "Q5_0", "out of M-Q4_0.gguf"),
        (MANY, "N.gguf", "has no N.gguf"),
    ],
)
def test_no_choice(names, wanted, message):
    with pytest.raises(UserError, match=message):
        choose_gguf("o/r", names, wanted)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M-Instruct.Q8_0.gguf", "SmolLM2-135M-Instruct"),
        ("Qwen2.5-0.5B-Instruct-Q4_K_M.gguf", "Qwen2.5-0.5B-Instruct"),
        ("M-bf16-00001-of-00003.gguf", "M"),
        ("model.gguf", "model"),
        ("Q8_0.gguf", "Q8_0"),
        ("noending", "noending"),
    ],
)
def test_served_name(file, name):
    assert served_name(file) == name
