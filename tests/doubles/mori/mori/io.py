# SPDX-License-Identifier: Apache-2.0
"""The part of mori.io that SGLang uses."""
from __future__ import annotations

import ctypes
import enum
import itertools
import pickle
import queue
import socket
import struct
import threading
import time
from typing import Any, List, NamedTuple, Sequence

from .cpp import TransferStatus


class BackendType(enum.Enum):
    RDMA = 1


class MemoryLocationType(enum.Enum):
    CPU = 0
    GPU = 1


class PollCqMode(enum.Enum):
    POLLING = 0


class StatusCode(enum.Enum):
    SUCCESS = 0
    IN_PROGRESS = 2
    ERR_RDMA_OP = 3


class IOEngineConfig:
    def __init__(self, host: str, port: int = 0) -> None:
        self.host, self.port = host, port


class RdmaBackendConfig:
    def __init__(self, qp_per_transfer: int, post_batch_size: int, num_worker_threads: int, poll_cq_mode: PollCqMode,
                 enable_notification: bool) -> None:
        self.arguments = (qp_per_transfer, post_batch_size, num_worker_threads, poll_cq_mode, enable_notification)


class EngineDesc(NamedTuple):
    key: str
    host: str
    port: int

    def pack(self) -> bytes:
        return pickle.dumps(tuple(self))

    @classmethod
    def unpack(cls, blob: bytes) -> "EngineDesc":
        return cls(*pickle.loads(blob))


class MemoryDesc(NamedTuple):
    engine_key: str
    id: int
    size: int

    def pack(self) -> bytes:
        return pickle.dumps(tuple(self))

    @classmethod
    def unpack(cls, blob: bytes) -> "MemoryDesc":
        return cls(*pickle.loads(blob))


HEADER = struct.Struct("<QQ")   # bytes of the description, bytes of the data


def _receive(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        count = connection.recv_into(view[got:])
        if count == 0:
            raise ConnectionError("the peer is gone")
        got += count
    return data


class _Write(NamedTuple):
    local: MemoryDesc
    local_offsets: Sequence[int]
    remote: MemoryDesc
    remote_offsets: Sequence[int]
    sizes: Sequence[int]
    status: TransferStatus


class IOEngine:
    def __init__(self, key: str, config: IOEngineConfig) -> None:
        self._listener = socket.create_server((config.host, config.port), backlog=64)
        self._desc = EngineDesc(key, config.host, self._listener.getsockname()[1])
        self._uids, self._ids = itertools.count(1), itertools.count(1)
        self._memory: dict[int, int] = {}           # id -> address
        self._sizes: dict[int, int] = {}
        self._remote: dict[str, EngineDesc] = {}
        self._connections: dict[str, socket.socket] = {}
        self._writes: "queue.Queue[_Write]" = queue.Queue()
        for target in (self._accept, self._send):
            threading.Thread(target=target, daemon=True).start()

    # What SGLang calls

    def get_engine_desc(self) -> EngineDesc:
        return self._desc

    def create_backend(self, backend: BackendType, config: RdmaBackendConfig) -> None:
        pass

    def register_memory(self, address: int, size: int, device: int, location: MemoryLocationType) -> MemoryDesc:
        if size <= 0:
            raise RuntimeError("a region of no bytes cannot be registered")
        desc = MemoryDesc(self._desc.key, next(self._ids), size)
        self._memory[desc.id], self._sizes[desc.id] = address, size
        return desc

    def deregister_memory(self, desc: MemoryDesc) -> None:
        del self._memory[desc.id], self._sizes[desc.id]

    def register_remote_engine(self, desc: EngineDesc) -> None:
        self._remote[desc.key] = desc

    def allocate_transfer_uid(self) -> int:
        return next(self._uids)

    def batch_write(self, local: Sequence[MemoryDesc], local_offsets: Sequence[Sequence[int]],
                    remote: Sequence[MemoryDesc], remote_offsets: Sequence[Sequence[int]],
                    sizes: Sequence[Sequence[int]], uids: Sequence[int]) -> List[TransferStatus]:
        if not len(local) == len(local_offsets) == len(remote) == len(remote_offsets) == len(sizes) == len(uids):
            raise ValueError("lists of different length")
        statuses = []
        for source, source_at, target, target_at, lengths in zip(local, local_offsets, remote, remote_offsets, sizes):
            if not len(source_at) == len(target_at) == len(lengths):
                raise ValueError("offsets and sizes of different length")
            status = TransferStatus()
            self._writes.put(_Write(source, source_at, target, target_at, lengths, status))
            statuses.append(status)
        return statuses

    def wait_all(self, statuses: Sequence[TransferStatus], timeout_ms: int = -1) -> StatusCode:
        end = time.monotonic() + timeout_ms / 1000 if timeout_ms >= 0 else None
        for status in statuses:
            if not status._done.wait(None if end is None else max(0.0, end - time.monotonic())):
                return StatusCode.IN_PROGRESS
        return StatusCode.ERR_RDMA_OP if any(status.Failed() for status in statuses) else StatusCode.SUCCESS

    # Its threads

    def _send(self) -> None:
        while True:
            write = self._writes.get()
            try:
                self._send_one(write)
                write.status._conclude()
            except Exception as error:
                self._connections.pop(write.remote.engine_key, None)
                write.status._conclude(f"{type(error).__name__}: {error}")

    def _send_one(self, write: _Write) -> None:
        address, size = self._memory[write.local.id], self._sizes[write.local.id]
        for offset, length in zip(write.local_offsets, write.sizes):
            if offset < 0 or length < 0 or offset + length > size:
                raise ValueError(f"source {offset}+{length} is outside {size} registered bytes")
        data = b"".join(ctypes.string_at(address + offset, length)
                        for offset, length in zip(write.local_offsets, write.sizes))
        text = pickle.dumps((write.remote.id, list(write.remote_offsets), list(write.sizes)))
        key = write.remote.engine_key
        if key not in self._connections:
            self._connections[key] = socket.create_connection(self._remote[key][1:])
        connection = self._connections[key]
        connection.sendall(HEADER.pack(len(text), len(data)) + text)
        connection.sendall(data)
        answer_size, _ = HEADER.unpack(bytes(_receive(connection, HEADER.size)))
        error = bytes(_receive(connection, answer_size)).decode()
        if error:
            raise RuntimeError(error)

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            while True:
                try:
                    text_size, data_size = HEADER.unpack(bytes(_receive(connection, HEADER.size)))
                    ident, offsets, sizes = pickle.loads(bytes(_receive(connection, text_size)))
                    data = _receive(connection, data_size)
                    error = self._store(ident, offsets, sizes, data).encode()
                    connection.sendall(HEADER.pack(len(error), 0) + error)
                except (ConnectionError, OSError):
                    return

    def _store(self, ident: int, offsets: Sequence[int], sizes: Sequence[int], data: bytearray) -> str:
        address, size = self._memory.get(ident), self._sizes.get(ident, 0)
        if address is None:
            return f"memory {ident} is not registered here"
        for offset, length in zip(offsets, sizes):
            if offset < 0 or length < 0 or offset + length > size:
                return f"destination {offset}+{length} is outside {size} registered bytes"
        source: Any = (ctypes.c_char * max(1, len(data))).from_buffer(data) if data else None
        at = 0
        for offset, length in zip(offsets, sizes):
            ctypes.memmove(address + offset, ctypes.addressof(source) + at, length)
            at += length
        return ""
