# SPDX-License-Identifier: Apache-2.0
"""One request fails, and only that one: in time, with a reason, with nothing written that should not be."""
from __future__ import annotations

import random
import re
import time
from functools import partial

from harness import shapes
from harness.case import (FAILED, SUCCESS, Bench, RankError, case, expect, expect_alive, expect_bytes, expect_ends,
                          wait_for)
from harness.fleet import Fleet, Request
from harness.processes import gather
from harness.rank import Outcome

SMALL = shapes.GPT_OSS_120B.with_layers(2, 3)
# 32 MiB for each 1,000 tokens: copying 5,000 of them takes long enough to be interrupted.
LARGE = shapes.GPT_OSS_120B.with_layers(16, 2)
LARGE_TOKENS = 5000
STOCK_TEXT = "Failed to get kvcache from prefill instance"
OTHER = 0x77            # another request's bytes in pages that were given up


def expect_failed(senders: list[Outcome], receivers: list[Outcome], begin: float, ours: bool = True) -> None:
    expect_ends(senders, FAILED, "prefill")
    expect_ends(receivers, FAILED, "decode")
    for outcome in receivers:
        # A decode without the library hears of it after what its prefill sends before, through its engine.
        expect(outcome.ended - begin < (1.0 if ours else 10.0), f"the decode learnt of it after {outcome.ended - begin:.2f} s")
        if ours:
            expect(outcome.text and STOCK_TEXT not in outcome.text, f"the decode was told only '{outcome.text}'")


def expect_works_again(fleet: Fleet, former: Request) -> None:
    """The pages of a request that went well before serve another room."""
    last = former.again(fleet.new_room())
    fleet.fill(last)
    fleet.run([last])
    expect_bytes(fleet, [last])


def expect_said_once(fleet: Fleet, room: int) -> None:
    """Trial A10: every process that we are in says why a room failed in one line, whatever its size."""
    pattern = re.compile(rf"^kvsplice\[.*(?:warn|error): .*\b{room}\b.*$", re.M)
    said = 0
    for rank in [*fleet.prefill, *fleet.decode]:
        lines = pattern.findall(rank.log())
        said += len(lines)
        expect(len(lines) <= 1, f"{rank.name} says it {len(lines)} times:\n" + "\n".join(lines))
    expect(said > 0, f"nobody says why room {room} failed:\n{fleet.logs()}")


def fail_one(fleet: Fleet, good_before: int, ours: bool, chunk_pages: int = 0) -> None:
    """A room whose first chunk names a page past the prefill's memory, between good ones."""
    good = [fleet.request() for _ in range(good_before)]
    bad = fleet.request(chunk_pages=chunk_pages)
    fleet.fill(bad)
    real = bad.sources[0][0]
    bad.sources[0][0] = fleet.pages[0] + 1000
    later = fleet.request()
    for request in [*good, later]:
        fleet.fill(request)
    for request in [*good, bad, later]:
        fleet.open(request)
    for request in good:
        fleet.send(request)
    begin = fleet.send(bad)
    fleet.send(later)
    ends = fleet.finish([*good, bad, later])
    for request in [*good, later]:
        expect_ends(ends[request.room][0], SUCCESS, f"room {request.room}: prefill")
        expect_ends(ends[request.room][1], SUCCESS, f"room {request.room}: decode")
    expect_failed(*ends[bad.room], begin, ours)
    expect_said_once(fleet, bad.room)
    expect_alive(fleet.prefill)
    bad.sources[0][0] = real
    expect_bytes(fleet, [*good, later])
    # The pages of the lost room serve the next one.
    fleet.give_back(bad)
    after = fleet.request()
    fleet.run([after])
    expect_bytes(fleet, [*good, later, after])


@case("one-room-fails", True)
def one_room(bench: Bench) -> None:
    for prefill_tp, decode_tp in ((4, 2), (1, 2)):
        with bench.fleet(SMALL, prefill_tp, decode_tp, requests=5) as fleet:
            fail_one(fleet, 1, True)


@case("one-room-fails-bare-decode", True)
def one_room_bare(bench: Bench) -> None:
    with bench.fleet(SMALL, 2, 1, requests=5, decode_library=False) as fleet:
        fail_one(fleet, 1, False)


