"""``serve --engine vllm --dry-run`` for four machines: the exact lines; and what is refused before an engine starts."""

import json
import os
import shlex
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.deploy.machines import MACHINES, efa_machine, gpu_machine, gpus, host, plain_machine

from twinpool.cli.fleet import Engine
from twinpool.cli.group import cli
from twinpool.cli.prepare import Asked, prepare
from twinpool.cli.started import LocalVllm
from twinpool.config import load
from twinpool.errors import UserError

LINES = Path(__file__).with_name("launch_lines")
FREE = {"port": 0, "admin_port": 0}


def dry_run(root: Path, *options: str, model: str = "meta-llama/Llama-3.1-8B-Instruct") -> str:
    args = ["serve", "--engine", "vllm", "--model", model, "--dry-run", "--device-root", str(root), *options]
    result = CliRunner().invoke(cli, args, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.stdout


def told(root: Path, *options: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(dry_run(root, "--json", *options))
    return answer


def fake_vllm(folder: Path) -> Path:
    program = folder / "vllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


@pytest.mark.parametrize("machine", MACHINES)
def test_the_exact_lines(tmp_path: Path, machine: str) -> None:
    root = MACHINES[machine](tmp_path)
    elsewhere = ("--engine-host", "10.0.0.5") if machine in ("efa", "infiniband") else ()
    shown = dry_run(root, "--tensor-parallel", "4" if machine == "infiniband" else "1", *elsewhere)
    assert shown == (LINES / f"{machine}.txt").read_text()


@pytest.mark.parametrize("machine", MACHINES)
def test_json_has_the_same_lines_in_pieces(tmp_path: Path, machine: str) -> None:
    root = MACHINES[machine](tmp_path)
    text, planned = dry_run(root), told(root)["vllm"]
    for engine in planned["engines"]:
        words = [*(f"{name}={value}" for name, value in engine["env"].items()), *engine["argv"]]
        assert any(shlex.split(line) == words for line in text.splitlines() if "vllm serve" in line)
    assert {"backend", "over", "reason", "handoff_floor_gb_s"} <= planned["fabric"].keys()


def test_efa_without_its_device_files_is_a_loud_warning(tmp_path: Path) -> None:
    shown = dry_run(efa_machine(tmp_path, is_open=False))
    assert "Warning: this machine has 4 EFA devices" in shown
    assert "vpc.amazonaws.com/efa" in shown
    assert '"backends":["UCX"]' in shown


def test_the_floor_is_the_link_s_until_somebody_says_otherwise(tmp_path: Path) -> None:
    root = efa_machine(tmp_path / "efa")
    assert told(root)["handoff_floor_gb_s"] == 2.0
    assert told(root, "--handoff-floor-gb-s", "7.5")["handoff_floor_gb_s"] == 7.5
    assert told(plain_machine(tmp_path / "none"))["handoff_floor_gb_s"] is None
    assert "under 7.5 GB/s it counts as slow\n" in dry_run(root, "--handoff-floor-gb-s", "7.5")
    assert "no floor for its speed\n" in dry_run(root, "--handoff-floor-gb-s", "0")


def test_the_configuration_sets_what_options_do_not(tmp_path: Path) -> None:
    config = tmp_path / "twinpool.toml"
    config.write_text(
        "[launch]\nmax_num_batched_tokens = 4096\nmax_num_seqs = 32\nport = 9000\nside_channel_port = 9100\n"
        "[routing]\nlease_s = 60\nhandoff_floor_gb_s = 1.5\n"
    )
    planned = told(gpu_machine(tmp_path), "--config", str(config), "--max-num-seqs", "64")
    first, second = planned["vllm"]["engines"]
    assert (first["declared"]["budget_tokens"], first["declared"]["slots"], first["declared"]["lease_s"]) == (4096, 64, 60.0)
    assert (first["url"], second["url"]) == ("http://127.0.0.1:9000", "http://127.0.0.1:9001")
    assert second["env"]["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "9101"
    assert planned["handoff_floor_gb_s"] == 1.5


def test_ranks_of_older_vllms_find_their_side_channels_free(tmp_path: Path) -> None:
    engines = told(gpus(host(tmp_path), 8), "--tensor-parallel", "4")["vllm"]["engines"]
    assert [engine["env"]["VLLM_NIXL_SIDE_CHANNEL_PORT"] for engine in engines] == ["5600", "5604"]


def test_a_model_in_a_folder_goes_by_its_name_and_its_size_is_known(tmp_path: Path) -> None:
    model = tmp_path / "Llama-Local"
    model.mkdir()
    with (model / "model-00001.safetensors").open("wb") as file:
        os.truncate(file.fileno(), 100 << 30)
    engine = told(gpu_machine(tmp_path / "m"), "--model", str(model))["vllm"]["engines"][0]
    assert engine["argv"][2:3] == [str(model)]
    assert engine["argv"][engine["argv"].index("--served-model-name") + 1] == "Llama-Local"
    result = CliRunner().invoke(
        cli,
        ["serve", "--engine", "vllm", "--model", str(model), "--dry-run", "--device-root", str(plain_machine(tmp_path / "n"))],
    )
    assert "too little memory" in result.stderr


def test_keys_are_named_and_not_shown(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sk-nobody-may-see-it\n")
    shown = dry_run(plain_machine(tmp_path), "--engine-api-key-file", str(key))
    assert f"VLLM_API_KEY is the key in {key}" in " ".join(shown.split())
    assert "sk-nobody" not in shown


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--engine", "vllm"], "needs a model: --model"),
        (["--tensor-parallel", "2"], "--tensor-parallel is for vLLM: give --engine vllm as well"),
        (
            ["--engine", "vllm", "--model", "m", "--handoff-secret-file", "f"],
            "--handoff-secret-file is for the embedded engine",
        ),
        (["--engine", "vllm", "--prefill", "a:1"], "--engine starts some here"),
        (["--prefill", "a:1", "--nixl-backend", "ucx"], "--nixl-backend starts some here"),
        (["--engine", "vllm", "--model", "m", "--engine-args", "'"], '--engine-args "\'": No closing quotation'),
        (["--engine", "vllm", "--model", "m", "--engine-host", "192.0.2.1"], "192.0.2.1 is no address of this machine"),
        (["--engine", "vllm", "--model", "m", "--engine-host", "no.such.host.invalid"], "is no address of this machine"),
        (["--engine", "vllm", "--model", "m", "--tensor-parallel", "999"], "take a smaller --tensor-parallel"),
    ],
)
def test_what_contradicts_itself_is_one_line(args: list[str], said: str) -> None:
    result = CliRunner().invoke(cli, ["serve", "--dry-run", *args])
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_no_vllm_is_said_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    asked = {**FREE, "engine": "vllm", "model": "m"}
    with pytest.raises(UserError, match=r"vLLM is not installed here: pip install vllm nixl, or give its command with --vllm"):
        prepare(Asked(**asked))
    with pytest.raises(UserError, match=r"no such program: /nonexistent \(given with --vllm\)"):
        prepare(Asked(**asked, vllm="/nonexistent"))
    shown = CliRunner().invoke(cli, ["serve", "--dry-run", "--engine", "vllm", "--model", "m"]).stdout
    assert "Warning: vLLM is not installed here" in shown
    fake_vllm(tmp_path)
    assert (
        f"{tmp_path}/vllm serve m" in CliRunner().invoke(cli, ["serve", "--dry-run", "--engine", "vllm", "--model", "m"]).stdout
    )


def launched(folder: Path, **other: Any) -> tuple[LocalVllm, dict[str, str]]:
    options = {**FREE, "engine": "vllm", "model": "m", "vllm": str(fake_vllm(folder)), "log": "-"}
    service = prepare(Asked(**options | other))
    assert isinstance(service.fleet, LocalVllm)
    return service.fleet, dict(service.engine_keys)


def test_the_key_goes_through_the_environment_and_to_the_gateway(tmp_path: Path) -> None:
    fleet, keys = launched(tmp_path)
    command = fleet.command("decode-0", 7)
    assert command.env["VLLM_API_KEY"] == keys["decode-0"] == keys["prefill-0"]
    assert len(keys["decode-0"]) == 64
    assert keys["decode-0"] not in " ".join(command.argv)
    assert keys["decode-0"] not in repr(fleet)
    file = tmp_path / "key"
    file.write_text("sk-mine\n")
    fleet, keys = launched(tmp_path, engine_api_key_file=file)
    assert fleet.command("prefill-0", 7).env["VLLM_API_KEY"] == keys["prefill-0"] == "sk-mine"


def test_what_is_started_is_what_was_planned_behind_a_guard(tmp_path: Path) -> None:
    fleet, _ = launched(tmp_path)
    for planned in fleet.plan.engines:
        command = fleet.command(planned.id, 7)
        at = command.argv.index("twinpool.deploy.guard")
        assert command.argv[at + 1 : at + 3] == ["7", planned.url]
        assert tuple(command.argv[at + 4 :]) == planned.argv
        assert planned.env.items() <= command.env.items()
        assert fleet.engine(planned.id, planned.url) == Engine(
            planned.id, planned.url, planned.role, planned.allowed_roles, planned.declared
        )


def test_ports_that_are_taken_are_left_alone(tmp_path: Path) -> None:
    config = tmp_path / "twinpool.toml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config.write_text(f"[launch]\nport = {port}\nside_channel_port = {port}\n")
        fleet, _ = launched(tmp_path, config=config)
    used = {int(engine.url.rpartition(":")[2]) for engine in fleet.plan.engines}
    side = {int(engine.env["VLLM_NIXL_SIDE_CHANNEL_PORT"]) for engine in fleet.plan.engines}
    assert len(used) == len(side) == 2
    assert port not in used | side


def test_another_machine_s_devices_are_for_looking_only(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--device-root .* goes with --dry-run only"):
        launched(tmp_path, device_root=tmp_path)


def test_a_floor_below_nothing_is_no_setting() -> None:
    with pytest.raises(UserError, match="handoff_floor_gb_s"):
        load("[routing]\nhandoff_floor_gb_s = -1\n", "twinpool.toml")
