# SPDX-License-Identifier: Apache-2.0
"""Pools in GPU memory (of the double of the CUDA driver): moved in place by cuda_ipc, packed for another transport."""
from __future__ import annotations

from functools import partial

from harness import gpu, shapes
from harness.case import Bench, CaseSkipped, case, expect, expect_alive, expect_bytes

SHAPE = shapes.GPT_OSS_SHORT

# connector, release, kind at the prefill, at the decode, prefill TP, decode TP, route
MATRIX = (
    ("mooncake", "0.5.21", "legacy", "legacy", 4, 2, "cuda_ipc"),
    ("mooncake", "0.5.23", "vmm", "legacy", 2, 4, "cuda_ipc"),
    ("nixl", "0.5.18", "legacy", "vmm", 2, 4, "cuda_ipc"),
    ("nixl", "0.5.21", "vmm", "vmm", 4, 2, "cuda_ipc"),
    ("nixl", "0.5.23", "fabric", "legacy", 2, 4, "cuda_ipc"),
    ("mooncake", "0.5.18", "pool", "legacy", 4, 2, "host"),
)


def moved(connector: str, prefill_kind: str, decode_kind: str, prefill_tp: int, decode_tp: int, route: str,
          bench: Bench) -> None:
    if gpu.double() is None:
        raise CaseSkipped("the double of the CUDA driver is not built (ninja -C build-test kvs_double_cuda)")
    with bench.fleet(SHAPE, prefill_tp, decode_tp, connector=connector, requests=2,
                     prefill_environment=gpu.environment(prefill_kind),
                     decode_environment=gpu.environment(decode_kind)) as fleet:
        requests = [fleet.request(chunk_pages=5), fleet.request()]
        fleet.run(requests)
        expect_bytes(fleet, requests)
        expect_alive(fleet.prefill)
        for request in requests:
            fleet.clear(request)
        reports = list(fleet.reports())
        expect(len(reports) == 2 * decode_tp, f"{len(reports)} reports:\n{fleet.logs()}")
        for report in reports:
            expect(report.get("route") == route, f"{report['rank']} over {report.get('route')}:\n{fleet.logs()}")


for _connector, _release, _prefill_kind, _decode_kind, _prefill, _decode, _route in MATRIX:
    case(f"gpu-{_connector}-{_prefill_kind}-{_prefill}to{_decode}", True, (_release,))(
        partial(moved, _connector, _prefill_kind, _decode_kind, _prefill, _decode, _route))
