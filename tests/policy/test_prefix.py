from twinpool.policy.prefix import Prefixes

A = (1, 2, 3)
B = (1, 2, 9)


def test_only_a_common_beginning_counts() -> None:
    known = Prefixes()
    known.holds("p1", A)
    assert known.cached_tokens("p1", A, 10_000) == 3 * 512
    assert known.cached_tokens("p1", B, 10_000) == 2 * 512
    assert known.cached_tokens("p1", (9, 2, 3), 10_000) == 0
    assert known.cached_tokens("p2", A, 10_000) == 0


def test_the_last_token_is_always_read() -> None:
    known = Prefixes()
    known.holds("p1", A)
    assert known.cached_tokens("p1", A, 1000) == 999


def test_a_new_engine_holds_nothing() -> None:
    known = Prefixes()
    known.holds("p1", A)
    known.forget("p1")
    assert known.cached_tokens("p1", A, 10_000) == 0


def test_it_is_bounded_the_oldest_first_out() -> None:
    known = Prefixes()
    known.holds("p1", A)
    for n in range(10, 10_000):
        known.holds("p1", (n,))
    assert known.cached_tokens("p1", A, 10_000) == 0
    assert known.cached_tokens("p1", (9_999,), 10_000) == 512
    assert sum(map(len, known.remember().values())) <= 8192


def test_it_is_remembered() -> None:
    one, other = Prefixes(), Prefixes()
    one.holds("p1", A)
    other.recall(one.remember())
    assert other.cached_tokens("p1", A, 10_000) == 1536


def test_a_worker_holds_no_more_than_it_has_room_for() -> None:
    known = Prefixes()
    known.holds("p1", A, room_tokens=3 * 512 + 100)
    assert known.cached_tokens("p1", A, 10_000) == 3 * 512
    known.holds("p1", (9,), room_tokens=512)
    assert known.cached_tokens("p1", A, 10_000) == 0
    assert known.cached_tokens("p1", (9,), 10_000) == 512
