from twinpool.policy.prefix import Prefixes

A = (1, 2, 3)
B = (1, 2, 9)


def holding(worker: str = "p1", prefix: tuple[int, ...] = A) -> Prefixes:
    known = Prefixes()
    known.holds(worker, prefix)
    return known


def test_only_a_common_beginning_counts() -> None:
    known = holding()
    assert known.cached_tokens("p1", A, 10_000) == 3 * 512
    assert known.cached_tokens("p1", B, 10_000) == 2 * 512
    assert known.cached_tokens("p1", (9, 2, 3), 10_000) == 0
    assert known.cached_tokens("p2", A, 10_000) == 0


def test_the_last_token_is_always_read() -> None:
    assert holding().cached_tokens("p1", A, 1000) == 999


def test_a_new_engine_holds_nothing() -> None:
    known = holding()
    known.forget("p1")
    assert known.cached_tokens("p1", A, 10_000) == 0
    known.told("p1", 1536, 0)  # of the one before
    known.holds("p1", A)
    assert known.cached_tokens("p1", A, 10_000) == 1536


def test_it_is_bounded_the_oldest_first_out() -> None:
    known = holding()
    for n in range(10, 10_000):
        known.holds("p1", (n,))
    assert known.cached_tokens("p1", A, 10_000) == 0
    assert known.cached_tokens("p1", (9_999,), 10_000) == 512
    assert sum(map(len, known.remember().held.values())) <= 8192


def test_it_is_remembered() -> None:
    one, other = holding(), Prefixes()
    one.told("p1", 1536, 768)
    other.recall(one.remember())
    assert other.cached_tokens("p1", A, 10_000) == one.cached_tokens("p1", A, 10_000) < 1536


# What engines tell


def test_an_engine_that_caches_nothing_is_soon_thought_to_hold_nothing() -> None:
    known = holding()
    for _ in range(40):
        known.told("p1", known.held_tokens("p1", A, 10_000), 0)
    assert known.cached_tokens("p1", A, 10_000) < 0.02 * 1536
    known.holds("p2", A)
    assert known.cached_tokens("p2", A, 10_000) == 1536, "of another one that says nothing"


def test_one_that_caches_again_is_believed_again() -> None:
    known = holding()
    for cached in [0] * 40 + [2000] * 60:
        known.told("p1", 1536, cached)
    assert 1500 < known.cached_tokens("p1", A, 10_000) <= 1536


def test_where_nothing_was_expected_nothing_is_learnt() -> None:
    known = holding()
    known.told("p1", 0, 0)
    assert known.cached_tokens("p1", A, 10_000) == 1536


def test_a_worker_holds_no_more_than_it_has_room_for() -> None:
    known = Prefixes()
    known.holds("p1", A, room_tokens=3 * 512 + 100)
    assert known.cached_tokens("p1", A, 10_000) == 3 * 512
    known.holds("p1", (9,), room_tokens=512)
    assert known.cached_tokens("p1", A, 10_000) == 0
    assert known.cached_tokens("p1", (9,), 10_000) == 512
