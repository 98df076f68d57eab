"""What the law carries, beside every policy it should beat: the tables of `docs/policies.md`.

For each cell (`cells`) and each arm (a way of serving, with its best budget or split) the highest rate is searched at which
nine in ten requests meet the objectives, on one sample of the traffic, and played again on others; beside it stands the bound,
which no policy can exceed on engines of any budget. An arm's best option is climbed to, as `twinpool plan` does it.

Every play is kept (`--cache`) under a digest of the code that it hangs on, so the command goes on where it was interrupted, and
`--only` runs a part. `--traces` names a folder with the whole traces, as published: `azure-2023-conv.csv`,
`mooncake-conversation.jsonl`.

    python benchmarks/policies.py [--only tp8,200,0.05] [--arms law,colocated,static,aws] [--seeds 5] [--jobs 2]
"""

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

from cells import PEERS, Cell, Way, bound_req_s, bounds_of, carries, cells, digest, play, sample, traces_from
from twinpool.sim.climb import Outcome, Play, climb
from twinpool.sim.findings import findings_of
from twinpool.sim.options import Way as Option

ANY_BUDGET = 8192
"""Of the law, where it does not have colocated's: two pools gain nothing more beyond it."""

ARMS = ("law", "colocated", "static", *PEERS)
_CACHED = Path(__file__).parent.parent / ".cache" / "policies.jsonl"


class Played(NamedTuple):
    """One play. `attainment_ratio` is 0 where it was given up."""

    attainment_ratio: float
    ttft_mean_s: float | None
    itl_p99_s: float | None
    flips: int
    cpu_s: float


class Figure(NamedTuple):
    """An arm's best way; `rate_req_s` is carried on the first sample, `confirmed` are the shares that met the objectives there
    on the others."""

    way: Way
    rate_req_s: float
    confirmed: tuple[float, ...]
    seen: Played | None


class Kept:
    """Every play by its cell, way, seed and rate, and the code."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, Played] = {}
        self._digests: dict[str, str] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                row = json.loads(line)
                self._found[row["key"]] = Played(*row["played"])

    def play(self, cell: Cell, way: Way, seed: int, rate: float, *, is_search: bool) -> Played:
        if way.policy not in self._digests:
            self._digests[way.policy] = digest(way.policy)
        key = f"{cell} | {way} | seed {seed} | {rate:.6g} | {'search' if is_search else 'whole'} | {self._digests[way.policy]}"
        if key not in self._found:
            began = process_time()
            run = (carries if is_search else play)(cell, way, sample(cell, seed), rate)
            seen = findings_of(run).report if run.is_whole else None
            self._found[key] = Played(
                run.attainment_ratio,
                seen.ttft_s.mean if seen and seen.ttft_s else None,
                seen.itl_s.p99 if seen and seen.itl_s else None,
                len(run.role_changes),
                round(process_time() - began, 1),
            )
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:  # a line is written at once, also by two processes
                file.write(json.dumps({"key": key, "played": self._found[key]}) + "\n")
        return self._found[key]


def row(cell: Cell, arm: str, kept: Kept) -> tuple[list[Way], list[float], int]:
    """Options along which what is carried rises to a best one and falls again, their bounds, and where to begin. The law has
    the budget that is best for colocated, and the largest; it starts from a split that is not the best one. Peers start from
    the best fixed one."""
    if arm in ("colocated", "static"):
        found = bounds_of(cell).rows()[Option.COLOCATED if arm == "colocated" else Option.POOLS]
        ways = [Way("fixed", each.prefill, each.decode, each.colocated, each.budget_tokens) for each, _ in found.options]
        return ways, [bound for _, bound in found.options], found.first
    if arm == "law":
        budgets = {figure(cell, "colocated", 1, kept).way.budget_tokens, ANY_BUDGET}
        return [Way("law", 5, 3, 0, budget) for budget in sorted(budgets)], [bound_req_s(cell)] * len(budgets), 0
    static = figure(cell, "static", 1, kept).way
    return [Way(arm, static.prefill, static.decode, 0, static.budget_tokens)], [bound_req_s(cell)], 0


def figure(cell: Cell, arm: str, seeds: int, kept: Kept) -> Figure:
    """The arm's best way."""
    ways, bounds, first = row(cell, arm, kept)

    def player(index: int) -> Play:
        return lambda rate: kept.play(cell, ways[index], 1, round(rate, 2), is_search=True)

    carried = [found.req_s or 0.0 if found.outcome is Outcome.SEARCHED else 0.0 for found in climb(bounds, first, player)]
    best = max(range(len(ways)), key=lambda n: carried[n])
    way, rate = ways[best], round(carried[best], 2)
    if not rate:
        return Figure(way, 0.0, (), None)
    confirmed = [kept.play(cell, way, seed, rate, is_search=False).attainment_ratio for seed in range(2, seeds + 1)]
    return Figure(way, rate, tuple(confirmed), kept.play(cell, way, 1, rate, is_search=True))


