# SPDX-License-Identifier: Apache-2.0
"""Time one request between real managers, again and again, and check the bytes of the last one."""
from __future__ import annotations

import re
import statistics
from dataclasses import dataclass, field
from typing import Any, Optional, Sequence

from .fleet import Fleet, FleetConfig, Request
from .processes import Nurseries, RankError, gather
from .rank import SUCCESS, Timing
from .shapes import Shape


SLOW = 10.0     # seconds: a request that takes longer is measured once


@dataclass
class Sample:
    whole: float                # seconds from the decode's asking to every rank's Success
    step: float                 # seconds in which pages were moved


@dataclass
class Result:
    contestant: str
    tokens: int
    samples: list[Sample] = field(default_factory=list)
    failure: str = ""           # why there are no samples
    reports: list[dict[str, str]] = field(default_factory=list)     # kvsplice's own lines for the last request

    @property
    def whole(self) -> Optional[float]:
        return statistics.median(sample.whole for sample in self.samples) if self.samples else None

    @property
    def step(self) -> Optional[float]:
        return statistics.median(sample.step for sample in self.samples) if self.samples else None


@dataclass(frozen=True)
class Contestant:
    name: str
    connector: str
    prefill_library: bool
    decode_library: bool
    equal_tp: bool = False
    environment: tuple[tuple[str, str], ...] = ()


def start(nurseries: Nurseries, release: str, contestant: Contestant, shape: Shape, prefill_tp: int, decode_tp: int,
          tokens: int) -> Fleet:
    environment = dict(contestant.environment)
    fleet = Fleet(nurseries, FleetConfig(
        release, shape, prefill_tp, decode_tp, connector=contestant.connector, tokens=tokens,
        prefill_library=contestant.prefill_library, decode_library=contestant.decode_library,
        prefill_environment=environment, decode_environment=environment))
    fleet.find_prefill()
    if contestant.connector == "mooncake":      # NIXL's calls return before the pages are there
        gather([(rank, "time_steps", {}) for rank in fleet.prefill])
    return fleet


def once(fleet: Fleet, request: Request, timeout: float) -> Sample:
    """The same request under a new number."""
    calls: list[tuple[Any, str, dict[str, Any]]] = [
        (rank, "whole_prefill", {"room": request.room, "chunks": request.chunks(), "states": request.sources[1:],
                                 "aux_row": request.source_row, "timeout": timeout}) for rank in fleet.prefill]
    calls += [(rank, "whole_decode", {"room": request.room, "items": request.targets[0],
                                      "states": request.targets[1:], "aux_row": request.target_row,
                                      "timeout": timeout}) for rank in fleet.decode]
    timings: list[Timing] = gather(calls, 2 * timeout + 60)
    for (rank, _, _), timing in zip(calls, timings):
        if timing.status != SUCCESS:
            raise RankError(timing.text or f"{rank.name} ended with status {timing.status}")
    senders, receivers = timings[:len(fleet.prefill)], timings[len(fleet.prefill):]
    return Sample(max(timing.end for timing in timings) - min(timing.begin for timing in receivers),
                  max(timing.step_end for timing in senders) - min(timing.step_begin for timing in senders))


def reason(text: str) -> str:
    """The first line, without the class and the number of the room that SGLang puts before it."""
    return re.sub(r"^KVTransferError\(bootstrap_room=\d+\): ", "", text.splitlines()[0])


def measure(fleet: Fleet, contestant: str, tokens: int, repeat: int, timeout: float) -> Result:
    result = Result(contestant, tokens)
    request = fleet.request(tokens)
    fleet.fill(request)
    try:
        first = once(fleet, request, timeout)       # connections are made at the first request
        for _ in range(1 if first.whole > SLOW else repeat):
            request = request.again(fleet.new_room())
            result.samples.append(once(fleet, request, timeout))
        fleet.wipe(request)
        request = request.again(fleet.new_room())
        once(fleet, request, timeout)
    except RankError as error:
        result.failure, result.samples = reason(str(error)), []
        return result
    result.reports = [report for report in fleet.reports() if report["room"] == str(request.room)]
    problems = fleet.problems([request])
    if problems:
        result.failure = f"wrong bytes: {problems[0]}"
    fleet.give_back(request)
    return result


def series(nurseries: Nurseries, release: str, contestant: Contestant, shape: Shape, prefill_tp: int, decode_tp: int,
           lengths: Sequence[int], repeat: int, timeout: float) -> list[Result]:
    """One contestant at every length. Who fails gets fresh servers for the next length."""
    results: list[Result] = []
    fleet: Optional[Fleet] = None
    try:
        for tokens in lengths:
            if fleet is None:
                fleet = start(nurseries, release, contestant, shape, prefill_tp, decode_tp, max(lengths))
            results.append(measure(fleet, contestant.name, tokens, repeat, timeout))
            if results[-1].failure:
                fleet.close()
                fleet = None
    finally:
        if fleet is not None:
            fleet.close()
    return results
