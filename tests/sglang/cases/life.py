# SPDX-License-Identifier: Apache-2.0
"""Decodes that come and go while a prefill lives on."""
from __future__ import annotations

from functools import partial

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


for _connector in CONNECTORS:
    case(f"{_connector}-decodes-of-three-sizes", True, ("0.5.18", "0.5.21"))(partial(two_fleets, _connector))
    case(f"{_connector}-decode-with-another-tp", True, ("0.5.21",))(partial(another_tp, _connector))
