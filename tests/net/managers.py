# SPDX-License-Identifier: Apache-2.0
"""SGLang's own mooncake managers, the prefill's in one network namespace and the decode's in the other, over our tcp."""
from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, List, Tuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "sglang"))

from harness import shapes     # noqa: E402
from harness.case import Bench, CaseFailed, expect, expect_alive, expect_bytes, expect_ends     # noqa: E402
from harness.fleet import Fleet     # noqa: E402
from harness.processes import Host, Nurseries, RankError     # noqa: E402
from harness.rank import FAILED     # noqa: E402

RELEASE = "0.5.21"
TIMEOUT_MS = 3000
# Moving the long request takes some tenths of a second: the cable is cut long before.
LONG = shapes.GPT_OSS_120B.with_layers(8, 2)
LONG_TOKENS = 24576


@dataclass(frozen=True)
class Cable:
    """The two ends, and the commands that cut and mend what joins them."""
    prefill: Host
    decode: Host
    cut: List[str]
    mend: List[str]


def fleet_of(bench: Bench, cable: Cable, shape: shapes.Shape, prefill_tp: int, decode_tp: int, tokens: int,
             requests: int) -> Fleet:
    environment = {"KVSPLICE_TIMEOUT_MS": str(TIMEOUT_MS)}
    return bench.fleet(shape, prefill_tp, decode_tp, tokens=tokens, requests=requests, prefill_host=cable.prefill,
                       decode_host=cable.decode, prefill_environment=environment, decode_environment=environment)


def expect_tcp(fleet: Fleet) -> None:
    routes = sorted({report.get("route", "none") for report in fleet.reports() if report["end"] == "done"})
    expect(routes == ["tcp"], f"the routes are {routes}:\n{fleet.logs()}")


def transfer(bench: Bench, cable: Cable, prefill_tp: int, decode_tp: int) -> None:
    with fleet_of(bench, cable, shapes.GPT_OSS_120B, prefill_tp, decode_tp, 1000, 3) as fleet:
        requests = [fleet.request(), fleet.request(tokens=300, chunk_pages=2), fleet.request()]
        fleet.run(requests)
        expect_bytes(fleet, requests)
        expect_alive(fleet.prefill)
        for request in requests:
            fleet.clear(request)
        expect_tcp(fleet)


def cut_and_mended(bench: Bench, cable: Cable) -> None:
    with fleet_of(bench, cable, LONG, 2, 1, LONG_TOKENS, 3) as fleet:
        before, lost, after = fleet.request(tokens=1000), fleet.request(), fleet.request(tokens=1000)
        fleet.run([before])
        fleet.fill(lost)
        fleet.open(lost)
        fleet.send(lost)
        subprocess.run(cable.cut, check=True)
        begin = time.monotonic()
        try:
            prefill, decode = fleet.finish([lost], timeout=10.0)[lost.room]
        finally:
            subprocess.run(cable.mend, check=True)
        expect_ends(prefill, FAILED, "prefill")
        expect_ends(decode, FAILED, "decode")
        expect(max(end.ended for end in [*prefill, *decode]) - begin < TIMEOUT_MS / 1000 + 3,
               f"told late:\n{fleet.logs()}")
        expect(any(f"{TIMEOUT_MS} ms" in end.text or "tcp" in end.text for end in [*prefill, *decode]),
               f"why is not said: {[end.text for end in [*prefill, *decode]]}")
        fleet.clear(lost)
        fleet.wipe(lost)
        fleet.run([after], timeout=60.0)
        expect_bytes(fleet, [before, after])
        expect_alive(fleet.prefill)


CASES: Tuple[Tuple[str, Callable[[Bench, Cable], None]], ...] = (
    ("managers, 2 to 1", lambda bench, cable: transfer(bench, cable, 2, 1)),
    ("managers, 1 to 2", lambda bench, cable: transfer(bench, cable, 1, 2)),
    ("managers, the cable cut and mended", cut_and_mended),
)


def run(library: Path, cable: Cable) -> Tuple[int, int]:
    """Every case; how many passed and failed."""
    passed = failed = 0
    nurseries = Nurseries(library)
    try:
        for name, case in CASES:
            begin = time.monotonic()
            try:
                case(Bench(nurseries, RELEASE), cable)
            except (CaseFailed, RankError) as error:
                failed += 1
                print(f"  FAIL {name} ({time.monotonic() - begin:.1f} s)\n{error}", flush=True)
                continue
            passed += 1
            print(f"  ok   {name} ({time.monotonic() - begin:.1f} s)", flush=True)
    finally:
        nurseries.close()
    return passed, failed