@case("first-chunk-fails", True)
def first_chunk(bench: Bench) -> None:
    """Three chunks, the first of them bad: the other two move nothing."""
    for prefill_tp, decode_tp in ((2, 1), (1, 2)):
        with bench.fleet(SMALL, prefill_tp, decode_tp, requests=5) as fleet:
            fail_one(fleet, 1, True, chunk_pages=6)


def decode_pages(fleet: Fleet, request: Request, method: str) -> list[bool]:
    calls = []
    for rank in fleet.decode_ranks(request):
        for component, items in enumerate(request.targets):
            calls.append((rank, method, {"component": component, "items": items, "value": OTHER}))
    return [bool(answer) for call in calls for answer in gather([call])]


def decode_aborts(connector: str, bench: Bench) -> None:
    """The decode gives a request up at any moment and its pages to another: no byte of it lands there later."""
    with bench.fleet(LARGE, 2, 1, tokens=LARGE_TOKENS, connector=connector) as fleet:
        first = fleet.request()
        fleet.run([first])
        caught = 0
        for delay in (None, 0.0, 0.002, 0.005, 0.015):
            request = first.again(fleet.new_room())
            fleet.open(request)
            if delay is not None:
                fleet.send(request)
                time.sleep(delay)
            begin = time.monotonic()
            gather([(rank, "abort", {"room": request.room}) for rank in fleet.decode])
            expect(time.monotonic() - begin < 1.0, f"abort took {time.monotonic() - begin:.2f} s")
            decode_pages(fleet, request, "scribble")
            if delay is None:
                # The prefill may not have heard of it yet.
                fleet.send(request)
            senders, receivers = fleet.finish([request], 10.0)[request.room]
            expect(all(outcome.status in (FAILED, SUCCESS) for outcome in senders), f"prefill: {senders}")
            caught += receivers[0].status == FAILED
            time.sleep(0.1)
            expect(all(decode_pages(fleet, request, "scribbled")), f"written after an abort at {delay}")
            expect_alive(fleet.prefill)
        expect(caught >= 2, f"only {caught} of 5 aborts came before the end: nothing is proved")
        last = first.again(fleet.new_room())
        fleet.run([last])
        expect_bytes(fleet, [last])


for _connector in ("mooncake", "nixl", "mori"):
    case(f"{_connector}-decode-aborts", True)(partial(decode_aborts, _connector))


@case("decode-clears-after-success", True)
def clears(bench: Bench) -> None:
    """After its end a room may be aborted and cleared in any order; its pages are the decode's again."""
    with bench.fleet(SMALL, 2, 1, requests=2) as fleet:
        request = fleet.request()
        fleet.run([request])
        gather([(rank, "abort", {"room": request.room}) for rank in fleet.decode])
        fleet.clear(request)
        decode_pages(fleet, request, "scribble")
        other = fleet.request()
        fleet.run([other])
        expect(all(decode_pages(fleet, request, "scribbled")), "written after the room had ended")
        expect_alive(fleet.prefill)


@case("prefill-aborts", True)
def prefill_aborts(bench: Bench) -> None:
    """The prefill gives a request up and reuses its pages: the decode either has every byte or knows that it failed."""
    with bench.fleet(LARGE, 2, 1, tokens=LARGE_TOKENS) as fleet:
        first = fleet.request()
        fleet.run([first])
        failed = 0
        for delay in (0.0, 0.002, 0.01):
            request = first.again(fleet.new_room())
            fleet.fill(request)
            fleet.wipe(request)
            fleet.open(request)
            fleet.send(request)
            time.sleep(delay)
            gather([(rank, "abort", {"room": request.room}) for rank in fleet.prefill])
            for component, items in enumerate(request.sources):
                fleet.prefill[0].call("scribble", component=component, items=items, value=OTHER)
            outcome = fleet.decode[0].call("await_end", rooms=[request.room], timeout=5.0)[request.room]
            expect(outcome.status in (FAILED, SUCCESS), f"the decode was not told of an abort at {delay}: {outcome}")
            if outcome.status == SUCCESS:
                expect_bytes(fleet, [request])
            failed += outcome.status == FAILED
            expect_alive(fleet.prefill)
            fleet.clear(request)
        expect(failed, "no abort came before the end: nothing is proved")
        expect_works_again(fleet, first)


