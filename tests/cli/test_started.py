from pathlib import Path

from twinpool.cli.prepare import Local
from twinpool.cli.running import worker_argv
from twinpool.cli.worker import command
from twinpool.cli.worker_log import Terminal
from twinpool.deploy.plan import Footprint, PlannedWorker, Wanted, plan_workers
from twinpool.machine import Machine


def test_a_worker_understands_its_command_line_and_the_secret_is_not_on_it() -> None:
    plan = plan_workers(Machine((0,), 1), Wanted(0, 0, 1), Footprint(1))
    local = Local(plan, Path("/models/m.gguf"), "m", "a secret nobody may see", Terminal())
    argv = worker_argv(local, 12.5, plan.workers[0], 7)
    assert local.secret not in " ".join(argv)
    given = command.make_context("worker", argv[argv.index("worker") + 1 :]).params
    assert given["model"] == "/models/m.gguf"
    assert (given["port"], given["lease_s"], given["exit_with_fd"], given["cores"]) == (0, 12.5, 7, (0,))
    assert (given["slots"], given["context_tokens"], given["threads"]) == (4, 8192, 1)


def test_a_worker_that_is_bound_to_no_core_is_told_of_none() -> None:
    worker = PlannedWorker("a", "prefill", (), 3, 4, 8192)
    local = Local(plan_workers(Machine((), 3), Wanted(), Footprint(1)), Path("m"), "m", "s", Terminal())
    argv = worker_argv(local, 30.0, worker, 7)
    assert "--cores" not in argv
    assert argv[argv.index("--threads") + 1] == "3"
