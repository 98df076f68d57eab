from pathlib import Path

import pytest

from twinpool.cli.files import read_api_keys, read_config, read_secret
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
