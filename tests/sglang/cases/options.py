# SPDX-License-Identifier: Apache-2.0
"""What KVSPLICE_* variables change."""
from __future__ import annotations

from cases.failures import expect_failed
from cases.stock import OLDER, SHORT, expect_refused
from harness import shapes
from harness.case import Bench, case, expect, expect_alive, expect_bytes
from harness.fleet import Fleet

SMALL = shapes.GPT_OSS_120B.with_layers(2, 3)


def both(**variables: str) -> dict[str, dict[str, str]]:
    return {"prefill_environment": variables, "decode_environment": variables}


def routes(fleet: Fleet) -> set[str]:
    return {report.get("route", "?") for report in fleet.reports()}


def run_checked(fleet: Fleet, chunk_pages: int = 0) -> None:
    request = fleet.request(chunk_pages=chunk_pages)
    fleet.run([request])
    expect_bytes(fleet, [request])
    expect_alive(fleet.prefill)
    fleet.clear(request)


@case("policy-off", True)
def policy_off(bench: Bench) -> None:
    """The release as it is, with the library watching."""
    with bench.fleet(SHORT, 2, 1, tokens=200, **both(KVSPLICE_POLICY="off")) as fleet:
        if bench.release in OLDER:
            expect_refused(fleet)
        else:
            run_checked(fleet)


@case("policy-refused", True)
def policy_refused(bench: Bench) -> None:
    """Only what the release refuses: full attention goes its own way, state ours where the release has none."""
    with bench.fleet(SHORT, 2, 1, tokens=200, record_calls=True, **both(KVSPLICE_POLICY="refused")) as fleet:
        run_checked(fleet, chunk_pages=2)
        calls = [call for rank in fleet.prefill for call in rank.call("take_calls")]
        pools = {source[0].split(" buffer")[0] for call in calls for source in call.sources}
        expect("component 0" in pools, f"full attention did not go through the engine: {pools}")
        expect(("component 1" in pools) == (bench.release not in OLDER), f"state through the engine: {pools}")


@case("policy-all", True, ("0.5.21",))
def policy_all(bench: Bench) -> None:
    with bench.fleet(SMALL, 2, 2, record_calls=True, **both(KVSPLICE_POLICY="all")) as fleet:
        run_checked(fleet, chunk_pages=4)
        expect(routes(fleet) == {"host"}, f"routes {routes(fleet)}\n{fleet.logs()}")


@case("transport-host", True)
def transport_host(bench: Bench) -> None:
    with bench.fleet(SMALL, 2, 4, **both(KVSPLICE_TRANSPORT="host")) as fleet:
        run_checked(fleet, chunk_pages=4)
        expect(routes(fleet) == {"host"}, f"routes {routes(fleet)}\n{fleet.logs()}")


@case("transport-tcp", True)
def transport_tcp(bench: Bench) -> None:
    for prefill_tp, decode_tp in ((4, 2), (2, 4)):
        with bench.fleet(SMALL, prefill_tp, decode_tp, **both(KVSPLICE_TRANSPORT="tcp")) as fleet:
            run_checked(fleet, chunk_pages=4)
            expect(routes(fleet) == {"tcp"}, f"routes {routes(fleet)}\n{fleet.logs()}")


@case("transport-none-left", True, ("0.5.21",))
def transport_none(bench: Bench) -> None:
    """The connector's engine is for bare peers alone: a preloaded one with nothing else fails its rooms, clearly."""
    with bench.fleet(SMALL, 2, 1, **both(KVSPLICE_TRANSPORT="engine")) as fleet:
        request = fleet.request()
        fleet.fill(request)
        fleet.open(request)
        begin = fleet.send(request)
        expect_failed(*fleet.finish([request])[request.room], begin)
        expect_bytes(fleet, [])
        expect_alive(fleet.prefill)


@case("small-staging", True, ("0.5.21",))
def small_staging(bench: Bench) -> None:
    """A request far larger than the staging memory."""
    with bench.fleet(shapes.GPT_OSS_120B, 2, 1, tokens=3000, **both(KVSPLICE_STAGING_MB="1")) as fleet:
        run_checked(fleet)


@case("padded-heads-refused", True)
def padded_heads(bench: Bench) -> None:
    """By default a CPU server is taken to pad heads: with more ranks than heads its state cannot be told apart."""
    shape = shapes.MIMO_V2_FLASH.with_layers(1, 1)      # 4 heads in full attention
    with bench.fleet(shape, 8, 4, tokens=200, **both(KVSPLICE_CPU_HEADS="padded")) as fleet:
        request = fleet.request()
        fleet.fill(request)
        fleet.open(request)
        begin = fleet.send(request)
        senders, receivers = fleet.finish([request])[request.room]
        expect_failed(senders, receivers, begin)
        expect(any("padd" in outcome.text for outcome in receivers), f"{[outcome.text for outcome in receivers]}")
        expect_bytes(fleet, [])
        expect_alive(fleet.prefill)
