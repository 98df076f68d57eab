import pytest

from twinpool.errors import UserError
from twinpool.worker.models import ModelFile, open_progress, resolve_model


@pytest.fixture
def gguf(tmp_path):
    path = tmp_path / "Some-Model-1.5B.Q4_K_M.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00")
    return path


def test_a_path(progress, gguf):
    assert resolve_model(str(gguf), progress) == ModelFile(gguf, "Some-Model-1.5B")


def test_a_path_from_home(progress, gguf, monkeypatch):
    monkeypatch.setenv("HOME", str(gguf.parent))
    assert resolve_model(f"~/{gguf.name}", progress).path == gguf


def test_a_path_that_looks_like_a_repository(progress, gguf, monkeypatch, tmp_path):
    (tmp_path / "models").mkdir()
    copy = tmp_path / "models" / "mine"
    copy.write_bytes(gguf.read_bytes())
    monkeypatch.chdir(tmp_path)
    assert resolve_model("models/mine", progress) == ModelFile(copy, "mine")


@pytest.mark.parametrize("spec", ["./x.gguf", "x.gguf", "models/x.gguf", "../a/b", "~/a", "/a/b", "word", "a/b/c"])
def test_a_missing_path_is_not_looked_for_on_the_hub(progress, monkeypatch, spec):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="no such file"):
        resolve_model(spec, progress)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "is a folder"),
        (lambda path: path.write_bytes(b"PK\x03\x04"), "is not a GGUF"),
        (lambda path: path.touch(), "is not a GGUF"),
    ],
)
def test_what_is_no_gguf(progress, tmp_path, make, message):
    make(tmp_path / "x.gguf")
    with pytest.raises(UserError, match=message):
        resolve_model(str(tmp_path / "x.gguf"), progress)


def test_an_empty_name(progress):
    with pytest.raises(UserError, match="is empty"):
        resolve_model("", progress)


@pytest.mark.model
def test_the_default(default_model, monkeypatch):
    monkeypatch.setenv("TWINPOOL_CACHE", str(default_model.parents[1]))
    with open_progress() as progress:
        assert resolve_model(None, progress) == ModelFile(default_model, "SmolLM2-135M-Instruct")
