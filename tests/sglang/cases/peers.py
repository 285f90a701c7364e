# SPDX-License-Identifier: Apache-2.0
"""One side preloaded and the other not: what the other side must not notice, and the connector's own engine."""
from __future__ import annotations

from cases.stock import OLDER, SHORT, expect_refused
from harness import shapes, versions
from harness.case import FAILED, RELEASES, Bench, case, expect, expect_alive, expect_bytes, expect_ends
from harness.fleet import Fleet

RECORD_FRAME = 49


def run_checked(fleet: Fleet, chunk_pages: int = 0) -> None:
    request = fleet.request(chunk_pages=chunk_pages)
    fleet.run([request])
    expect_bytes(fleet, [request])
    expect_alive(fleet.prefill)


@case("bare-decode-spliced", True)
def bare_decode(bench: Bench) -> None:
    """Only the prefill is preloaded: it pushes its plan through the connector's own engine."""
    for shape, prefill_tp, decode_tp, chunk_pages in (
            (shapes.GPT_OSS_120B.with_layers(2, 3), 4, 2, 0), (shapes.GPT_OSS_120B.with_layers(2, 3), 2, 4, 5),
            (shapes.MIMO_V2_FLASH.with_layers(1, 2), 8, 4, 0), (shapes.GEMMA_4_31B.with_layers(1, 1), 1, 2, 0)):
        with bench.fleet(shape, prefill_tp, decode_tp, tokens=500, decode_library=False) as fleet:
            run_checked(fleet, chunk_pages)


@case("bare-decode-equal-tp", True)
def bare_decode_equal(bench: Bench) -> None:
    with bench.fleet(SHORT, 2, 2, decode_library=False) as fleet:
        run_checked(fleet, chunk_pages=5)


@case("bare-prefill-as-stock", True)
def bare_prefill(bench: Bench) -> None:
    """Only the decode is preloaded: everything is as the release does it."""
    with bench.fleet(SHORT, 2, 2, prefill_library=False) as fleet:
        run_checked(fleet, chunk_pages=5)
    with bench.fleet(SHORT, 2, 1, tokens=200, prefill_library=False) as fleet:
        if bench.release in OLDER:
            expect_refused(fleet)
        else:
            run_checked(fleet)


@case("other-version-of-ours", True, ("0.5.21",))
def other_version(bench: Bench) -> None:
    """A later version with a longer record on either side: they understand each other."""
    later = versions.built("later", versions.LATER)
    for sides in ({"prefill_version": later}, {"decode_version": later}):
        with bench.fleet(SHORT, 2, 1, **sides) as fleet:
            request = fleet.request()
            fleet.run([request])
            expect_bytes(fleet, [request])
            fleet.clear(request)
            expect([report["route"] for report in fleet.reports()] == ["host"], fleet.logs())
            said = " ".join(rank.log() for rank in [*fleet.prefill, *fleet.decode])
            expect("kvsplice 0.1.0" in said and "kvsplice 0.2.0" in said, "the sides are of one version")


@case("other-protocol-of-ours", True, ("0.5.21",))
def other_protocol(bench: Bench) -> None:
    """A version that speaks another protocol on either side: said by name, the room fails in time, nothing is written."""
    other = versions.built("other-protocol", versions.OTHER_PROTOCOL)
    for sides in ({"prefill_version": other}, {"decode_version": other}):
        with bench.fleet(SHORT, 2, 1, **sides) as fleet:
            request = fleet.request()
            fleet.fill(request)
            fleet.open(request)
            fleet.send(request)
            senders, receivers = fleet.finish([request])[request.room]
            expect_ends(senders, FAILED, "prefill")
            expect_ends(receivers, FAILED, "decode")
            said = " ".join(rank.log() for rank in [*fleet.prefill, *fleet.decode])
            expect("run one kvsplice version on both sides" in said, fleet.logs())
            expect(not fleet.problems([]), "something was written")
            expect_alive(fleet.prefill)


@case("frames-unread-by-others", True)
def frames(bench: Bench) -> None:
    """Every tested release reads in our longer messages exactly what it reads in the stock ones."""
    seen = {}
    for library in (False, True):
        with bench.fleet(SHORT, 2, 1, prefill_library=False, decode_library=library, record_messages=True) as fleet:
            fleet.open(fleet.request())
            seen[library] = fleet.prefill[0].call("take_messages")
    expect([parser for parser, _ in seen[True]] == ["KVArgsRegisterInfo", "TransferInfo"], f"{seen[True]}")
    for (parser, stock), (same, ours) in zip(seen[False], seen[True]):
        expect(parser == same and len(stock) < RECORD_FRAME, f"{parser} has {len(stock)} frames")
        expect(len(ours) == RECORD_FRAME + 1 and all(not frame for frame in ours[len(stock):RECORD_FRAME]),
               f"{parser}: {len(ours)} frames, not padded to {RECORD_FRAME} and one: {[len(f) for f in ours]}")
        for release in RELEASES:
            reader = bench.nurseries.prepare(release, False).rank("reader")
            try:
                alone, padded = (reader.call("parse", parser=parser, frames=frames)
                                 for frames in (ours[:len(stock)], ours))
            finally:
                reader.close()
            expect(alone == padded, f"{release} reads another {parser} from {bench.release}:\n{alone}\n{padded}")
