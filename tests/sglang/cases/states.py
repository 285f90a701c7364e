# SPDX-License-Identifier: Apache-2.0
"""State pools that releases refuse before anything is sent, pools whose pages are in no order that is known, and rows
of requests."""
from __future__ import annotations

import time
from functools import partial

from harness.case import FAILED, Bench, case, expect, expect_alive, expect_bytes, expect_ends
from harness.fleet import Fleet, Request
from harness.shapes import GPT_OSS_120B, Pool, Shape

CONNECTORS = ("mooncake", "nixl", "mori")
E22, E23 = "0.5.22", "0.5.23"
KV = Pool("kv", 2, 2, 64, 48)
SCALES = Shape("scales", (KV, Pool("block_scale", 2, 2, 16, 8)), 16)
MINIMAX = Shape("minimax", (KV, Pool("minimax_index_k", 2, 1, 64, 0, replicated=True),
                            Pool("minimax_dense_kv", 1, 2, 64, 48)), 16)
# K and V of one size, which every release sends at equal TP: a bare nixl prefill takes no other registration at another
# TP, and SGLang's mori sends no scales.
EVEN = Pool("kv", 2, 2, 64, 64)
EVEN_SCALES = Shape("scales", (EVEN, Pool("block_scale", 2, 2, 16, 16)), 16)
EVEN_MINIMAX = Shape("minimax", (EVEN, Pool("minimax_index_k", 2, 1, 64, 0, replicated=True),
                                 Pool("minimax_dense_kv", 1, 2, 64, 64)), 16)
# The same on every rank, whole, and copied rightly by mooncake itself.
QSA = Shape("qsa", (KV, Pool("qsa_pending", 2, 2, 64, 0, 32, replicated=True),
                    Pool("qsa_compressed", 2, 2, 32, 0, replicated=True)), 16)
TEXT = {"scales": "different attention TP sizes with MXFP8 KV cache", "minimax": "MiniMax sparse PD requires"}
TOKENS = 200


def start(fleet: Fleet) -> Request:
    request = fleet.request()
    fleet.fill(request)
    fleet.open(request)
    fleet.send(request)
    return request


def lifted(connector: str, shape: Shape, bench: Bench) -> None:
    """The decode's own refusal falls where the prefill has the library too: several to one and one to several."""
    for prefill_tp, decode_tp in ((2, 1), (1, 2)):
        with bench.fleet(shape, prefill_tp, decode_tp, tokens=TOKENS, requests=2, connector=connector) as fleet:
            requests = [fleet.request(), fleet.request(chunk_pages=5)]
            fleet.run(requests)
            expect_bytes(fleet, requests)
            expect_alive(fleet.prefill)
            expect(any("lifted until the prefill agrees" in rank.log() for rank in fleet.decode),
                   f"the release did not refuse: nothing is proved\n{fleet.logs()}")


def bare_prefill(connector: str, shape: Shape, bench: Bench) -> None:
    """The prefill is bare: the room fails in time with the release's text, and no page list has left the decode.
    At equal TP nothing is held up."""
    with bench.fleet(shape, 2, 1, tokens=TOKENS, connector=connector, prefill_library=False) as fleet:
        request = fleet.request()
        rank = fleet.decode[0]
        rank.call("open_receiver", room=request.room)
        for sender in fleet.prefill:
            sender.call("open_sender", room=request.room)
        begin = time.monotonic()
        rank.call("send_metadata", room=request.room, items=request.targets[0], aux_row=request.target_row,
                  states=request.targets[1:])
        outcome = rank.call("await_end", rooms=[request.room], timeout=10.0)[request.room]
        expect_ends([outcome], FAILED, "decode")
        expect(4.5 < outcome.ended - begin < 6.5, f"it failed after {outcome.ended - begin:.1f} s")
        expect(TEXT[shape.name] in outcome.text, outcome.text)
        expect(all(sender.call("poll", room=request.room) == 1 for sender in fleet.prefill),
               "a prefill without the library got the decode's page lists")
        expect_alive(fleet.prefill)
    with bench.fleet(shape, 2, 2, tokens=TOKENS, connector=connector, prefill_library=False) as fleet:
        request = fleet.request()
        fleet.run([request])
        expect_bytes(fleet, [request])


