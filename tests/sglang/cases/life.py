# SPDX-License-Identifier: Apache-2.0
"""Decodes that come and go while a prefill lives on."""
from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from harness.case import FAILED, SUCCESS, Bench, case, expect, expect_alive, expect_bytes, expect_ends
from harness.shapes import GPT_OSS_120B

from .failures import LARGE, LARGE_TOKENS, decode_pages, expect_works_again

SMALL = GPT_OSS_120B.with_layers(2, 3)
CONNECTORS = ("mooncake", "nixl", "mori")


def two_fleets(connector: str, bench: Bench) -> None:
    """Decodes of TP 2, 1 and 8 on one prefill of TP 4, whose rooms are open at the same time."""
    with bench.fleet(SMALL, 4, 2, connector=connector, requests=6) as fleet:
        fleets = [fleet.decode, fleet.new_decode(1), fleet.new_decode(8)]
        held: list[list[int]] = [[] for _ in fleets]
        requests = [fleet.request(tokens=300 + 100 * number) for number in range(6)]
        for number, request in enumerate(requests):
            fleet.fill(request)
            held[number % len(fleets)].append(number)
            with fleet.decoding(fleets[number % len(fleets)]):
                fleet.open(request)
        for request in requests:
            fleet.send(request)
        for ranks, numbers in zip(fleets, held):
            with fleet.decoding(ranks):
                mine = [requests[number] for number in numbers]
                for senders, receivers in fleet.finish(mine).values():
                    expect_ends(senders, SUCCESS, "prefill")
                    expect_ends(receivers, SUCCESS, f"decode of TP {len(ranks)}")
                expect_bytes(fleet, mine)
        expect_alive(fleet.prefill)


def another_tp(connector: str, bench: Bench) -> None:
    """A decode is killed and comes back with another TP size, again and again."""
    with bench.fleet(SMALL, 4, 2, connector=connector, requests=4) as fleet:
        first = fleet.request()
        fleet.run([first])
        expect_bytes(fleet, [first])
        for rank in fleet.decode:
            rank.kill()
        for size in (1, 4, 8):
            ranks = fleet.new_decode(size)
            with fleet.decoding(ranks):
                request = fleet.request()
                fleet.run([request])
                expect_bytes(fleet, [request])
            for rank in ranks:
                rank.kill()
        expect_alive(fleet.prefill)


HEARTBEAT = {"SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2", "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1"}


def prefill_again(connector: str, bench: Bench) -> None:
    """The prefill is killed, in the middle of a room too, and comes back at the same address, again and again."""
    with bench.fleet(SMALL, 2, 1, connector=connector, requests=5, decode_environment=HEARTBEAT) as fleet:
        arrived = [fleet.request()]
        fleet.run(arrived)
        open_files = []
        for _ in range(3):
            lost = fleet.request()
            fleet.fill(lost)
            fleet.open(lost)
            fleet.restart_prefill()
            outcome = fleet.decode[0].call("await_end", rooms=[lost.room], timeout=20.0)[lost.room]
            expect_ends([outcome], FAILED, "decode")
            fleet.decode[0].call("clear", room=lost.room)
            fleet.give_back(lost)
            request = arrived[0].again(fleet.new_room())
            fleet.wipe(request)
            fleet.run([request])
            arrived = [request]
            expect_bytes(fleet, arrived)
            open_files.append(fleet.decode[0].call("descriptors"))
        expect(open_files[2] <= open_files[1], f"the decode has more and more open files: {open_files}")
        expect_alive(fleet.prefill)


def roles_switched(connector: str, bench: Bench) -> None:
    """The processes of prefill and decode take each other's role, and again."""
    with bench.fleet(SMALL, 2, 1, connector=connector, requests=2, role_switch=True) as fleet:
        for switch in range(3):
            if switch:
                fleet.switch_roles()
            requests = [fleet.request(chunk_pages=5), fleet.request(tokens=300)]
            fleet.run(requests)
            expect_bytes(fleet, requests)
            expect_alive(fleet.prefill)
            for request in requests:
                fleet.clear(request)
            done = [report for report in fleet.reports() if report["room"] in {str(one.room) for one in requests}]
            expect(done and all(report["route"] == "host" for report in done), fleet.logs())


def deferred_release(connector: str, bench: Bench) -> None:
    """SGLang gives an aborted room's pages away when the prefill says so: after our transfer has ended, and not never."""
    with bench.fleet(LARGE, 2, 1, connector=connector, tokens=LARGE_TOKENS) as fleet:
        first = fleet.request()
        fleet.run([first])
        caught = 0
        for delay in (0.0, 0.004, 0.008, 0.015):
            request = first.again(fleet.new_room())
            fleet.open(request)
            fleet.send(request)
            time.sleep(delay)
            decode = fleet.decode[0]
            decode.call("abort", room=request.room)
            end = time.monotonic() + 10
            while not decode.call("may_release", room=request.room, acknowledgements=len(fleet.prefill)):
                expect(time.monotonic() < end, f"the prefill's ranks never say that they are done:\n{fleet.logs()}")
            decode_pages(fleet, request, "scribble")
            caught += any(end.status == FAILED for end in fleet.finish([request], 10.0)[request.room][0])
            time.sleep(0.1)
            expect(all(decode_pages(fleet, request, "scribbled")), "written after the pages were released")
            expect_alive(fleet.prefill)
        expect(caught >= 2, f"only {caught} of 4 aborts came before the end: nothing is proved")
        expect_works_again(fleet, first)


ROOMS = 128


def proportional_kib(pid: int) -> int:
    """Memory of a process, pages that several share by their share."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0


def many_rooms(bench: Bench) -> None:
    """128 rooms open and sent at once between 8 prefill and 4 decode processes."""
    with bench.fleet(SMALL, 8, 4, requests=ROOMS, tokens=200) as fleet:
        requests = [fleet.request() for _ in range(ROOMS)]
        for request in requests:
            fleet.fill(request)
            fleet.open(request)
        for request in requests:
            fleet.send(request)
        for senders, receivers in fleet.finish(requests, 60.0).values():
            expect_ends(senders, SUCCESS, "prefill")
            expect_ends(receivers, SUCCESS, "decode")
        expect_bytes(fleet, requests)
        expect_alive(fleet.prefill)
        ranks = [*fleet.prefill, *fleet.decode]
        total = sum(proportional_kib(rank.pid) for rank in ranks)
        print(f"      {ROOMS} rooms, {len(ranks)} processes forked from one that has imported SGLang: "
              f"{total / 1024:.0f} MiB, each page counted once", flush=True)


case("128-rooms-8to4", True, ("0.5.21",))(many_rooms)
for _connector in CONNECTORS:
    case(f"{_connector}-decodes-of-three-sizes", True, ("0.5.18", "0.5.21"))(partial(two_fleets, _connector))
    # 0.5.22 and 0.5.23 have it on all three.
    case(f"{_connector}-deferred-release", True, ("0.5.23",))(partial(deferred_release, _connector))
    if _connector != "nixl":    # which has no role switch
        case(f"{_connector}-roles-switched", True, ("0.5.23",))(partial(roles_switched, _connector))
    case(f"{_connector}-prefill-again", True, ("0.5.23",))(partial(prefill_again, _connector))
    case(f"{_connector}-decode-with-another-tp", True, ("0.5.21",))(partial(another_tp, _connector))
