# SPDX-License-Identifier: Apache-2.0
"""What each release does by itself. These prove that the harness can fail, and what kvsplice starts from."""
from __future__ import annotations

from functools import partial

from harness import shapes
from harness.case import Bench, case, expect, expect_alive, expect_bytes, wait_for
from harness.fleet import Fleet
from harness.processes import RankProxy
from harness.rank import Call

REFUSAL = ("Transfer thread failed because of PD Disaggregation does NOT support PD different TP sizes for non-MLA "
           "SWA hybrid models yet.")
SHORT = shapes.GPT_OSS_120B.with_layers(1, 2)
OLDER = ("0.5.18", "0.5.21")


def lost_a_thread(rank: RankProxy) -> bool:
    return bool(rank.call("threads").get("transfer_worker") == 3)


def says(rank: RankProxy, text: str) -> bool:
    return text in rank.log()


def expect_refused(fleet: Fleet) -> None:
    """The exact refusal: one transfer thread of each prefill rank ends, and nobody learns that the room is lost."""
    request = fleet.request()
    fleet.fill(request)
    fleet.open(request)
    fleet.send(request)
    for rank in fleet.prefill:
        expect(wait_for(partial(lost_a_thread, rank), 10),
               f"no transfer thread of {rank.name} ended: {rank.call('threads')}\n{rank.log_tail()}")
        expect(wait_for(partial(says, rank, REFUSAL), 2), f"{rank.name} said something else:\n{rank.log_tail()}")
    for rank in fleet.decode:
        expect(rank.call("poll", room=request.room) == 2, f"{rank.name} was told of the failure")
        problems = rank.call("check", holds=[])
        expect(not any("component 1" in problem for problem in problems), f"state arrived: {problems[:1]}")


@case("refused", False, OLDER)
def refused(bench: Bench) -> None:
    for prefill_tp, decode_tp in ((2, 1), (1, 2)):
        with bench.fleet(SHORT, prefill_tp, decode_tp, tokens=200, prefill_library=False,
                         decode_library=False) as fleet:
            expect_refused(fleet)


@case("sliced-by-upstream", False, ("0.5.23",))
def sliced(bench: Bench) -> None:
    """This release slices sliding-window state itself; with K and V of different width it sends wrong bytes."""
    with bench.fleet(SHORT, 2, 1, tokens=200, prefill_library=False, decode_library=False) as fleet:
        request = fleet.request()
        fleet.run([request])
        expect_bytes(fleet, [request])
    with bench.fleet(shapes.MIMO_V2_FLASH.with_layers(1, 1), 2, 1, tokens=200, prefill_library=False,
                     decode_library=False) as fleet:
        request = fleet.request()
        fleet.fill(request)
        fleet.open(request)
        fleet.send(request)
        fleet.finish([request], 3.0)
        expect(fleet.problems([request]), "K and V of different width arrived whole: the case below proves nothing")


@case("equal-tp", False)
def equal(bench: Bench) -> None:
    for tp_size in (1, 2):
        with bench.fleet(SHORT, tp_size, tp_size, requests=2, prefill_library=False, decode_library=False) as fleet:
            requests = [fleet.request(), fleet.request(chunk_pages=5)]
            fleet.run(requests)
            expect_bytes(fleet, requests)
            expect_alive(fleet.prefill)


def named_calls(fleet: Fleet) -> list[list[tuple[object, ...]]]:
    """Each prefill rank's engine calls, with the destinations by name too; their order among threads is not fixed."""
    tables = [rank.call("addresses") for rank in fleet.decode]

    def name(address: int, table: dict[str, tuple[int, int]]) -> tuple[str, int]:
        for label, (start, size) in table.items():
            if start <= address < start + size:
                return label, address - start
        return "elsewhere", address

    found: list[list[tuple[object, ...]]] = []
    for rank, table in zip(fleet.prefill, tables):
        calls: list[Call] = rank.call("take_calls")
        found.append(sorted((call.sources, tuple(name(address, table) for address in call.destinations))
                            for call in calls))
    return found


@case("equal-tp-untouched", True)
def untouched(bench: Bench) -> None:
    """At equal TP the engine is called with the same blocks in the same batches, with the library and without."""
    seen = []
    for library in (False, True):
        with bench.fleet(SHORT, 2, 2, prefill_library=library, decode_library=library, record_calls=True) as fleet:
            expect(all(rank.call("preloaded") == library for rank in (*fleet.prefill, *fleet.decode)),
                   f"preloading is not {library} in every rank")
            request = fleet.request(chunk_pages=7)
            fleet.run([request])
            expect_bytes(fleet, [request])
            seen.append(named_calls(fleet))
    expect(all(seen[0]), "no engine call was seen")
    expect(seen[0] == seen[1], f"the engine calls differ: {sum(map(len, seen[0]))} without the library, "
                               f"{sum(map(len, seen[1]))} with it")