@case("decode-killed", True, ("0.5.21",))
def decode_killed(bench: Bench) -> None:
    """A decode rank dies in mid-request: the prefill ends the room and keeps its threads."""
    with bench.fleet(LARGE, 1, 2, tokens=LARGE_TOKENS) as fleet:
        first = fleet.request()
        fleet.run([first])
        request = first.again(fleet.new_room())
        fleet.open(request)
        fleet.send(request)
        time.sleep(0.01)
        fleet.decode[1].kill()
        senders = fleet.prefill[0].call("await_end", rooms=[request.room], timeout=20.0)
        expect(senders[request.room].status in (FAILED, SUCCESS), f"the prefill was left waiting: {senders}")
        threads = fleet.prefill[0].call("threads")
        expect(threads.get("transfer_worker") == 4 and threads.get("bootstrap_thread") == 1,
               f"a prefill thread died: {threads}")


@case("prefill-killed", True, ("0.5.21",))
def prefill_killed(bench: Bench) -> None:
    """A prefill rank dies in mid-request: the decode fails the room within a second, saying why."""
    with bench.fleet(LARGE, 2, 1, tokens=LARGE_TOKENS) as fleet:
        first = fleet.request()
        fleet.run([first])
        request = first.again(fleet.new_room())
        fleet.open(request)
        fleet.send(request)
        time.sleep(0.01)
        begin = time.monotonic()
        fleet.prefill[1].kill()
        outcome = fleet.decode[0].call("await_end", rooms=[request.room], timeout=10.0)[request.room]
        expect(outcome.status == FAILED, f"the decode ended with {outcome}")
        expect(outcome.ended - begin < 1.0, f"it took {outcome.ended - begin:.1f} s")
        expect(outcome.text and STOCK_TEXT not in outcome.text, f"it says only '{outcome.text}'")


