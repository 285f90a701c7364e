# SPDX-License-Identifier: Apache-2.0
"""Decodes that come and go while a prefill lives on."""
from __future__ import annotations

from functools import partial
from pathlib import Path

from harness.case import FAILED, SUCCESS, Bench, case, expect, expect_alive, expect_bytes, expect_ends
from harness.shapes import GPT_OSS_120B

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
    case(f"{_connector}-prefill-again", True, ("0.5.23",))(partial(prefill_again, _connector))
    case(f"{_connector}-decode-with-another-tp", True, ("0.5.21",))(partial(another_tp, _connector))
