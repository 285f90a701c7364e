# SPDX-License-Identifier: Apache-2.0
"""A draft model's buffers behind those of the KV pool: heads and lengths of their own, under the same pages."""
from __future__ import annotations

from dataclasses import replace
from functools import partial

from harness.case import FAILED, Bench, case, expect, expect_alive, expect_bytes, expect_ends
from harness.shapes import GPT_OSS_120B, Pool

E18, E21, E23 = "0.5.18", "0.5.21", "0.5.23"
# Two heads: at TP 4 each is on two ranks, while the model's own eight are not.
TARGET = GPT_OSS_120B.with_layers(2, 3)
SHAPE = replace(TARGET, draft=Pool("kv", 1, 2, 96, 64))


def drafted(connector: str, prefill_tp: int, decode_tp: int, decode_library: bool, bench: Bench) -> None:
    with bench.fleet(SHAPE, prefill_tp, decode_tp, tokens=500, requests=2, connector=connector,
                     decode_library=decode_library) as fleet:
        requests = [fleet.request(chunk_pages=3), fleet.request(tokens=300)]
        fleet.run(requests)
        expect_bytes(fleet, requests)
        expect_alive(fleet.prefill)


def misfit(connector: str, bench: Bench) -> None:
    """Draft models whose lengths do not go together: refused with them, and nothing written."""
    other = replace(TARGET, draft=Pool("kv", 1, 2, 80, 64))
    with bench.fleet(SHAPE, 2, 1, tokens=300, connector=connector, prefill_shape=other) as fleet:
        request = fleet.request()
        fleet.fill(request)
        fleet.open(request)
        fleet.send(request)
        senders, receivers = fleet.finish([request])[request.room]
        expect_ends(senders, FAILED, "prefill")
        expect_ends(receivers, FAILED, "decode")
        expect("the lengths do not go together" in receivers[0].text, f"'{receivers[0].text}'")
        expect(not fleet.problems([]), "something was written")
        expect_alive(fleet.prefill)


for _connector in ("mooncake", "nixl", "mori"):
    for _prefill, _decode in ((4, 2), (2, 4)):
        case(f"{_connector}-draft-{_prefill}to{_decode}", True, (E18, E21, E23))(
            partial(drafted, _connector, _prefill, _decode, True))
    case(f"{_connector}-draft-misfit", True, (E21,))(partial(misfit, _connector))
    if _connector != "mori":
        case(f"{_connector}-draft-bare-decode", True, (E21,))(partial(drafted, _connector, 4, 2, False))