def damaged(record: bytes) -> list[bytes]:
    """Endpoint records that no peer sends."""
    rng = random.Random(3)
    return [b"\0", record[:1], record[:8], record[:len(record) // 2], record[:-1], record + b"\0" * 4096,
            bytes(rng.randrange(256) for _ in record), b"\xff" * len(record),
            *(record[:at] + bytes([record[at] ^ 0xff]) + record[at + 1:] for at in range(min(24, len(record))))]


@case("damaged-records", True)
def damaged_records(bench: Bench) -> None:
    """Registrations and metadata with a damaged last frame: no thread dies and the next real request works."""
    with bench.fleet(SMALL, 1, 2, requests=3, record_messages=True) as fleet:
        first = fleet.request()
        fleet.run([first])
        messages = fleet.prefill[0].call("take_messages")
        registration = next(frames for name, frames in messages if name == "KVArgsRegisterInfo")
        metadata = next(frames for name, frames in messages if name == "TransferInfo")
        expect(len(registration) == len(metadata) == 50, f"{len(registration)} and {len(metadata)} frames")
        sent = []
        for number, record in enumerate(damaged(registration[49])):
            fake = f"127.0.0.1:{number + 1}".encode()
            sent.append([*registration[:3], fake, *registration[4:49], record])
        for number, record in enumerate([b"\0", metadata[49][:-1], metadata[49] + b"\0" * 100, b"\xff" * 64]):
            sent.append([str(7000 + number).encode(), *metadata[1:49], record])
        fleet.prefill[0].call("send_raw", port=fleet.info[0]["port"], messages=sent)
        wait_for(lambda: len(fleet.prefill[0].call("take_messages")) >= 0, 0.1)
        second = fleet.request(chunk_pages=5)
        fleet.run([second])
        expect_bytes(fleet, [first, second])
        expect_alive(fleet.prefill)


@case("lists-of-different-length", True)
def different_lists(bench: Bench) -> None:
    """The sides disagree on the number of state pages: the common prefix arrives, nothing is read or written past it."""
    with bench.fleet(SMALL, 2, 1, requests=4) as fleet:
        wholes = []
        for kept in (2, 1):
            request = fleet.request()
            expect(len(request.sources[1]) == 3, f"{len(request.sources[1])} state pages")
            request.targets[1] = request.targets[1][:kept]
            fleet.run([request])
            wholes.append(request)
            expect_bytes(fleet, wholes)
        longer = fleet.request()
        extra = fleet.request()
        fleet.fill(longer)
        wanted = longer.targets[1]
        longer.targets[1] = wanted + extra.targets[1]
        fleet.open(longer)
        fleet.send(longer)
        ends = fleet.finish([longer])
        expect_ends(ends[longer.room][1], SUCCESS, "decode")
        longer.targets[1] = wanted
        expect_bytes(fleet, [*wholes, longer])
        expect_alive(fleet.prefill)


@case("dtype-mismatch", True)
def dtype_mismatch(bench: Bench) -> None:
    """bf16 against fp8 looks like a TP ratio. SGLang's own check refuses it; behind that check kvsplice does."""
    with bench.fleet(SMALL, 2, 1) as fleet:
        fleet.run([fleet.request()])
    try:
        with bench.fleet(SMALL, 2, 1, decode_dtype="fp8_e4m3"):
            expect(False, "SGLang took a decode with another dtype")
    except RankError as error:
        expect("KV cache dtype mismatch" in str(error), f"another refusal: {error}")
    from harness.fleet import FleetConfig
    with Fleet(bench.nurseries, FleetConfig(bench.release, SMALL, 2, 1, decode_dtype="fp8_e4m3")) as fleet:
        for rank in fleet.decode:
            rank.call("override", name="kv_cache_dtype_str", value=SMALL.dtype)
        fleet.find_prefill()
        request = fleet.request()
        fleet.fill(request)
        fleet.open(request)
        begin = fleet.send(request)
        senders, receivers = fleet.finish([request])[request.room]
        expect_failed(senders, receivers, begin)
        expect("fp8_e4m3" in receivers[0].text and "bfloat16" in receivers[0].text, f"'{receivers[0].text}'")
        expect_bytes(fleet, [])
        expect_alive(fleet.prefill)


@case("page-size-mismatch", True)
def page_size_mismatch(bench: Bench) -> None:
    """SGLang refuses another page size on the decode; behind that check kvsplice does, and nothing is sent."""
    from harness.fleet import FleetConfig
    for pages in (32, 1):
        other = SMALL.with_page(pages)
        try:
            with bench.fleet(SMALL, 2, 1, prefill_shape=other):
                expect(False, "SGLang took a prefill with another page size")
        except RankError as error:
            expect("Page size mismatch" in str(error), f"another refusal: {error}")
        with Fleet(bench.nurseries, FleetConfig(bench.release, SMALL, 2, 1, prefill_shape=other)) as fleet:
            for rank in fleet.decode:
                rank.call("forget_page_size")
            fleet.find_prefill()
            request = fleet.request()
            fleet.open(request)
            begin = fleet.send(request)
            senders, receivers = fleet.finish([request])[request.room]
            expect_failed(senders, receivers, begin)
            expect(str(pages) in receivers[0].text and "64" in receivers[0].text, f"'{receivers[0].text}'")
            expect_bytes(fleet, [])
            expect_alive(fleet.prefill)


def given_up_in_mid_send(connector: str, bench: Bench) -> None:
    """The prefill's scheduler clears a room when the worker has its chunk in hand: nothing of it moves any more."""
    with bench.fleet(SMALL, 2, 1, connector=connector) as fleet:
        first = fleet.request()
        fleet.run([first])
        request = first.again(fleet.new_room())
        fleet.fill(request)
        fleet.wipe(request)
        gather([(rank, "give_up_in_mid_send", {"room": request.room}) for rank in fleet.prefill])
        fleet.open(request)
        fleet.send(request)
        outcome = fleet.decode[0].call("await_end", rooms=[request.room], timeout=5.0)[request.room]
        expect(outcome.status == FAILED, f"a room that the prefill gave up ended with {outcome}")
        fleet.decode[0].call("clear", room=request.room)
        expect_bytes(fleet, [])
        expect_alive(fleet.prefill)
        expect_works_again(fleet, first)


for _connector in ("mooncake", "nixl", "mori"):
    case(f"{_connector}-given-up-in-mid-send", True, ("0.5.18", "0.5.21"))(partial(given_up_in_mid_send, _connector))
