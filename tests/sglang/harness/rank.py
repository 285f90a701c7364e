# SPDX-License-Identifier: Apache-2.0
"""One rank of a prefill or decode server, in a process of its own, driven call by call."""
from __future__ import annotations

import ctypes
import importlib
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Optional, Sequence

from .alter import alter
from .context import HOST, Topology, enter, sender_arguments, use_private_mooncake_engine
from .shapes import CANARY, UNUSED, Shape

PREFILL = "prefill"
DECODE = "decode"
CLASS_PREFIX = {"mooncake": "Mooncake", "nixl": "Nixl", "mori": "Mori"}
DOUBLES = Path(__file__).resolve().parents[2] / "doubles"   # of engines that have no package
AUX_ROWS = 160
DRAFT_ENTRIES = 1000        # numbers of a draft model's buffers begin here
AUX_BYTES = (64, 256)   # bytes of a row in each metadata buffer

FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)


@dataclass
class RankConfig:
    role: str
    place: Topology
    shape: Shape
    pages: Sequence[int]                # per pool
    bootstrap_host: str
    bootstrap_port: int
    connector: str = "mooncake"
    environment: dict[str, str] = field(default_factory=dict)
    dtype: str = ""                     # instead of the shape's
    reserve_only: bool = False          # see oracle.Buffer
    record_calls: bool = False
    record_messages: bool = False       # of decodes, as they came
    fork_first: bool = False            # as a fork server does it: import the connector, fork, set the environment
    altered: tuple[str, ...] = ()       # class (without the connector's name) and method with another signature
    layers: Optional[Sequence[Sequence[int]]] = None    # global layers of each whole pool: of a pipeline's stages
    layer_ids: bool = True              # the stages say which of them they have
    hybrid_pool: bool = False           # they do not, but SGLang's own pool knows
    role_switch: bool = False           # the server may change its role


@dataclass
class Outcome:
    status: int
    text: str           # why it failed
    ended: float        # time.monotonic()
    waited: float       # seconds


@dataclass
class Timing:
    """One rank's part of a timed request; all times are time.monotonic(), which processes share."""
    status: int
    text: str
    begin: float
    end: float
    step_begin: float       # of moving pages, on a prefill rank
    step_end: float


@dataclass(frozen=True)
class Call:
    """One call of the transfer engine: (buffer name, offset, length) of each source, raw destination addresses."""
    sources: tuple[tuple[str, int, int], ...]
    destinations: tuple[int, ...]


