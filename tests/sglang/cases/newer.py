# SPDX-License-Identifier: Apache-2.0
"""A release that nobody has seen: one method of a connector has another signature, and does what it did."""
from __future__ import annotations

from typing import Sequence

from cases.peers import run_checked
from cases.stock import OLDER, SHORT, expect_refused
from harness.alter import VERSION
from harness.case import Bench, case, expect
from harness.processes import RankProxy
from harness.rank import CLASS_PREFIX

RECENT = ("0.5.21", "0.5.23")


def expect_said(ranks: Sequence[RankProxy], connector: str, role: str, others: str, method: str) -> None:
    """Each rank has said once what it left alone, and once what it hooked."""
    for rank in ranks:
        said = [line.split(": ", 1)[1] for line in rank.log().splitlines() if "kvsplice[" in line and ": hook: " in line]
        left = f"hook: {connector} {role} of sglang {VERSION} is left as it was: {method} takes 0 parameters, without 'self'"
        hooked = [line for line in said if f" hooked {connector} {others} of sglang {VERSION}; " in line]
        expect(said.count(left) == 1 and len(hooked) == 1 and len(said) == 2, f"{rank.name} said {said}")


@case("newer-prefill-left-alone", True, RECENT)
def prefill_left_alone(bench: Bench) -> None:
    """The prefill's methods do not fit: it is as the release does it, and says so; the decode is hooked."""
    for connector in CLASS_PREFIX:
        altered = {"connector": connector, "prefill_altered": ("KVManager", "send_aux")}
        with bench.fleet(SHORT, 2, 2, **altered) as fleet:
            run_checked(fleet, chunk_pages=5)
            expect_said(fleet.prefill, connector, "prefill", "registration, decode", f"{CLASS_PREFIX[connector]}KVManager.send_aux")
            expect(all("is left as it was" not in rank.log() for rank in fleet.decode), "the decode left something alone")
        with bench.fleet(SHORT, 2, 1, tokens=200, **altered) as fleet:
            if connector == "mooncake" and bench.release in OLDER:
                expect_refused(fleet)
            elif connector != "mori" and bench.release not in OLDER:
                run_checked(fleet)  # by the release itself


@case("newer-decode-left-alone", True, RECENT)
def decode_left_alone(bench: Bench) -> None:
    """The decode's methods do not fit: to the prefill, which is hooked, it is one without the library."""
    for connector in CLASS_PREFIX:
        # mori's engine is not used for a plan of ours: what it refuses for such a decode stays refused.
        decode_tp = 2 if connector == "mori" else 1
        with bench.fleet(SHORT, 2, decode_tp, tokens=200, connector=connector, decode_altered=("KVReceiver", "send_metadata")) as fleet:
            run_checked(fleet, chunk_pages=5)
            expect_said(fleet.decode, connector, "decode", "registration, prefill", f"{CLASS_PREFIX[connector]}KVReceiver.send_metadata")
