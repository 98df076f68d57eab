import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from twinpool import __version__
from twinpool.cli.group import COMMANDS, cli


def invoke(*args: str) -> "tuple[int, str, str]":
    result = CliRunner().invoke(cli, args, prog_name="twinpool")
    return result.exit_code, result.stdout, result.stderr


def test_help_names_every_command_with_its_help() -> None:
    code, out, _ = invoke("-h")
    assert code == 0
    for name, text in COMMANDS.items():
        assert f"{name}  " in out
        assert text in out


def test_help_imports_no_command() -> None:
    script = (
        "import sys; from twinpool.cli.group import cli; cli.main(['-h'], standalone_mode=False);"
        "sys.exit(any(name in sys.modules for name in ('twinpool.cli.serve', 'twinpool.gateway', 'aiohttp', 'rich')))"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_version() -> None:
    assert invoke("--version") == (0, f"twinpool {__version__}\n", "")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    code, out, _ = invoke(name, "-h")
    assert code == 0
    assert f"twinpool {name}" in out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["serv"], "No such command 'serv'"),
        (["--nope"], "No such option '--nope'"),
        (["serve", "--port", "http"], "'http' is not a valid integer"),
        (["serve", "--slo-ttft", "0"], "'--slo-ttft'"),
        (["serve", "--balance", "on"], "'on' is not one of 'auto', 'advise', 'off'"),
        (["serve", "--prefill", "a:1", "--model", "m"], "give one or the other"),
        (["serve", "--config", "/nonexistent.toml"], "no such file: /nonexistent.toml (given with --config)"),
        (["serve", "--model", "/nonexistent.gguf", "--port", "0", "--admin-port", "0"], "no such file: /nonexistent.gguf"),
        (["worker", "--cores", "x"], "write 0,1 or 0-3"),
        (["worker", "--cores", "99999"], "core 99999 is not one"),
        (["replay", "/nonexistent"], "cannot read the journal /nonexistent"),
        (["status", "ftp://x"], "'ftp://x' is not an engine's URL"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(args: list[str], said: str) -> None:
    code, out, err = invoke(*args)
    assert (code, out) == (2, "")
    assert err.startswith("twinpool: ")
    assert err.count("\n") == 1
    assert said in err


def test_a_broken_configuration_names_its_key(tmp_path: Path) -> None:
    path = tmp_path / "twinpool.toml"
    path.write_text("[server]\nprot = 8000\n")
    code, _, err = invoke("serve", "--config", str(path))
    assert code == 2
    assert "`prot`" in err
    assert str(path) in err


def test_without_a_command_there_is_help() -> None:
    code, _, err = invoke()
    assert code == 2
    assert "Commands:" in err


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    shell = f"{sys.executable} -m twinpool serve -h | head -1"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: twinpool serve")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("args", "option"),
    [
        (("bench", "x", "--rate"), "--rate"),
        (("check", "x", "--ttft-limit"), "--ttft-limit"),
        (("check", "x", "--utilization-floor"), "--utilization-floor"),
        (("compare", "--load"), "--load"),
        (("plan", "azure-conv", "--price"), "--price"),
        (("profile", "x", "--out", "p", "--timeout"), "--timeout"),
        (("serve", "--handoff-floor-gb-s"), "--handoff-floor-gb-s"),
        (("simulate", "article", "--rate-scale"), "--rate-scale"),
        (("worker", "--lease"), "--lease"),
    ],
)
@pytest.mark.parametrize("number", ["nan", "inf", "-1"])
def test_a_number_is_finite_and_in_its_range(args: tuple[str, ...], option: str, number: str) -> None:
    code, _, err = invoke(*args, number)
    assert (code, err.count("\n")) == (2, 1)
    assert f"'{option}'" in err
