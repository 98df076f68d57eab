from twinpool.deploy.restarts import RestartPolicy, Restarts

POLICY = RestartPolicy(first_delay_s=0.5, longest_delay_s=4.0, well_after_s=60.0, start_tries=3)


def test_the_wait_doubles_up_to_its_cap() -> None:
    record = Restarts(POLICY)
    assert [record.delay_after(ready=True, ran_s=1.0) for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_good_run_is_forgiven_all_that_was_before() -> None:
    record = Restarts(POLICY)
    for _ in range(5):
        record.delay_after(ready=True, ran_s=1.0)
    assert record.delay_after(ready=True, ran_s=60.0) == 0.5


def test_a_worker_that_never_came_up_is_given_up() -> None:
    record = Restarts(POLICY)
    assert [record.delay_after(ready=False, ran_s=0.0) for _ in range(3)] == [0.5, 1.0, None]


def test_one_that_did_serve_is_never_given_up() -> None:
    record = Restarts(POLICY)
    record.delay_after(ready=True, ran_s=1.0)
    assert None not in [record.delay_after(ready=False, ran_s=0.0) for _ in range(2000)]
