# SPDX-License-Identifier: Apache-2.0
"""Decodes that come and go while a prefill lives on."""
from __future__ import annotations

from functools import partial
from pathlib import Path

from harness.case import SUCCESS, Bench, case, expect_alive, expect_bytes, expect_ends
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
    case(f"{_connector}-decode-with-another-tp", True, ("0.5.21",))(partial(another_tp, _connector))