def off(connector: str, bench: Bench) -> None:
    """Policy off leaves the release's refusal as it is."""
    try:
        with bench.fleet(SCALES, 2, 1, tokens=TOKENS, connector=connector,
                         decode_environment={"KVSPLICE_POLICY": "off"}):
            pass
    except Exception as error:
        expect(TEXT["scales"] in str(error), str(error))
    else:
        expect(False, "the decode was not refused")


@case("mooncake-layout-rejected", True, (E23,))
def rejected(bench: Bench) -> None:
    """Pools with layer ids, which the release compares at the registration, where the lengths differ."""
    shape = GPT_OSS_120B.with_layers(2, 2)
    for library in (False, True):
        with bench.fleet(shape, 2, 1, tokens=TOKENS, layers=((1, 3), (0, 2)), prefill_library=library,
                         decode_library=library) as fleet:
            if library:
                request = fleet.request()
                fleet.run([request])
                expect_bytes(fleet, [request])
            else:
                request = start(fleet)
                _, receivers = fleet.finish([request], 10.0)[request.room]
                expect_ends(receivers, FAILED, "decode")
                expect("item length mismatch" in "".join(rank.log() for rank in fleet.prefill),
                       f"the release did not reject the layout: nothing is proved\n{fleet.logs()}")


def packed(connector: str, kind: str, bench: Bench) -> None:
    """K and V of all layers in one buffer, as unified memory has them: no order that is known, so one room's refusal."""
    pools = (Pool("kv", 2, 2, 64, 64), Pool("swa", 1, 2, 64, 0, 64))
    if kind == "kv":
        pools = (Pool("kv", 1, 2, 64, 0), Pool("swa", 2, 2, 64, 64, 64))
    with bench.fleet(Shape("packed", pools, 16), 2, 1, tokens=TOKENS, connector=connector) as fleet:
        request = start(fleet)
        _, receivers = fleet.finish([request], 10.0)[request.room]
        expect_ends(receivers, FAILED, "decode")
        expect(f"cannot splice {kind}" in receivers[0].text and "page order is unknown" in receivers[0].text,
               receivers[0].text)
        expect_alive(fleet.prefill)


@case("mooncake-copied-by-the-release", True, ("0.5.21", E23))
def copied(bench: Bench) -> None:
    """What the release copies rightly is left to it, and is ours only where everything is."""
    for policy, ours in (("auto", 1), ("all", len(QSA.pools))):
        for prefill_tp, decode_tp in ((2, 1), (1, 2)):
            environment = {"KVSPLICE_POLICY": policy}
            with bench.fleet(QSA, prefill_tp, decode_tp, tokens=TOKENS, prefill_environment=environment,
                             decode_environment=environment) as fleet:
                request = fleet.request()
                fleet.run([request])
                expect_bytes(fleet, [request])
                fleet.clear(request)
                moved = [int(report["components"]) for report in fleet.reports()]
                expect(moved == [ours] * decode_tp, f"{policy}: we moved {moved} components\n{fleet.logs()}")


for _connector in CONNECTORS:
    for _kind in ("kv", "swa"):
        case(f"{_connector}-packed-{_kind}", True, ("0.5.21",))(partial(packed, _connector, _kind))
    case(f"{_connector}-lifted-scales", True, (E22, E23))(partial(lifted, _connector, SCALES))
    case(f"{_connector}-lifted-minimax", True, (E23,))(partial(lifted, _connector, MINIMAX))
    case(f"{_connector}-lifted-bare-prefill", True, (E23,))(
        partial(bare_prefill, _connector, EVEN_MINIMAX if _connector == "mori" else EVEN_SCALES))
    case(f"{_connector}-lifted-policy-off", True, (E23,))(partial(off, _connector))
