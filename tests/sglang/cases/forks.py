# SPDX-License-Identifier: Apache-2.0
"""Ranks forked from a process that has imported the connector already, with the environment set after the fork."""
from __future__ import annotations

from cases.options import SMALL, both, routes, run_checked
from harness.case import Bench, case, expect


def lines(fleet_logs: str, text: str) -> int:
    return sum(text in line for line in fleet_logs.splitlines())


@case("forked-after-import", True)
def forked_after_import(bench: Bench) -> None:
    """The hooks survive the fork, and each child has the options of its own environment."""
    for connector in ("mooncake", "nixl"):
        with bench.fleet(SMALL, 2, 1, connector=connector, fork_first=True,
                         **both(KVSPLICE_TRANSPORT="tcp", KVSPLICE_STAGING_MB="99999")) as fleet:
            run_checked(fleet, chunk_pages=3)
            expect(routes(fleet) == {"tcp"}, f"routes {routes(fleet)}\n{fleet.logs()}")
            for rank in [*fleet.prefill, *fleet.decode]:
                expect(lines(rank.log(), "KVSPLICE_STAGING_MB=99999 is outside 1 to 4096; 4096 is used") == 1,
                       f"{rank.name} has not looked at its own environment once\n{rank.log_tail()}")


@case("forked-to-be-off", True, ("0.5.21",))
def forked_to_be_off(bench: Bench) -> None:
    """A child whose environment turns the library off after the import leaves everything to the connector."""
    with bench.fleet(SMALL, 2, 2, fork_first=True, **both(KVSPLICE_ENABLE="0")) as fleet:
        run_checked(fleet)
        expect(not routes(fleet), f"something was registered\n{fleet.logs()}")
