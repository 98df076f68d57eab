"""A person's mistake is one line on standard error that says what to do; nothing is started, nothing is left."""

import socket
from pathlib import Path

import pytest
from tests.live.service import run

pytestmark = pytest.mark.timeout(60)


def check_one_line(*arguments: str, says: tuple[str, ...]) -> None:
    ended = run(*arguments)
    assert ended.returncode == 2, ended
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith("twinpool: ")
    for word in says:
        assert word in line


@pytest.mark.parametrize("option", ["--port", "--admin-port"])
def test_a_port_in_use(option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        others = [] if option == "--admin-port" else ["--admin-port", "0"]
        check_one_line("serve", "--port", "0", *others, option, port, says=(port, option))


def test_a_missing_model(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.gguf")
    check_one_line("serve", "--port", "0", "--admin-port", "0", "--model", missing, says=(missing,))


def test_a_model_that_is_none(tmp_path: Path) -> None:
    model = tmp_path / "letter.gguf"
    model.write_text("Dear Sir or Madam,")
    check_one_line("serve", "--port", "0", "--admin-port", "0", "--model", str(model), says=(str(model),))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[server\nport = 8000\n", ("TOML", "line 1")),
        ("[server]\nprot = 8000\n", ("prot", "server")),
        ("[sever]\nport = 8000\n", ("sever",)),
        ('[server]\nport = "http"\n', ("port", "server")),
        ("[routing]\nqueue_timeout_s = []\n", ("queue_timeout_s",)),
        ('[[workers]]\nurl = "http://127.0.0.1:1"\nrole = "cook"\n', ("cook", "prefill")),
    ],
    ids=["toml", "key", "table", "type", "list", "role"],
)
def test_a_broken_config_file(tmp_path: Path, text: str, says: tuple[str, ...]) -> None:
    config = tmp_path / "twinpool.toml"
    config.write_text(text)
    where = () if "cook" in says else (str(config),)
    check_one_line("serve", "--config", str(config), says=(*where, *says))


def test_a_missing_config_file(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.toml")
    check_one_line("serve", "--config", missing, says=(missing, "--config"))


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_an_unknown_option(command: str) -> None:
    check_one_line(command, "--prot", "8000", says=("--prot",))


def test_an_unknown_command() -> None:
    check_one_line("srve", says=("srve",))


def test_engines_both_here_and_there() -> None:
    check_one_line("serve", "--prefill", "http://127.0.0.1:1", "--prefill-workers", "2", says=("--prefill-workers",))


def test_no_gateway_to_ask() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    check_one_line("status", f"http://127.0.0.1:{port}", says=(str(port), "twinpool serve"))