def table(found: dict[tuple[Cell, str], Figure], chosen: list[Cell], arms: list[str]) -> Iterator[str]:
    """Markdown: a row a cell; for each arm what it carries, in brackets its share of the bound, its budget or split, and the
    least share that met the objectives on other samples."""
    yield "| cell | bound | " + " | ".join(arms) + " | law/colocated |"
    yield "|---|---|" + "---|" * (len(arms) + 1)
    for cell in chosen:
        ceiling = bound_req_s(cell)
        texts = []
        for arm in arms:
            best = found.get((cell, arm))
            if best is None:
                texts.append("–")
                continue
            option = best.way.budget_tokens if arm in ("law", "colocated") else f"{best.way.prefill}:{best.way.decode}"
            least = f", ≥ {min(best.confirmed):.0%}" if best.confirmed else ""
            texts.append(f"{best.rate_req_s:.1f} ({best.rate_req_s / ceiling:.0%}; {option}{least})")
        law, colocated = found.get((cell, "law")), found.get((cell, "colocated"))
        ratio = f"{law.rate_req_s / colocated.rate_req_s:.2f}" if law and colocated and colocated.rate_req_s else "–"
        yield f"| {cell} | {ceiling:.1f} | " + " | ".join(texts) + f" | {ratio} |"


def _figure(cell: Cell, arm: str, seeds: int, cache: Path, traces: Path | None) -> Figure:
    if traces is not None:
        traces_from(traces)
    return figure(cell, arm, seeds, Kept(cache))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="profile,traffic,itl_s; * for any; may be repeated")
    parser.add_argument("--arms", default="law,colocated,static", help=f"of {', '.join(ARMS)}")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=_CACHED)
    parser.add_argument("--traces", type=Path)
    options = parser.parse_args()
    if options.traces is not None:
        traces_from(options.traces)
    arms = options.arms.split(",")
    chosen = [cell for cell in cells() if not options.only or any(_matches(cell, each) for each in options.only)]
    todo = [(cell, arm) for cell in chosen for arm in arms]
    found: dict[tuple[Cell, str], Figure] = {}
    with ProcessPoolExecutor(options.jobs) as pool:
        asked = {
            pool.submit(_figure, cell, arm, options.seeds, options.cache, options.traces): (cell, arm) for cell, arm in todo
        }
        for n, done in enumerate(as_completed(asked), 1):
            cell, arm = asked[done]
            best = found[cell, arm] = done.result()
            print(f"{n}/{len(todo)} {cell}, {arm}: {best.rate_req_s:.1f} req/s by {best.way}; {best.seen}", file=sys.stderr)
    print("\n".join(table(found, chosen, arms)))


def _matches(cell: Cell, asked: str) -> bool:
    wanted: list[Any] = asked.split(",")
    return all(want in ("*", "") or want == str(have) for want, have in zip(wanted, cell, strict=False))


if __name__ == "__main__":
    main()
