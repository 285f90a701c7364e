# SPDX-License-Identifier: Apache-2.0
"""The driver's side of a fleet: its ranks, and requests from a prefill to a decode."""
from __future__ import annotations

import contextlib
import itertools
import random
import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional, Sequence

from .context import Topology
from .processes import CALL_TIMEOUT, LOOPBACK, Host, Nurseries, Nursery, RankError, RankProxy, gather
from .rank import AUX_ROWS, DECODE, PREFILL, SUCCESS, WAITING, Outcome, RankConfig
from .shapes import CANARY, Shape


@dataclass
class Request:
    """One prompt: its pages on both sides of each pool, and its metadata rows."""
    room: int
    tokens: int
    sources: list[list[int]]
    targets: list[list[int]]
    first_pages: list[int]
    source_row: int
    target_row: int
    chunk_pages: int = 0        # 0: one chunk
    prefill_group: int = 0      # data-parallel group on either side
    decode_group: int = 0
    content: int = 0            # the room whose bytes the pages hold, where it is not this one

    def again(self, room: int) -> Request:
        """The same pages with the same bytes, under another number."""
        return replace(self, room=room, content=self.content or self.room)

    def chunks(self) -> list[list[int]]:
        pages = self.sources[0]
        step = self.chunk_pages or max(1, len(pages))
        return [pages[start:start + step] for start in range(0, len(pages), step)] or [[]]


@dataclass
class FleetConfig:
    release: str
    shape: Shape
    prefill_tp: int
    decode_tp: int
    prefill_library: bool = True
    decode_library: bool = True
    connector: str = "mooncake"
    decode_release: str = ""        # instead of the prefill's
    prefill_version: Optional[Path] = None      # the library of another version, see versions.py
    decode_version: Optional[Path] = None
    prefill_host: Host = LOOPBACK
    decode_host: Host = LOOPBACK
    tokens: int = 1000              # room for requests of so many
    requests: int = 1
    prefill_dp: int = 1
    decode_dp: int = 1
    prefill_pp: int = 1
    prefill_cp: int = 1
    layers: Optional[Sequence[Sequence[int]]] = None    # see rank.RankConfig
    prefill_layer_ids: bool = True
    decode_layer_ids: bool = True
    hybrid_pool: bool = False
    role_switch: bool = False
    prefill_environment: Mapping[str, str] = field(default_factory=dict)
    decode_environment: Mapping[str, str] = field(default_factory=dict)
    prefill_shape: Optional[Shape] = None   # where the sides disagree
    prefill_dtype: str = ""
    decode_dtype: str = ""
    pages: Optional[Sequence[int]] = None
    reserve_only: bool = False
    record_calls: bool = False
    record_messages: bool = False
    fork_first: bool = False
    prefill_altered: tuple[str, ...] = ()
    decode_altered: tuple[str, ...] = ()