def stage_entries(config: RankConfig) -> tuple[int, Optional[int], list[list[int]], list[list[int]]]:
    """The stage's first layer and the one after its last, the buffers that it has of each pool, and their layer ids."""
    pools, place = config.shape.pools, config.place
    if config.layers is None:
        return 0, None, [list(range(pool.entries)) for pool in pools], [[] for _ in pools]
    count = sum(pool.layers for pool in pools)
    start, end = (stage * count // place.pp_size for stage in (place.pp_rank, place.pp_rank + 1))
    entries: list[list[int]] = []
    for pool, layers in zip(pools, config.layers):
        # All keys before all values, within the stage as within the model.
        entries.append([entry for entry in range(pool.entries) if start <= layers[entry % pool.layers] < end])
    ids = [[layers[entry % pool.layers] for entry in here] if config.layer_ids else []
           for pool, layers, here in zip(pools, config.layers, entries)]
    return start, end if place.pp_size > 1 else None, entries, ids


def import_connector(name: str) -> Any:
    if (DOUBLES / name).is_dir():
        sys.path.insert(0, str(DOUBLES / name))
    return importlib.import_module(f"sglang.srt.disaggregation.{name}.conn")


class Rank:
    """The methods that a driver calls by name; see nursery.serve."""

    def __init__(self) -> None:
        self.config: Optional[RankConfig] = None
        self.manager: Any = None
        self.components: list[list[Any]] = []
        self.aux: list[Any] = []
        self.rooms: dict[int, Any] = {}
        self.calls: list[Call] = []
        self.messages: list[tuple[str, list[bytes]]] = []
        self._steps: list[tuple[float, float]] = []

    # What a server does at start

    def serve_bootstrap(self, connector: str, port: int = 0) -> int:
        """Start SGLang's bootstrap server here (port 0: any); returns its port once it answers."""
        import requests

        module = import_connector(connector)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            port = probe.getsockname()[1]
        self.manager = getattr(module, f"{CLASS_PREFIX[connector]}KVBootstrapServer")(HOST, port)
        for _ in range(500):
            try:
                if requests.get(f"http://{HOST}:{port}/health", timeout=1).status_code == 200:
                    return port
            except requests.ConnectionError:
                pass
            time.sleep(0.01)
        raise RuntimeError("the bootstrap server does not answer")

    def setup(self, config: RankConfig) -> dict[str, Any]:
        if config.altered:
            class_name, method = config.altered
            alter(f"sglang.srt.disaggregation.{config.connector}.conn", CLASS_PREFIX[config.connector] + class_name, method)
        if config.fork_first:
            import_connector(config.connector)
            continue_in_child()
        os.environ.update(config.environment)
        self.config = config
        server_args = enter(config.place, config.bootstrap_port, config.shape.page_size, config.role_switch)
        self.module = import_connector(config.connector)
        prefix = CLASS_PREFIX[config.connector]
        manager_class = getattr(self.module, f"{prefix}KVManager")
        self.sender_class = getattr(self.module, f"{prefix}KVSender")
        self.receiver_class = getattr(self.module, f"{prefix}KVReceiver")
        if config.connector == "mooncake":
            use_private_mooncake_engine(manager_class)
        if config.record_messages:
            for name in ("KVArgsRegisterInfo", "TransferInfo"):
                self._record_messages(getattr(self.module, name))
        from sglang.srt.disaggregation.utils import DisaggregationMode
        mode = DisaggregationMode.PREFILL if config.role == PREFILL else DisaggregationMode.DECODE
        self._init_kv_manager(lambda: manager_class(self._kv_args(config), mode, server_args, False))
        if config.record_calls:
            self._record_calls()
        return {"pid": os.getpid(), "session": str(getattr(self.manager, "get_session_id", lambda: "")()),
                "port": self.manager.rank_port}

    def tear_down(self) -> None:
        """What a server does before it takes the other role."""
        from sglang.srt.disaggregation.common.conn import CommonKVReceiver

        self.manager.teardown()
        CommonKVReceiver.close_all_sockets()
        self.manager, self.components, self.aux, self.rooms = None, [], [], {}

    def _init_kv_manager(self, make: Callable[[], Any]) -> None:
        """Named as what makes the manager in a server, which has its pool at hand."""
        self.manager = make()

    def _kv_args(self, config: RankConfig) -> Any:
        import numpy as np
        from sglang.srt.disaggregation.base.conn import KVArgs, StateType

        from .oracle import Buffer

        place, shape = config.place, config.shape
        fill = UNUSED if config.role == PREFILL else CANARY
        first_layer, end_layer, entries, ids = stage_entries(config)
        for pool, pages, here in zip(shape.pools, config.pages, entries):
            first, heads = pool.heads_of(place.tp_size, place.tp_rank)
            self.components.append([Buffer(pool, entry, pages, shape.page_size, first, heads, fill,
                                           config.reserve_only) for entry in here])
        if shape.draft:
            first, heads = shape.draft.heads_of(place.tp_size, place.tp_rank)
            for entry in range(shape.draft.entries):
                buffer = Buffer(shape.draft, entry, config.pages[0], shape.page_size, first, heads, fill)
                buffer.entry += DRAFT_ENTRIES
                self.components[0].append(buffer)
        if config.hybrid_pool and config.layers is not None:
            from .pools import hybrid_pool

            layers = [list(dict.fromkeys(numbers)) for numbers in ids]
            self.token_to_kv_pool = hybrid_pool(shape.page_size, layers, self.components)
            ids = [[] for _ in shape.pools]
        self.aux = [np.full((AUX_ROWS, size), fill, dtype=np.uint8) for size in AUX_BYTES]
        full, states = self.components[0], self.components[1:]
        args = KVArgs()
        args.engine_rank = place.global_rank if config.role == PREFILL else place.tp_rank
        args.pp_rank, args.system_dp_rank, args.gpu_id = place.pp_rank, 0, 0
        args.ib_device = args.ib_traffic_class = args.rust_http_port = args.kv_layout = None
        args.kv_cache_dtype_str = config.dtype or shape.dtype
        args.page_size = shape.page_size
        args.kv_data_ptrs = [buffer.address for buffer in full]
        args.kv_data_lens = [buffer.size for buffer in full]
        args.kv_item_lens = [buffer.item_len for buffer in full]
        args.kv_layer_ids = ids[0]
        args.aux_data_ptrs = [int(rows.ctypes.data) for rows in self.aux]
        args.aux_data_lens = [int(rows.nbytes) for rows in self.aux]
        args.aux_item_lens = [int(rows.shape[1]) for rows in self.aux]
        args.state_types = [StateType(pool.kind) for pool in shape.pools[1:]]
        args.state_data_ptrs = [[buffer.address for buffer in state] for state in states]
        args.state_data_lens = [[buffer.size for buffer in state] for state in states]
        args.state_item_lens = [[buffer.item_len for buffer in state] for state in states]
        for name in ("state_layer_ids", "state_dim_per_tensor", "state_slice_outer_counts",
                     "state_conv_shard_groups"):
            setattr(args, name, [[] for _ in states])
        args.state_layer_ids = ids[1:]
        args.is_hybrid_mla_backend = False
        args.swa_kv_cache_layout = "nhd"
        args.prefill_start_layer, args.prefill_end_layer = first_layer, end_layer
        args.mla_compression_ratios = None
        args.num_draft_entries = shape.draft.entries if shape.draft else 0
        args.kv_head_num = shape.pools[0].heads_of(place.tp_size, place.tp_rank)[1]
        args.total_kv_head_num = shape.pools[0].heads
        return args

    def _record_calls(self) -> None:
        engine = self.manager.engine
        send: Callable[..., int] = engine.batch_transfer_sync
        buffers = [(f"component {number} buffer {buffer.entry}", buffer.address, buffer.size)
                   for number, component in enumerate(self.components) for buffer in component]
        buffers += [(f"metadata {number}", int(rows.ctypes.data), int(rows.nbytes))
                    for number, rows in enumerate(self.aux)]

        def name(address: int, length: int) -> tuple[str, int, int]:
            for label, start, size in buffers:
                if start <= address < start + size:
                    return label, address - start, length
            return "elsewhere", address, length

        def batch_transfer_sync(session: str, sources: Sequence[int], destinations: Sequence[int],
                                lengths: Sequence[int]) -> int:
            self.calls.append(Call(tuple(map(name, sources, lengths)), tuple(destinations)))
            return send(session, sources, destinations, lengths)

        engine.batch_transfer_sync = batch_transfer_sync

    def _record_messages(self, parser: Any) -> None:
        parse = parser.from_zmq

        def from_zmq(frames: list[bytes]) -> Any:
            self.messages.append((parser.__name__, [bytes(frame) for frame in frames]))
            return parse(frames)

        parser.from_zmq = staticmethod(from_zmq)

    # Messages between the sides

    def take_messages(self) -> list[tuple[str, list[bytes]]]:
        messages, self.messages = self.messages, []
        return messages

    def parse(self, parser: str, frames: Sequence[bytes]) -> str:
        """What this release reads in a message, or how it fails."""
        module = importlib.import_module("sglang.srt.disaggregation.mooncake.conn")
        try:
            parsed = getattr(module, parser).from_zmq(list(frames))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        fields = {name: value.tolist() if hasattr(value, "tolist") else value
                  for name, value in vars(parsed).items()}
        return repr(sorted(fields.items(), key=lambda item: item[0]))

    def send_raw(self, port: int, messages: Sequence[Sequence[bytes]]) -> None:
        """Put these messages on a prefill rank's control socket."""
        import zmq

        with zmq.Context() as context, context.socket(zmq.PUSH) as peer:
            peer.setsockopt(zmq.LINGER, 2000)
            peer.connect(f"tcp://{HOST}:{port}")
            for message in messages:
                peer.send_multipart(list(message))

    # Both roles

    def take_calls(self) -> list[Call]:
        calls, self.calls = self.calls, []
        return calls

    def addresses(self) -> dict[str, tuple[int, int]]:
        """Name -> (address, size) of everything registered, with the names that calls use."""
        found = {f"component {number} buffer {buffer.entry}": (buffer.address, buffer.size)
                 for number, component in enumerate(self.components) for buffer in component}
        found.update({f"metadata {number}": (int(rows.ctypes.data), int(rows.nbytes))
                      for number, rows in enumerate(self.aux)})
        return found

    def poll(self, room: int) -> int:
        return int(self.rooms[room].poll())

    def await_status(self, rooms: Sequence[int], least: int, timeout: float) -> dict[int, Outcome]:
        """Poll as a scheduler does until each room has this status or more, or failed; else status -1."""
        begin = time.monotonic()
        found: dict[int, Outcome] = {}
        while len(found) < len(rooms) and time.monotonic() - begin < timeout:
            for room in rooms:
                if room not in found:
                    status = int(self.rooms[room].poll())
                    if status == FAILED or status >= least:
                        now = time.monotonic()
                        found[room] = Outcome(status, self._why(room) if status == FAILED else "", now, now - begin)
            time.sleep(0.001)
        now = time.monotonic()
        for room in rooms:
            found.setdefault(room, Outcome(-1, f"still at status {self.poll(room)} after {timeout} s", now, timeout))
        return found

    def await_end(self, rooms: Sequence[int], timeout: float) -> dict[int, Outcome]:
        return self.await_status(rooms, SUCCESS, timeout)

    def _why(self, room: int) -> str:
        try:
            self.rooms[room].failure_exception()
        except Exception as error:  # the releases raise different classes
            return str(error)
        return ""

    def abort(self, room: int) -> None:
        self.rooms[room].abort()

    def clear(self, room: int) -> None:
        self.rooms.pop(room).clear()

    def give_up_in_mid_send(self, room: int) -> None:
        """The scheduler aborts and clears this room when the worker already has its next chunk in hand."""
        def late(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **named: Any) -> Any:
                sender = self.rooms.pop(room, None)
                if sender is not None:
                    sender.abort()
                    sender.clear()
                return method(*arguments, **named)
            return call

        for name in ("send_kvcache", "send_kvcache_slice"):
            if hasattr(self.manager, name):
                setattr(self.manager, name, late(getattr(self.manager, name)))

    def threads(self) -> dict[str, int]:
        """Living Python threads by the name of their function."""
        count: dict[str, int] = {}
        for thread in threading.enumerate():
            name = getattr(getattr(thread, "_target", None), "__name__", thread.name)
            count[name] = count.get(name, 0) + 1
        return count

    def preloaded(self) -> bool:
        with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
            return "libkvsplice" in maps.read()

    # Prefill

    def fill(self, room: int, items: Sequence[Sequence[int]], first_pages: Sequence[int], aux_row: int) -> None:
        """Put the request's bytes in these pages of each pool."""
        from . import oracle

        for number, component in enumerate(self.components):
            for buffer in component:
                buffer.write(room, number, items[number], first_pages[number])
        for number, rows in enumerate(self.aux):
            rows[aux_row] = oracle.aux_row(room, number, rows.shape[1])

    def open_sender(self, room: int) -> None:
        self.rooms[room] = self.sender_class(self.manager, self._bootstrap(), room,
                                             **sender_arguments(self.sender_class))

    def init_sender(self, room: int, pages: int, aux_row: int) -> None:
        self.rooms[room].init(pages, aux_row)

    def send(self, room: int, items: Sequence[int], states: Optional[Sequence[Optional[Sequence[int]]]]) -> float:
        """One chunk; states: per state component, with the last chunk. Returns the time."""
        import numpy as np

        lists = None if states is None else [None if one is None else np.array(one, dtype=np.int32)
                                             for one in states]
        begin = time.monotonic()
        self.rooms[room].send(np.array(items, dtype=np.int32), lists)
        return begin

    def override(self, name: str, value: Any) -> None:
        """Change what the manager believes of itself."""
        setattr(self.manager, name, value)

    def forget_page_size(self) -> None:
        """Take the prefill's page size as unknown, as SGLang does when an older prefill does not say."""
        common = importlib.import_module("sglang.srt.disaggregation.common.conn")
        original = common.PrefillServerInfo

        def info(**fields: Any) -> Any:
            return original(**{**fields, "page_size": None})

        setattr(common, "PrefillServerInfo", info)

    def failed_sessions(self) -> list[str]:
        return sorted(getattr(self.manager, "failed_sessions", ()))    # mooncake's list of dead decodes

    def connector(self) -> str:
        assert self.config is not None
        return self.config.connector

    def _bootstrap(self) -> str:
        assert self.config is not None
        return f"{self.config.bootstrap_host}:{self.config.bootstrap_port}"

    def whole_prefill(self, room: int, chunks: Sequence[Sequence[int]], states: Sequence[Sequence[int]],
                      aux_row: int, timeout: float) -> Timing:
        """A sender's whole life: wait for the decode's pages, send them, wait for the end."""
        begin = time.monotonic()
        self.open_sender(room)
        ready = self.await_status([room], WAITING, timeout)[room]
        if ready.status != WAITING:
            return Timing(ready.status, ready.text, begin, time.monotonic(), 0.0, 0.0)
        self.init_sender(room, sum(map(len, chunks)), aux_row)
        self._steps = []
        sent = time.monotonic()
        for number, items in enumerate(chunks):
            self.send(room, items, states if number == len(chunks) - 1 else None)
        end = self.await_end([room], timeout)[room]
        if end.status == SUCCESS:
            self.clear(room)
        step = (min(start for start, _ in self._steps), max(stop for _, stop in self._steps)) if self._steps else (
            sent, end.ended)
        return Timing(end.status, end.text, begin, end.ended, *step)

    def time_steps(self) -> None:
        """Note when the manager's own moving of pages begins and ends, where its calls wait for that."""
        for name in ("send_kvcache", "send_kvcache_slice", "maybe_send_extra"):
            setattr(self.manager, name, self._timed(getattr(self.manager, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.monotonic()
            try:
                return method(*arguments, **named)
            finally:
                self._steps.append((start, time.monotonic()))
        return timed

    # Decode

    def whole_decode(self, room: int, items: Sequence[int], states: Sequence[Sequence[int]], aux_row: int,
                     timeout: float) -> Timing:
        """A receiver's whole life, from asking for the pages to having them."""
        self.open_receiver(room)
        begin = time.monotonic()
        self.send_metadata(room, items, aux_row, states)
        end = self.await_end([room], timeout)[room]
        if end.status == SUCCESS:
            self.clear(room)
        return Timing(end.status, end.text, begin, end.ended, 0.0, 0.0)

    def find_prefill(self) -> bool:
        """What a decode does before its first request: ask the bootstrap server for the prefill's topology."""
        for _ in range(200):
            if self.manager.try_ensure_parallel_info(self._bootstrap()):
                return True
            time.sleep(0.02)
        return False

    def knows_prefill(self) -> bool:
        """Until its heartbeat has found that prefill dead, a decode goes on with what it was told of it."""
        return self._bootstrap() in self.manager.prefill_info_table

    def may_release(self, room: int, acknowledgements: int) -> bool:
        """Has every prefill rank said that it writes no more for this aborted room (SGLang's deferred release)?"""
        return bool(self.manager.is_abort_release_safe(room, acknowledgements))

    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def open_receiver(self, room: int, prefill_dp_rank: int = 0) -> None:
        receiver = self.receiver_class(self.manager, self._bootstrap(), room)
        self.rooms[room] = receiver
        receiver.init(prefill_dp_rank)

    def send_metadata(self, room: int, items: Sequence[int], aux_row: int,
                      states: Sequence[Optional[Sequence[int]]]) -> None:
        import numpy as np

        lists = [None if one is None else np.array(one, dtype=np.int32) for one in states]
        self.rooms[room].send_metadata(np.array(items, dtype=np.int32), aux_index=aux_row, state_indices=lists)

    def check(self, holds: Sequence[tuple[int, Sequence[Sequence[int]], Sequence[int], int]]) -> list[str]:
        """holds: (room, items per pool, first page per pool, metadata row). Everything else must be the canary."""
        from . import oracle

        problems = []
        for number, component in enumerate(self.components):
            here = [(room, items[number], first[number]) for room, items, first, _ in holds]
            for buffer in component:
                problems += buffer.differences(number, here)
        for number, rows in enumerate(self.aux):
            aux_fill = UNUSED if self.config and self.config.role == PREFILL else CANARY
            problem = oracle.check_aux(rows, number, [(room, row) for room, _, _, row in holds], aux_fill)
            if problem:
                problems.append(problem)
        return problems

    def scribble(self, component: int, items: Sequence[int], value: int) -> None:
        """Another request's bytes in these pages."""
        for buffer in self.components[component]:
            buffer.data[list(items)] = value

    def scribble_aux(self, row: int) -> None:
        for rows in self.aux:
            rows[row] = CANARY

    def scribbled(self, component: int, items: Sequence[int], value: int) -> bool:
        return all(bool((buffer.data[list(items)] == value).all()) for buffer in self.components[component])


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, 9)   # PR_SET_PDEATHSIG, SIGKILL


def continue_in_child() -> None:
    """Go on in a forked child; this process waits for its end, and the child does not outlive it."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os._exit(0)
    die_with_parent()
