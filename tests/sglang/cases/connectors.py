# SPDX-License-Identifier: Apache-2.0
"""nixl and mori: the same promises as mooncake's, where the connectors differ."""
from __future__ import annotations

from functools import partial
from typing import Any

from harness import shapes
from harness.case import FAILED, SUCCESS, Bench, case, expect, expect_alive, expect_bytes, expect_ends
from harness.shapes import Pool, Shape

from .failures import SMALL, fail_one

E18, E21, E23 = "0.5.18", "0.5.21", "0.5.23"
OTHERS = ("nixl", "mori")

# shape, prefill TP, decode TP, pages per chunk, releases
MATRIX: tuple[tuple[Shape, int, int, int, tuple[str, ...]], ...] = (
    (shapes.GPT_OSS_SHORT, 4, 2, 5, (E18,)),
    (shapes.GPT_OSS_SHORT, 2, 4, 0, (E23,)),
    (shapes.GPT_OSS_SHORT.with_page(1), 2, 1, 300, (E21,)),
    (shapes.MIMO_SHORT, 8, 4, 0, (E21,)),
    (shapes.MIMO_SHORT, 2, 2, 5, (E18, E21, E23)),      # equal TP: both send V with K's length
    (shapes.GEMMA_4_SHORT, 2, 8, 0, (E18,)),            # more ranks than heads of the full layers
)


def spliced(connector: str, shape: Shape, prefill_tp: int, decode_tp: int, chunk_pages: int, bench: Bench) -> None:
    with bench.fleet(shape, prefill_tp, decode_tp, connector=connector) as fleet:
        requests = [fleet.request(chunk_pages=chunk_pages)]
        fleet.run(requests)
        expect_bytes(fleet, requests)
        expect_alive(fleet.prefill)


def one_room(connector: str, chunk_pages: int, bench: Bench) -> None:
    with bench.fleet(SMALL, 2, 1, requests=5, connector=connector) as fleet:
        fail_one(fleet, 1, True, chunk_pages)


def wrong_from_alone(connector: str, bench: Bench) -> None:
    """The control: without the library equal TP with K and V of different size is not right."""
    with bench.fleet(shapes.MIMO_SHORT, 2, 2, connector=connector, prefill_library=False,
                     decode_library=False) as fleet:
        request = fleet.request()
        fleet.fill(request)
        fleet.open(request)
        fleet.send(request)
        senders, receivers = fleet.finish([request], 10.0)[request.room]
        expect(any(outcome.status != SUCCESS for outcome in [*senders, *receivers]) or fleet.problems([request]),
               "it is right by itself: nothing is left to do here")


for _connector in OTHERS:
    for _shape, _prefill, _decode, _chunk, _releases in MATRIX:
        _page = f"-page{_shape.page_size}" if _shape.page_size == 1 else ""
        case(f"{_connector}-{_shape.name}-{_prefill}to{_decode}{_page}", True, _releases)(
            partial(spliced, _connector, _shape, _prefill, _decode, _chunk))
    case(f"{_connector}-one-room-fails", True)(partial(one_room, _connector, 0))
    case(f"{_connector}-first-chunk-fails", True, (E21,))(partial(one_room, _connector, 6))
    case(f"{_connector}-equal-tp-alone", False, (E21,))(partial(wrong_from_alone, _connector))


@case("nixl-bare-decode", True)
def bare_nixl(bench: Bench) -> None:
    """A decode without the library is served through nixl's engine, from several heads to one rank and back."""
    options: dict[str, Any] = {"connector": "nixl", "decode_library": False}
    for prefill_tp, decode_tp in ((2, 1), (1, 2)):
        with bench.fleet(shapes.MIMO_SHORT, prefill_tp, decode_tp, requests=2, **options) as fleet:
            requests = [fleet.request(), fleet.request(tokens=400, chunk_pages=3)]
            fleet.run(requests)
            expect_bytes(fleet, requests)
            expect_alive(fleet.prefill)
            expect(any("route engine" in rank.log() for rank in fleet.prefill), "nothing says which way it went")


@case("mori-bare-decode", True, (E21,))
def bare_mori(bench: Bench) -> None:
    """Without the library on the decode mori refuses as ever; the log says that it was left to it, and nothing dies."""
    with bench.fleet(SMALL, 2, 1, connector="mori", decode_library=False) as fleet:
        request = fleet.request()
        fleet.fill(request)
        fleet.open(request)
        fleet.send(request)
        senders, receivers = fleet.finish([request], 10.0)[request.room]
        expect_ends(senders, FAILED, "prefill")
        expect("TP-mismatched" in senders[0].text, senders[0].text)
        expect(any("no engine route" in rank.log() for rank in fleet.prefill), fleet.logs())
        expect_alive(fleet.prefill)


@case("nixl-metadata-fails-after-kv", True, (E23,))
def aux_of_a_failed_room(bench: Bench) -> None:
    """A room that fails in its state alone (a page past the pool) sends no metadata row either."""
    with bench.fleet(SMALL, 2, 1, requests=3, connector="nixl") as fleet:
        bad, good = fleet.request(), fleet.request()
        for request in (bad, good):
            fleet.fill(request)
        real = bad.sources[1][0]
        bad.sources[1][0] = fleet.pages[1] + 1000
        for request in (bad, good):
            fleet.open(request)
            fleet.send(request)
        ends = fleet.finish([bad, good], 10.0)
        expect_ends(ends[bad.room][1], FAILED, "decode")
        expect_ends(ends[good.room][1], SUCCESS, "decode")
        bad.sources[1][0] = real
        problems = [problem for problem in fleet.problems([good]) if "metadata" in problem]
        expect(not problems, "\n".join(problems))


def mixed(connector: str, decode_release: str, bench: Bench) -> None:
    """The roles on two releases whose own messages the other understands."""
    with bench.fleet(shapes.GPT_OSS_SHORT, 2, 1, connector=connector, decode_release=decode_release) as fleet:
        request = fleet.request(chunk_pages=5)
        fleet.run([request])
        expect_bytes(fleet, [request])


# A bootstrap server of 0.5.23 tells more than older decodes take; and up to 0.5.22 a decode of nixl counts
# notifications, which a prefill of 0.5.23 does not send.
for _connector, _prefill_release, _decode_release in (
        ("mooncake", E18, E21), ("mooncake", E21, E18), ("mooncake", E18, E23), ("nixl", E18, E21), ("nixl", E21, E18),
        ("mori", E18, E23), ("mori", E21, E18)):
    case(f"{_connector}-decode-on-{_decode_release}", True, (_prefill_release,))(
        partial(mixed, _connector, _decode_release))


def minimax(prefill_tp: int, decode_tp: int, connector: str, bench: Bench) -> None:
    """4 KV heads, one index head that every rank holds, dense layers in a pool of their own; pages of 128 tokens."""
    shape = Shape("minimax", (Pool("kv", 3, 4, 256, 256), Pool("minimax_index_k", 3, 1, 256, 0, replicated=True),
                              Pool("minimax_dense_kv", 1, 4, 256, 256)), 128)
    with bench.fleet(shape, prefill_tp, decode_tp, tokens=1024, connector=connector) as fleet:
        request = fleet.request(chunk_pages=3)
        fleet.run([request])
        expect_bytes(fleet, [request])


for _connector in ("mooncake", *OTHERS):
    for _prefill, _decode in ((4, 8), (8, 4)):
        case(f"{_connector}-minimax-{_prefill}to{_decode}", True, (E21,))(
            partial(minimax, _prefill, _decode, _connector))