class Fleet:
    """A bootstrap server, P prefill ranks and D decode ranks."""

    def __init__(self, nurseries: Nurseries, config: FleetConfig, seed: int = 1) -> None:
        self.config = config
        self._nurseries = nurseries
        self.random = random.Random(seed)
        self._rooms = itertools.count(self.random.randrange(1 << 40))
        shape = config.shape
        spare = 5
        self.pages = list(config.pages) if config.pages else [
            config.requests * pool.page_count(config.tokens, shape.page_size) + spare for pool in shape.pools]
        self._free = {role: [self._shuffled(count) for count in self.pages] for role in (PREFILL, DECODE)}
        self._rows = {role: self._shuffled(AUX_ROWS) for role in (PREFILL, DECODE)}
        self.bootstrap: Optional[RankProxy] = None
        self.prefill: list[RankProxy] = []
        self.decode: list[RankProxy] = []
        self._idle: list[RankProxy] = []        # decode ranks that are not in use
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _decode_nursery(self) -> Nursery:
        config = self.config
        return self._nurseries.prepare(config.decode_release or config.release, config.decode_library,
                                       config.decode_host, config.decode_version)

    def _shuffled(self, count: int) -> list[int]:
        numbers = list(range(count))
        self.random.shuffle(numbers)
        return numbers

    def _start(self) -> None:
        config = self.config
        self._port = 0
        self._start_prefill()
        decode = self._decode_nursery()
        self.decode = [decode.rank(f"decode{rank}") for rank in range(config.decode_tp * config.decode_dp)]
        for ranks, wanted in ((self.prefill, config.prefill_library), (self.decode, config.decode_library)):
            # A path that the loader cannot open is passed over with a warning.
            if ranks[0].call("preloaded") != wanted:
                raise RankError(f"{ranks[0].name} is preloaded or not, against what was asked: is the library there?")
        self.info = gather([*self._set_up(PREFILL), *self._set_up(DECODE)])

    def _start_prefill(self) -> None:
        """Processes, and the bootstrap server at the port that it had before, if there was one."""
        config = self.config
        nursery = self._nurseries.prepare(config.release, config.prefill_library, config.prefill_host,
                                          config.prefill_version)
        self.bootstrap = nursery.rank("bootstrap")
        self._port = self.bootstrap.call("serve_bootstrap", connector=config.connector, port=self._port)
        self.prefill = [nursery.rank(f"prefill{rank}") for rank in range(self._group_size(PREFILL) * config.prefill_dp)]

    def _set_up(self, role: str) -> list[tuple[RankProxy, str, dict[str, Any]]]:
        """The calls that make the managers of all ranks of a side."""
        config, calls = self.config, []
        assert self.bootstrap
        meeting = str(self._nurseries.scratch / f"stages-{self.bootstrap.pid}")
        ranks, tp_size, dp_size, pp_size, cp_size, environment, dtype, shape = (
            (self.prefill, config.prefill_tp, config.prefill_dp, config.prefill_pp, config.prefill_cp,
             config.prefill_environment, config.prefill_dtype, config.prefill_shape or config.shape)
            if role == PREFILL else
            (self.decode, config.decode_tp, config.decode_dp, 1, 1, config.decode_environment, config.decode_dtype,
             config.shape))
        for number, rank in enumerate(ranks):
            group, within = divmod(number, self._group_size(role))
            stage, within = divmod(within, tp_size * cp_size)
            place = Topology(tp_size, within % tp_size, dp_size, group, pp_size, stage, cp_size, within // tp_size,
                             meeting)
            calls.append((rank, "setup", {"config": RankConfig(
                role, place, shape, self.pages, config.prefill_host.address, self._port, config.connector,
                dict(environment), dtype, config.reserve_only, config.record_calls,
                config.record_messages and role == PREFILL, config.fork_first,
                config.prefill_altered if role == PREFILL else config.decode_altered, config.layers,
                config.prefill_layer_ids if role == PREFILL else config.decode_layer_ids, config.hybrid_pool,
                config.role_switch)}))
        return calls

    def restart_prefill(self, timeout: float = 60.0) -> None:
        """All of the prefill is killed; once the decode has noticed, another one is at the same address."""
        assert self.bootstrap
        for rank in [*self.prefill, self.bootstrap]:
            rank.close()
        end = time.monotonic() + timeout
        while any(gather([(rank, "knows_prefill", {}) for rank in self.decode])):
            if time.monotonic() > end:
                raise RankError(f"the decode still believes in the killed prefill after {timeout:.0f} s")
            time.sleep(0.1)
        self._start_prefill()
        gather(self._set_up(PREFILL))
        self.find_prefill()

    def switch_roles(self) -> None:
        """The prefill's processes become the decode and the decode's the prefill, with a bootstrap server of its own."""
        config = self.config
        assert self.bootstrap
        gather([(rank, "tear_down", {}) for rank in [*self.prefill, *self.decode]])
        self.bootstrap.close()
        self.bootstrap = self._decode_nursery().rank("bootstrap")
        self._port = self.bootstrap.call("serve_bootstrap", connector=config.connector)
        self.prefill, self.decode = self.decode, self.prefill
        config.prefill_tp, config.decode_tp = config.decode_tp, config.prefill_tp
        self._free = {role: [self._shuffled(count) for count in self.pages] for role in (PREFILL, DECODE)}
        gather([*self._set_up(PREFILL), *self._set_up(DECODE)])
        self.find_prefill()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for rank in [*self.prefill, *self.decode, *self._idle, *([self.bootstrap] if self.bootstrap else [])]:
            rank.close()

    def new_decode(self, tp_size: int) -> list[RankProxy]:
        """Decode ranks of another TP size for the same prefill, to be used with decoding; their pages are empty."""
        config = self.config
        nursery = self._decode_nursery()
        ranks = [nursery.rank(f"decode{tp_size}.{rank}") for rank in range(tp_size)]
        self._idle += ranks
        gather([(rank, "setup", {"config": RankConfig(
            DECODE, Topology(tp_size, number), config.shape, self.pages, config.prefill_host.address,
            self._port, config.connector, dict(config.decode_environment))}) for number, rank in enumerate(ranks)])
        if not all(gather([(rank, "find_prefill", {}) for rank in ranks])):
            raise RankError("a decode rank does not find the prefill")
        return ranks

    @contextlib.contextmanager
    def decoding(self, ranks: list[RankProxy]) -> Iterator[None]:
        """These ranks are the decode meanwhile."""
        before, size = self.decode, self.config.decode_tp
        self.decode, self.config.decode_tp = ranks, len(ranks)
        try:
            yield
        finally:
            self.decode, self.config.decode_tp = before, size

    def _group_size(self, role: str) -> int:
        """Processes of a data-parallel group: all stages of a prefill."""
        config = self.config
        return config.prefill_tp * config.prefill_cp * config.prefill_pp if role == PREFILL else config.decode_tp

    def prefill_ranks(self, request: Request) -> list[RankProxy]:
        size = self._group_size(PREFILL)
        return self.prefill[request.prefill_group * size:(request.prefill_group + 1) * size]

    def decode_ranks(self, request: Request) -> list[RankProxy]:
        first = request.decode_group * self.config.decode_tp
        return self.decode[first:first + self.config.decode_tp]

    # Requests

    def new_room(self) -> int:
        return next(self._rooms)

    def request(self, tokens: int = 0, chunk_pages: int = 0, prefill_group: int = 0, decode_group: int = 0) -> Request:
        tokens = tokens or self.config.tokens
        shape = self.config.shape
        counts = [pool.page_count(tokens, shape.page_size) for pool in shape.pools]

        def take(role: str) -> list[list[int]]:
            return [[free.pop() for _ in range(count)] for free, count in zip(self._free[role], counts)]

        return Request(self.new_room(), tokens, take(PREFILL), take(DECODE),
                       [pool.first_page(tokens, shape.page_size) for pool in shape.pools],
                       self._rows[PREFILL].pop(), self._rows[DECODE].pop(), chunk_pages, prefill_group, decode_group)

    def give_back(self, request: Request) -> None:
        """Its pages and rows are free again, and the decode's hold the canary."""
        self.wipe(request)
        for role, items, row in ((PREFILL, request.sources, request.source_row),
                                 (DECODE, request.targets, request.target_row)):
            for free, used in zip(self._free[role], items):
                free.extend(used)
            self._rows[role].append(row)

    def wipe(self, request: Request) -> None:
        for component, items in enumerate(request.targets):
            gather([(rank, "scribble", {"component": component, "items": items, "value": CANARY})
                    for rank in self.decode_ranks(request)])
        gather([(rank, "scribble_aux", {"row": request.target_row}) for rank in self.decode_ranks(request)])

    def find_prefill(self) -> None:
        if not all(gather([(rank, "find_prefill", {}) for rank in self.decode])):
            raise RankError("a decode rank does not find the prefill")

    def fill(self, request: Request) -> None:
        gather([(rank, "fill", {"room": request.content or request.room, "items": request.sources, "first_pages": request.first_pages,
                                "aux_row": request.source_row}) for rank in self.prefill_ranks(request)])

    def open(self, request: Request) -> None:
        """Receivers and senders up to the point where the prefill knows the pages of every decode rank."""
        decode, prefill = self.decode_ranks(request), self.prefill_ranks(request)
        gather([(rank, "open_receiver", {"room": request.room, "prefill_dp_rank": request.prefill_group})
                for rank in decode] + [(rank, "open_sender", {"room": request.room}) for rank in prefill])
        gather([(rank, "send_metadata", {"room": request.room, "items": request.targets[0],
                                         "aux_row": request.target_row, "states": request.targets[1:]})
                for rank in decode])
        for rank, found in zip(prefill, gather([(rank, "await_status", {
                "rooms": [request.room], "least": WAITING, "timeout": 20.0}) for rank in prefill])):
            outcome = found[request.room]
            if outcome.status != WAITING:
                raise RankError(f"{rank.name} did not hear from every decode rank: {outcome}")
        gather([(rank, "init_sender", {"room": request.room, "pages": len(request.sources[0]),
                                       "aux_row": request.source_row}) for rank in prefill])

    def send(self, request: Request, chunks: Optional[slice] = None) -> float:
        """Send these chunks (all) from every rank; returns the time at which the first one began."""
        every = request.chunks()
        begin: list[float] = []
        for number in range(len(every))[chunks or slice(None)]:
            last = number == len(every) - 1
            begin += gather([(rank, "send", {
                "room": request.room, "items": every[number], "states": request.sources[1:] if last else None})
                for rank in self.prefill_ranks(request)])
        return min(begin)

    def finish(self, requests: Sequence[Request], timeout: float = 30.0) -> dict[int, tuple[list[Outcome],
                                                                                             list[Outcome]]]:
        """Outcomes of each room: (prefill ranks, decode ranks)."""
        calls = []
        wanted: dict[str, list[int]] = {}
        for request in requests:
            for rank in [*self.prefill_ranks(request), *self.decode_ranks(request)]:
                wanted.setdefault(rank.name, []).append(request.room)
        ranks = {rank.name: rank for rank in [*self.prefill, *self.decode]}
        for name, rooms in wanted.items():
            calls.append((ranks[name], "await_end", {"rooms": rooms, "timeout": timeout}))
        answers = dict(zip(wanted, gather(calls, timeout + CALL_TIMEOUT)))
        return {request.room: ([answers[rank.name][request.room] for rank in self.prefill_ranks(request)],
                               [answers[rank.name][request.room] for rank in self.decode_ranks(request)])
                for request in requests}

    def clear(self, request: Request) -> None:
        gather([(rank, "clear", {"room": request.room})
                for rank in [*self.prefill_ranks(request), *self.decode_ranks(request)]])

    def run(self, requests: Sequence[Request], timeout: float = 30.0) -> None:
        """Whole requests that must succeed."""
        for request in requests:
            self.fill(request)
        for request in requests:
            self.open(request)
        for request in requests:
            self.send(request)
        for room, (senders, receivers) in self.finish(requests, timeout).items():
            for side, outcomes in (("prefill", senders), ("decode", receivers)):
                for number, outcome in enumerate(outcomes):
                    if outcome.status != SUCCESS:
                        raise RankError(f"room {room} on {side} rank {number}: status {outcome.status}, "
                                        f"{outcome.text}\n{self.logs()}")

    def problems(self, requests: Sequence[Request]) -> list[str]:
        """Every byte of every rank: requests that must have arrived, and nothing else."""
        calls = []
        for index, rank in enumerate(self.decode):
            holds = [(request.content or request.room, request.targets, request.first_pages, request.target_row)
                     for request in requests if request.decode_group == index // self.config.decode_tp]
            calls.append((rank, "check", {"holds": holds}))
        return [f"{rank.name}: {problem}" for (rank, _, _), problems in zip(calls, gather(calls))
                for problem in problems]

    # What was logged

    def logs(self, lines: int = 6) -> str:
        return "\n".join(f"--- {rank.name}\n{rank.log_tail(lines)}" for rank in [*self.prefill, *self.decode])

    def reports(self) -> Iterator[dict[str, str]]:
        """The library's one line for each closed room of each decode rank, as its fields."""
        pattern = re.compile(r"kvs_room_report: room (\d+) (\w+): (.*)")
        for rank in self.decode:
            for room, end, fields in pattern.findall(rank.log()):
                found = dict(part.split("=", 1) for part in fields.split() if "=" in part)
                yield {"rank": rank.name, "room": room, "end": end, **found}
