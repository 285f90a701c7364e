# SPDX-License-Identifier: Apache-2.0
"""Ranks of every kind: stages of a pipeline, groups of data-parallel attention."""
from __future__ import annotations

from functools import partial
from typing import Any, Sequence

from harness.case import FAILED, Bench, case, expect, expect_alive, expect_bytes, expect_ends
from harness.shapes import GPT_OSS_120B, GPT_OSS_SHORT, Pool, Shape

from .failures import STOCK_TEXT

E18, E21, E23 = "0.5.18", "0.5.21", "0.5.23"
CONNECTORS = ("mooncake", "nixl", "mori")

# Three layers of full attention and three of the sliding window by turns, as in gpt-oss; then those of the window
# first, so that one stage of two has the window's layers and the other the full ones.
STAGED = GPT_OSS_120B.with_layers(3, 3)
BY_TURNS = ((1, 3, 5), (0, 2, 4))
PLAIN = Shape("plain", (Pool("kv", 4, 8, 128, 128),), 64)
APART = ((3, 4, 5), (0, 1, 2))


def pipeline(connector: str, prefill_tp: int, decode_tp: int, layers: Sequence[Sequence[int]], bench: Bench) -> None:
    """Two stages of prefill, one of decode: each stage's layers go where their numbers say."""
    # nixl up to 0.5.22 sends no chunk from a stage without full layers, and its decode waits for all but the last.
    whole = connector == "nixl" and layers is APART and bench.release != E23
    with bench.fleet(STAGED, prefill_tp, decode_tp, prefill_pp=2, layers=layers, requests=2, tokens=500,
                     connector=connector) as fleet:
        requests = [fleet.request(chunk_pages=0 if whole else 3), fleet.request(tokens=300)]
        fleet.run(requests)
        expect_bytes(fleet, requests)
        expect_alive(fleet.prefill)


def of_a_server(connector: str, prefill_tp: int, decode_tp: int, bench: Bench) -> None:
    """As a server of gpt-oss has it: no layer is registered, the pool alone knows them. At equal TP only when asked to."""
    environment = {"KVSPLICE_POLICY": "all"} if prefill_tp == decode_tp else {}
    with bench.fleet(STAGED, prefill_tp, decode_tp, prefill_pp=2, layers=BY_TURNS, requests=2, tokens=500,
                     hybrid_pool=True, connector=connector, prefill_environment=environment,
                     decode_environment=environment) as fleet:
        requests = [fleet.request(chunk_pages=3), fleet.request(tokens=300)]
        fleet.run(requests)
        expect_bytes(fleet, requests)
        expect_alive(fleet.prefill)


def without_ids(connector: str, bench: Bench) -> None:
    """The layers of either side without numbers: refused by name, nothing written, and nothing dies."""
    sides: tuple[dict[str, Any], ...] = ({"prefill_layer_ids": False}, {"decode_layer_ids": False})
    for side in sides:
        with bench.fleet(STAGED, 2, 1, prefill_pp=2, layers=BY_TURNS, tokens=500, connector=connector,
                         **side) as fleet:
            request = fleet.request()
            fleet.fill(request)
            fleet.open(request)
            fleet.send(request)
            _, receivers = fleet.finish([request], 10.0)[request.room]
            expect_ends(receivers, FAILED, "decode")
            expect("no layer ids" in receivers[0].text and STOCK_TEXT not in receivers[0].text,
                   f"'{receivers[0].text}'")
            expect(not fleet.problems([]), "something was written")
            expect_alive(fleet.prefill)


def full_attention_alone(connector: str, bench: Bench) -> None:
    """Without numbers and without other state the connector's own slicing is right, and is left to it."""
    with bench.fleet(PLAIN, 2, 1, prefill_pp=2, layers=((0, 1, 2, 3),), prefill_layer_ids=False,
                     decode_layer_ids=False, tokens=300, connector=connector) as fleet:
        request = fleet.request()
        fleet.run([request])
        expect_bytes(fleet, [request])
        expect(all(report.get("bytes", "0") == "0" for report in fleet.reports()), "kvsplice moved some of it")


def data_parallel(connector: str, bench: Bench) -> None:
    """Prefill TP 8 as two groups of 4, decode TP 4 as two groups of 2, eight rooms at once between all of them."""
    with bench.fleet(GPT_OSS_SHORT, 4, 2, prefill_dp=2, decode_dp=2, requests=8, connector=connector) as fleet:
        requests = [fleet.request(tokens=300 + 50 * number, prefill_group=number % 2, decode_group=number // 2 % 2)
                    for number in range(8)]
        fleet.run(requests)
        expect_bytes(fleet, requests)
        expect_alive(fleet.prefill)


ALL_SEND = {"SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER": "1"}


def context_parallel(connector: str, prefill_tp: int, decode_tp: int, environment: dict[str, str], bench: Bench) -> None:
    """Two context-parallel groups of prefill: by itself the second sends nothing and completes, else each sends a part."""
    # nixl up to 0.5.22, with and without us and at equal TP too, never ends if a rank has no part in the last chunk.
    whole = connector == "nixl" and environment and bench.release != E23
    with bench.fleet(GPT_OSS_SHORT, prefill_tp, decode_tp, prefill_cp=2, requests=2, connector=connector,
                     prefill_environment=environment, decode_environment=environment) as fleet:
        requests = [fleet.request(chunk_pages=0 if whole else 6), fleet.request(tokens=300)]
        fleet.run(requests)
        expect_bytes(fleet, requests)
        expect_alive(fleet.prefill)
        links = [rank.log().count("route: ") for rank in fleet.prefill]
        expect(all(links[:prefill_tp]) and any(links[prefill_tp:]) == bool(environment),
               f"routes of each prefill rank: {links}\n{fleet.logs()}")


for _connector in CONNECTORS:
    for _prefill, _decode in ((2, 1), (1, 2)):
        case(f"{_connector}-context-parallel-{_prefill}to{_decode}", True, (E18, E21, E23))(
            partial(context_parallel, _connector, _prefill, _decode, {}))
        case(f"{_connector}-context-parallel-{_prefill}to{_decode}-all-send", True, (E18, E21, E23))(
            partial(context_parallel, _connector, _prefill, _decode, ALL_SEND))
    for _prefill, _decode, _layers, _name, _releases in (
            (2, 1, BY_TURNS, "", (E18, E21, E23)), (1, 2, BY_TURNS, "", (E18, E21, E23)),
            (2, 1, APART, "-empty-stage", (E21,))):
        case(f"{_connector}-pipeline2-{_prefill}to{_decode}{_name}", True, _releases)(
            partial(pipeline, _connector, _prefill, _decode, _layers))
    # At equal TP nixl itself cannot take a stage's decode in.
    for _prefill, _decode in ((2, 1), (1, 2), *([] if _connector == "nixl" else [(1, 1)])):
        case(f"{_connector}-pipeline2-{_prefill}to{_decode}-server", True, (E18, E21, E23))(
            partial(of_a_server, _connector, _prefill, _decode))
    case(f"{_connector}-pipeline2-without-ids", True, (E21,))(partial(without_ids, _connector))
    case(f"{_connector}-pipeline2-full-attention-alone", True, (E21,))(partial(full_attention_alone, _connector))
    if _connector != "mooncake":    # its own is among the splice cases
        case(f"{_connector}-data-parallel-attention", True, (E21,))(partial(data_parallel, _connector))
