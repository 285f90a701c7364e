# SPDX-License-Identifier: Apache-2.0
"""The driver's side of processes: nurseries, and the ranks that they fork."""
from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

ROOT = Path(__file__).resolve().parents[3]
TESTS = ROOT / "tests" / "sglang"
CALL_TIMEOUT = 60.0
MOONCAKE_CHATTER = re.compile(r"[IWE]\d{4} |WARNING: Logging before")

# One thread each: a rank is one of many processes, and threads that exist before a fork are lost in it.
BASE_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
    "MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp", "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "60",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "300", "TOKENIZERS_PARALLELISM": "false",
    # UCX's threads look for work all the time; by itself SGLang asks for 8 of them for each prefill rank.
    "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS": '{"num_threads": "1"}',
}
LIBRARY_ENVIRONMENT = {"KVSPLICE_CPU_HEADS": "replicated", "KVSPLICE_LOG": "info"}


@dataclass(frozen=True)
class Host:
    """Where a side's processes run: their address, and the network namespace that has it ("": this one)."""
    address: str = "127.0.0.1"
    namespace: str = ""


LOOPBACK = Host()


class RankError(Exception):
    """A method raised in a rank, or the rank is gone."""


class RankProxy:
    """One forked rank; a call is sent with start() and answered with result()."""

    def __init__(self, name: str, connection: Connection, pid: int, log: Path) -> None:
        self.name, self.pid, self.log_path, self._connection = name, pid, log, connection

    def start(self, method: str, **arguments: Any) -> None:
        try:
            self._connection.send((method, arguments))
        except (BrokenPipeError, ConnectionError) as error:
            raise RankError(f"{self.name} is gone: {error}") from error

    def result(self, timeout: float = CALL_TIMEOUT) -> Any:
        try:
            if not self._connection.poll(timeout):
                raise RankError(f"{self.name} does not answer for {timeout:.0f} s:\n{self.log_tail()}")
            fine, value = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise RankError(f"{self.name} is gone:\n{self.log_tail()}") from error
        if not fine:
            raise RankError(f"in {self.name}: {value}")
        return value

    def call(self, method: str, **arguments: Any) -> Any:
        self.start(method, **arguments)
        return self.result()

    def log(self) -> str:
        try:
            return self.log_path.read_text(errors="replace")
        except OSError:
            return ""

    def log_tail(self, lines: int = 15) -> str:
        """The end of the log without what Mooncake says about its start."""
        return "\n".join([line for line in self.log().splitlines() if not MOONCAKE_CHATTER.match(line)][-lines:])

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self._connection.close()
        self.kill()


def gather(calls: Sequence[tuple[RankProxy, str, Mapping[str, Any]]], timeout: float = CALL_TIMEOUT) -> list[Any]:
    """Calls in many ranks at once, answers in order."""
    for rank, method, arguments in calls:
        rank.start(method, **arguments)
    return [rank.result(timeout) for rank, _, _ in calls]


class Nursery:
    """One imported release, preloaded or not."""

    def __init__(self, release: str, library: Optional[Path], scratch: Path, host: Host) -> None:
        self.release, self.library = release, library
        self.folder = Path(tempfile.mkdtemp(prefix=f"{release}-{'with' if library else 'bare'}-", dir=scratch))
        self._numbers = itertools.count()
        address = str(self.folder / "socket")
        self._listener = Listener(address, family="AF_UNIX", backlog=64)
        environment = {key: value for key, value in os.environ.items()
                       if not key.startswith(("KVSPLICE_", "SGLANG_", "LD_PRELOAD"))}
        environment.update(BASE_ENVIRONMENT, SGLANG_HOST_IP=host.address)
        path = self._ask("--print-path", release)
        environment["PYTHONPATH"] = os.pathsep.join([path, str(TESTS)])
        if library:
            environment["LD_PRELOAD"] = str(library)
            environment.update(LIBRARY_ENVIRONMENT)
        self._log = (self.folder / "nursery.log").open("w")
        inside = ["ip", "netns", "exec", host.namespace] if host.namespace else []
        self._process = subprocess.Popen(
            [*inside, self._ask("--print-python"), "-m", "harness.nursery", address], cwd=TESTS, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, bufsize=1)
        self._is_ready = False

    @staticmethod
    def _ask(*arguments: str) -> str:
        return subprocess.run([str(ROOT / "scripts" / "environment"), *arguments], check=True, stdout=subprocess.PIPE,
                              text=True).stdout.strip()

    def wait(self) -> None:
        if self._is_ready:
            return
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            raise RankError(f"SGLang {self.release} cannot be imported:\n"
                            + (self.folder / "nursery.log").read_text()[-3000:])
        self._is_ready = True

    def rank(self, name: str) -> RankProxy:
        self.wait()
        log = self.folder / f"{next(self._numbers):04d}-{name}.log"
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name} {log}\n")
        connection = self._listener.accept()
        answered, pid = connection.recv()
        if answered != name:
            raise RankError(f"{answered} came where {name} was expected")
        return RankProxy(name, connection, pid, log)

    def close(self) -> None:
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._listener.close()
        self._log.close()


class Nurseries:
    """The nurseries of a run, started when first wanted (or ahead of that with prepare)."""

    def __init__(self, library: Optional[Path]) -> None:
        self.library = library
        self.scratch = Path(tempfile.mkdtemp(prefix="kvsplice-sglang-"))
        self._all: dict[tuple[str, Optional[Path], Host], Nursery] = {}

    def prepare(self, release: str, preloaded: bool, host: Host = LOOPBACK, library: Optional[Path] = None) -> Nursery:
        """library: instead of the usual one."""
        library = library or self.library
        if preloaded and library is None:
            raise RankError("there is no library to preload")
        key = (release, library if preloaded else None, host)
        if key not in self._all:
            self._all[key] = Nursery(*key[:2], self.scratch, host)
        return self._all[key]

    def close(self, keep: bool = False) -> None:
        for nursery in self._all.values():
            nursery.close()
        self._all.clear()
        if not keep:
            shutil.rmtree(self.scratch, ignore_errors=True)
