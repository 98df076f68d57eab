from pathlib import Path

from twinpool.cli.started import Local
from twinpool.cli.worker import SECRET_VARIABLE, command
from twinpool.cli.worker_log import Terminal
from twinpool.deploy.plan import Footprint, Plan, PlannedWorker, Wanted, plan_workers
from twinpool.machine import Machine


def test_a_worker_understands_its_command_line_and_the_secret_is_not_on_it() -> None:
    plan = plan_workers(Machine((0,), 1), Wanted(0, 0, 1), Footprint(1))
    local = Local(plan, Path("/models/m.gguf"), "m", 12.5, Terminal(), "a secret nobody may see")
    argv, env = (started := local.command("colocated-0", 7)).argv, started.env
    assert local.secret not in " ".join(argv)
    assert env[SECRET_VARIABLE] == local.secret
    assert local.secret not in repr(local)
    given = command.make_context("worker", list(argv[argv.index("worker") + 1 :])).params
    assert given["model"] == "/models/m.gguf"
    assert (given["port"], given["lease_s"], given["exit_with_fd"], given["cores"]) == (0, 12.5, 7, (0,))
    assert (given["slots"], given["context_tokens"], given["threads"]) == (4, 8192, 1)


def test_a_worker_that_is_bound_to_no_core_is_told_of_none() -> None:
    plan = Plan((PlannedWorker("a", "prefill", (), 3, 4, 8192),), (), None, ())
    argv = Local(plan, Path("m"), "m", 30.0, Terminal(), "s").command("a", 7).argv
    assert "--cores" not in argv
    assert argv[argv.index("--threads") + 1] == "3"
