# SPDX-License-Identifier: Apache-2.0
"""A case: something that must be true on one SGLang release, and how a case says that it is not."""
from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Callable, Optional, Sequence

from .fleet import Fleet, FleetConfig, Request
from .processes import Nurseries, RankError, RankProxy
from .rank import FAILED, SUCCESS, Outcome
from .shapes import Shape

RELEASES = ("0.5.18", "0.5.21", "0.5.23")


class CaseFailed(Exception):
    """What was expected is not so."""


class CaseSkipped(Exception):
    """This machine cannot show it."""


def expect(truth: object, text: str) -> None:
    if not truth:
        raise CaseFailed(text)


def wait_for(condition: Callable[[], object], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


@dataclass
class Bench:
    """What a case works with."""
    nurseries: Nurseries
    release: str

    def fleet(self, shape: Shape, prefill_tp: int, decode_tp: int, **options: Any) -> Fleet:
        fleet = Fleet(self.nurseries, FleetConfig(self.release, shape, prefill_tp, decode_tp, **options))
        fleet.find_prefill()
        return fleet


def expect_bytes(fleet: Fleet, arrived: Sequence[Request]) -> None:
    """Every byte on every decode rank: these requests, and the canary elsewhere."""
    problems = fleet.problems(arrived)
    expect(not problems, "\n".join(problems[:5]) + f"\n{fleet.logs()}")


def expect_ends(outcomes: Sequence[Outcome], status: int, what: str) -> None:
    for number, outcome in enumerate(outcomes):
        expect(outcome.status == status, f"{what} rank {number} ended with status {outcome.status} ({outcome.text}), "
                                         f"not {'Success' if status == SUCCESS else 'Failed'}")


# The functions that a connector's threads run on the prefill, how many of each; names of different releases are summed.
THREADS = {
    "mooncake": ((4, ("transfer_worker",)), (1, ("bootstrap_thread",))),
    "nixl": ((4, ("transfer_worker",)), (1, ("bootstrap_thread", "bootstrap_thread_guarded"))),
    "mori": ((8, ("_transfer_worker",)), (1, ("bootstrap_worker",))),
}


def expect_alive(ranks: Sequence[RankProxy]) -> None:
    """The prefill's threads that a raise would have ended, and no decode in its list of dead ones."""
    for rank in ranks:
        threads = rank.call("threads")
        for count, names in THREADS[rank.call("connector")]:
            expect(sum(threads.get(name, 0) for name in names) == count,
                   f"{rank.name} lost a thread: {threads}\n{rank.log_tail()}")
        sessions = rank.call("failed_sessions")
        expect(not sessions, f"{rank.name} has given up {sessions}")


@dataclass(frozen=True)
class Case:
    name: str
    run: Callable[[Bench], None]
    library: bool
    releases: Sequence[str] = RELEASES


REGISTRY: list[Case] = []


def case(name: str, library: bool, releases: Sequence[str] = RELEASES) -> Callable[[Callable[[Bench], None]],
                                                                                Callable[[Bench], None]]:
    """Register a function as a case; library: it preloads at least one side."""
    def register(function: Callable[[Bench], None]) -> Callable[[Bench], None]:
        REGISTRY.append(Case(name, function, library, tuple(releases)))
        return function
    return register


__all__ = ["Bench", "Case", "CaseFailed", "CaseSkipped", "FAILED", "Optional", "REGISTRY", "RELEASES", "RankError",
           "SUCCESS", "case", "expect", "expect_alive", "expect_bytes", "expect_ends", "wait_for"]
