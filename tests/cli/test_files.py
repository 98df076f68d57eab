from pathlib import Path

import pytest

from twinpool.cli.files import KEY_VARIABLE, read_api_keys, read_config, read_engine_key, read_key, read_secret
from twinpool.config import Config
from twinpool.errors import UserError


def test_keys_one_a_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the team\nsk-one\n\n  sk-two  \n")
    assert read_api_keys(path) == {"sk-one", "sk-two"}
    assert read_api_keys(None) == frozenset()


@pytest.mark.parametrize(
    ("text", "said"), [("\n# none yet\n", "holds no key"), ("two words", "no HTTP header"), ("ключ", "no HTTP header")]
)
def test_files_that_hold_no_usable_key(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        read_api_keys(path)


def test_a_secret_loses_the_line_end_that_editors_add(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef\n")
    assert read_secret(path, "--handoff-secret-file") == "0123456789abcdef"


def test_a_secret_that_is_a_word_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("hunter2\n")
    with pytest.raises(UserError, match="openssl rand -hex 32"):
        read_secret(path, "--handoff-secret-file")


def test_what_cannot_be_read_names_file_and_option(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, said in (("absent", "no such file"), ("", "is a folder"), ("binary", "is not a text file")):
        with pytest.raises(UserError, match=said) as raised:
            read_api_keys(tmp_path / name)
        assert "--api-key-file" in str(raised.value)


def test_without_a_file_there_are_the_defaults() -> None:
    assert read_config(None) == Config()


@pytest.mark.parametrize("text", ["two words", "a\rb", "a\nb\x00", "ключ"])
def test_a_key_that_no_header_can_carry_is_refused_wherever_it_stands(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    path.write_bytes(text.replace("\r", "\x01").encode())
    for read in (read_api_keys, read_engine_key, read_key):
        with pytest.raises(UserError, match="no HTTP header can carry"):
            read(path)
    if "\x00" not in text:
        monkeypatch.setenv(KEY_VARIABLE, text)
        with pytest.raises(UserError, match=KEY_VARIABLE):
            read_key(None)


def test_the_key_to_ask_with_is_the_first_of_the_file_or_the_environment_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    path.write_text("# ours\nsk-one\nsk-two\n")
    monkeypatch.setenv(KEY_VARIABLE, "sk-env\n")
    assert (read_key(path), read_key(None)) == ("sk-one", "sk-env")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not a text file"):
        read_key(path)
