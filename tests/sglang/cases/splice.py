# SPDX-License-Identifier: Apache-2.0
"""Real shapes at TP sizes that differ, both sides preloaded: every byte must be right."""
from __future__ import annotations

from functools import partial

from harness import shapes
from harness.case import Bench, case, expect, expect_alive, expect_bytes
from harness.shapes import Pool, Shape

E18, E21, E23 = "0.5.18", "0.5.21", "0.5.23"
EVERY = (E18, E21, E23)

# Full layers as in the model for gpt-oss-120b; a few of each kind for the others (harness/shapes.py).
GPT, GPT_SHORT = shapes.GPT_OSS_120B, shapes.GPT_OSS_SHORT
GEMMA3, MIMO, GEMMA4 = shapes.GEMMA_3_SHORT, shapes.MIMO_SHORT, shapes.GEMMA_4_SHORT


def few_heads(heads: int) -> Shape:
    """A small model for the pairs with more ranks than heads."""
    return Shape(f"{heads}-heads", (Pool("kv", 2, heads, 64, 64), Pool("swa", 2, heads, 64, 48, 128)), 16)


# shape, prefill TP, decode TP, pages per chunk (0: one chunk), tokens, releases
MATRIX: tuple[tuple[Shape, int, int, int, int, tuple[str, ...]], ...] = (
    (GPT, 4, 2, 0, 1000, EVERY),
    (GPT, 2, 4, 5, 1000, EVERY),
    (GPT, 8, 2, 0, 1000, (E23,)),
    (GPT, 2, 8, 0, 1000, (E18,)),
    (GPT, 1, 4, 3, 1000, (E21,)),
    (GPT, 4, 1, 3, 1000, (E18,)),
    (GPT_SHORT.with_page(1), 2, 4, 300, 1000, (E21,)),
    (GPT_SHORT.with_page(1), 4, 2, 0, 1000, (E23,)),
    (GEMMA3, 4, 2, 0, 2000, (E18,)),
    (GEMMA3, 2, 8, 0, 1500, (E23,)),
    (GEMMA3, 8, 2, 9, 1500, (E21,)),
    (MIMO, 4, 2, 0, 1000, (E21, E23)),
    (MIMO, 2, 4, 5, 1000, (E18,)),
    (MIMO, 8, 4, 0, 1000, (E18,)),
    (MIMO, 8, 2, 0, 1000, (E21,)),
    (MIMO, 1, 4, 0, 1000, (E23,)),
    (MIMO, 2, 8, 0, 1000, (E23,)),
    (GEMMA4, 2, 8, 20, 5000, (E21,)),
    (GEMMA4, 8, 2, 0, 1000, (E18,)),
    (GEMMA4, 4, 1, 0, 1000, (E23,)),
    (few_heads(8), 4, 16, 0, 500, (E18,)),
    (few_heads(8), 8, 16, 0, 500, (E21,)),
    (few_heads(8), 16, 8, 0, 500, (E23,)),
    (few_heads(2), 1, 4, 0, 500, (E21,)),
    (few_heads(2), 4, 1, 0, 500, (E23,)),
    (few_heads(2), 4, 2, 0, 500, (E18,)),
    (few_heads(2), 2, 8, 0, 500, (E18,)),
)


def spliced(shape: Shape, prefill_tp: int, decode_tp: int, chunk_pages: int, tokens: int, bench: Bench) -> None:
    with bench.fleet(shape, prefill_tp, decode_tp, tokens=tokens) as fleet:
        request = fleet.request(chunk_pages=chunk_pages)
        fleet.run([request])
        expect_bytes(fleet, [request])
        expect_alive(fleet.prefill)
        # Closing a room writes its report: what was moved must be what the request is.
        fleet.clear(request)
        reports = list(fleet.reports())
        expect(len(reports) == decode_tp, f"{len(reports)} reports of {decode_tp} decode ranks:\n{fleet.logs()}")
        want = shape.rank_bytes(tokens, decode_tp)
        for report in reports:
            expect(int(report.get("bytes", -1)) == want,
                   f"{report['rank']} reports {report.get('bytes')} bytes of {want}")


for _shape, _prefill, _decode, _chunk, _tokens, _releases in MATRIX:
    _page = f"-page{_shape.page_size}" if _shape.page_size == 1 else ""
    case(f"splice-{_shape.name}-{_prefill}to{_decode}{_page}", True, _releases)(
        partial(spliced, _shape, _prefill, _decode, _chunk, _tokens))


@case("eight-rooms", True)
def eight_rooms(bench: Bench) -> None:
    """Eight requests of different lengths at once, then the pages in use again."""
    for prefill_tp, decode_tp in ((4, 2), (1, 2)):
        with bench.fleet(GPT_SHORT, prefill_tp, decode_tp, requests=8) as fleet:
            requests = [fleet.request(tokens=1000 - 110 * number, chunk_pages=number) for number in range(8)]
            fleet.run(requests)
            expect_bytes(fleet, requests)
            for request in requests[:4]:
                fleet.clear(request)
                fleet.give_back(request)
            again = [fleet.request(tokens=600 + number) for number in range(3)]
            fleet.run(again)
            expect_bytes(fleet, [*again, *requests[4:]])
            expect_alive(fleet.prefill)


@case("data-parallel-attention", True)
def data_parallel(bench: Bench) -> None:
    """Prefill TP 8 as two groups of 4, decode TP 4 as two groups of 2: ranks count within their group."""
    with bench.fleet(GPT_SHORT, 4, 2, prefill_dp=2, decode_dp=2, requests=8) as fleet:
        requests = [fleet.request(tokens=300 + 50 * number, prefill_group=number % 2, decode_group=number // 2 % 2)
                    for number in range(8)]
        fleet.run(requests)
        expect_bytes(fleet, requests)
        expect_alive(fleet.prefill)


@case("over-two-gigabytes", True, (E21,))
def sparse(bench: Bench) -> None:
    """Offsets past 2 and 4 GiB in buffers of 9 GiB, of which only the listed pages are ever touched."""
    shape = Shape("sparse", (Pool("kv", 1, 8, 128, 128), Pool("swa", 1, 8, 128, 128, 128)), 64)
    pages = 9 * (1 << 30) // (64 * 8 * 128)
    for prefill_tp, decode_tp in ((1, 2), (2, 1)):
        with bench.fleet(shape, prefill_tp, decode_tp, tokens=640, pages=(pages, pages), reserve_only=True) as fleet:
            request = fleet.request()
            for spot, lists in ((40000, request.sources), (60000, request.targets)):
                for items in lists:
                    items[0] = pages - 1
                    items[-1] = spot
            fleet.run([request])
            expect_bytes(fleet, [request])
