import json
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from twinpool.cli.group import cli
from twinpool.cli.prepare import Asked, configure, dry_run, prepare
from twinpool.config import BalanceMode, Config, RoutingPolicy
from twinpool.errors import UserError

FREE = {"port": 0, "admin_port": 0}


def test_options_win_over_the_file_and_the_rest_of_it_stays(tmp_path: Path) -> None:
    path = tmp_path / "twinpool.toml"
    path.write_text("[server]\nport = 1\nadmin_port = 2\nexpose_route = true\n[objectives]\nslo_itl_s = 0.1\n")
    config = configure(Asked(config=path, port=3, slo_ttft_s=2.0))
    assert (config.server.port, config.server.admin_port, config.server.expose_route) == (3, 2, True)
    assert (config.objectives.slo_ttft_s, config.objectives.slo_itl_s) == (2.0, 0.1)
    assert configure(Asked()) == Config()


LOADED, COST = RoutingPolicy.LEAST_LOADED, RoutingPolicy.LEAST_COST
AUTO, ADVISE, OFF = BalanceMode


@pytest.mark.parametrize(
    ("asked", "text", "mode", "policy"),
    [
        (None, "", OFF, LOADED),
        ("off", "", OFF, LOADED),
        ("auto", "", AUTO, COST),
        ("advise", "", ADVISE, LOADED),
        (None, '[balance]\nmode = "auto"', AUTO, COST),
        ("off", '[balance]\nmode = "auto"', OFF, LOADED),
        ("auto", '[balance]\nmode = "off"\ndwell_s = 5', AUTO, COST),
        ("auto", '[routing]\npolicy = "least_loaded"', AUTO, LOADED),
        ("advise", '[routing]\npolicy = "least_cost"', ADVISE, COST),
        ("auto", "[routing]\nmax_waiting = 7", AUTO, COST),
    ],
)
def test_balance_chooses_the_routing_unless_the_file_does(
    tmp_path: Path, asked: str | None, text: str, mode: BalanceMode, policy: RoutingPolicy
) -> None:
    path = tmp_path / "twinpool.toml"
    path.write_text(text)
    config = configure(Asked(config=path, balance=asked))
    assert (config.balance.mode, config.routing.policy) == (mode, policy)
    assert config.balance.dwell_s == (5.0 if "dwell_s" in text else 2.0)
    assert config.routing.max_waiting == (7 if "max_waiting" in text else 1024)


def test_who_is_late_is_refused_only_where_that_can_be_predicted(tmp_path: Path) -> None:
    assert configure(Asked(balance="auto", refuse_late=True)).routing.refuse_late
    path = tmp_path / "twinpool.toml"
    path.write_text("[routing]\nrefuse_late = true\n")
    for asked in (Asked(refuse_late=True), Asked(config=path), Asked(balance="advise", refuse_late=True)):
        with pytest.raises(UserError, match="takes predictions: --balance auto"):
            configure(asked)
    result = CliRunner().invoke(cli, ["serve", "--dry-run", "--refuse-late"])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize("option", ["port", "admin_port"])
def test_a_port_in_use_is_told_before_anything_is_started(option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"cannot listen on 127\.0\.0\.1:{port} .*choose another with --{option[:5]}"):
            prepare(Asked(**{**FREE, option: port}))


@pytest.mark.parametrize("option", ["journal", "access_log", "log"])
def test_what_is_written_needs_its_folder(tmp_path: Path, option: str) -> None:
    with pytest.raises(UserError, match=r"there is no folder .*absent"):
        prepare(Asked(**{**FREE, option: tmp_path / "absent" / "file"}))


def test_attaching_needs_neither_model_nor_engine() -> None:
    service = prepare(Asked(**FREE, prefill=("a:1",), decode=("b:1",)))
    assert isinstance(service.fleet, tuple)
    assert [engine.id for engine in service.fleet] == ["prefill-0", "decode-0"]


def test_a_dry_run_fetches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINPOOL_CACHE", str(tmp_path))
    planned = dry_run(Asked())
    assert planned.model == "SmolLM2-135M-Instruct"
    assert planned.plan is not None
    assert [worker.role for worker in planned.plan.workers] == ["prefill", "decode"]
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_in_json_is_one_object_and_in_text_names_the_cores() -> None:
    args = ["serve", "--dry-run", "--colocated-workers", "1"]
    result = CliRunner().invoke(cli, [*args, "--json"])
    assert [worker["id"] for worker in json.loads(result.stdout)["plan"]["workers"]] == ["colocated-0"]
    assert result.stderr == ""
    assert "colocated-0" in CliRunner().invoke(cli, args).stdout


def test_urls_may_follow_one_option() -> None:
    result = CliRunner().invoke(
        cli, ["serve", "--dry-run", "--json", "--prefill", "a:1", "b:1", "--decode", "c:1", "--port", "1"]
    )
    engines = json.loads(result.stdout)["engines"]
    assert [(engine["id"], engine["url"]) for engine in engines] == [
        ("prefill-0", "http://a:1"),
        ("prefill-1", "http://b:1"),
        ("decode-0", "http://c:1"),
    ]


def test_engines_have_a_key_each_or_one_for_all(tmp_path: Path) -> None:
    for name, key in (("own", "key-own"), ("all", "key-all")):
        (tmp_path / name).write_text(f"{key}\n")
    path = tmp_path / "twinpool.toml"
    path.write_text(
        f'[server]\nengine_api_key_file = "{tmp_path}/all"\n'
        f'[[workers]]\nurl = "http://a:1"\napi_key_file = "{tmp_path}/own"\n[[workers]]\nurl = "http://b:1"\nlease_s = 6\n'
    )
    service = prepare(Asked(**FREE, config=path))
    assert service.engine_keys == {"colocated-0": "key-own", "colocated-1": "key-all"}
    assert "key-" not in repr(service)
    assert "key-" not in CliRunner().invoke(cli, ["serve", "--config", str(path), "--dry-run", "--json"]).output


def test_a_key_that_no_header_can_carry_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("two words")
    with pytest.raises(UserError, match="no HTTP header can carry"):
        prepare(Asked(**FREE, colocated=("a:1",), engine_api_key_file=tmp_path / "key"))
