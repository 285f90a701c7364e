# SPDX-License-Identifier: Apache-2.0
"""Start unmodified SGLang servers on CPUs, wait until they answer, and stop whatever was started."""
from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Iterator, Mapping, Optional, Sequence

from .environment import CACHE, environment
from .models import Model
from .ports import free_port
from .request import LOCAL

READY = "The server is fired up and ready"
# SGLang ends within a tenth of a second of SIGTERM or after five seconds of waiting for a GPU to settle.
ORDERLY_SECONDS = 1.0


class ServerFailed(Exception):
    """A server ended by itself or was not ready in time."""


@dataclass(frozen=True)
class Spec:
    """What to start. The role is single, prefill or decode."""
    role: str
    release: str
    model: Model
    tp: int = 1
    page_size: int = 1
    library: Optional[Path] = None
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    pp: int = 1


def _cores(first: int, count: int) -> str:
    """One core a rank, going round: without this SGLang wants as many NUMA nodes as ranks."""
    usable = sorted(os.sched_getaffinity(0))
    return "|".join(str(usable[(first + rank) % len(usable)]) for rank in range(count))


def _other_models(spec: Spec) -> str:
    """Each rank imports every model that SGLang knows, which takes two seconds: leave out the others."""
    folder = CACHE / "sglang" / spec.release / "sglang" / "srt" / "models"
    return ",".join(sorted(path.stem for path in folder.glob("*.py") if path.stem not in spec.model.modules))


def _variables(spec: Spec, path: str, scratch: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items()
                 if name not in ("LD_PRELOAD", "PYTHONDONTWRITEBYTECODE")}
    variables = {
        **inherited,
        "PYTHONPATH": path,
        "TMPDIR": str(scratch),
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Compiling with a C++ compiler takes longer than all that these tiny models ever compute.
        "TORCHDYNAMO_DISABLE": "1",
        "SGLANG_DISABLED_MODEL_ARCHS": _other_models(spec),
        # A decode starts at the second core, so that two small servers do not share the first.
        "SGLANG_CPU_OMP_THREADS_BIND": _cores(1 if spec.role == "decode" else 0, spec.tp * spec.pp),
        # Sending a cached prefix early waits for a CUDA event.
        "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",
        "MC_FORCE_TCP": "1",
        "MOONCAKE_PROTOCOL": "tcp",
        "MC_TCP_BIND_ADDRESS": LOCAL,
        "SGLANG_HOST_IP": LOCAL,
        "GLOO_SOCKET_IFNAME": "lo",
        # A NCCL that loads is handed CPU devices and raises; one that does not load is done without.
        "SGLANG_NCCL_SO_PATH": str(scratch / "no-nccl.so"),
        **spec.environment,
    }
    if spec.library is not None:
        variables["LD_PRELOAD"] = str(spec.library)
    return variables


def _has_backup_option(release: str) -> bool:
    return tuple(int(part) for part in release.split(".")[:3]) >= (0, 5, 17)


def _arguments(spec: Spec, port: int, bootstrap_port: int) -> list[str]:
    arguments = [
        "--model-path", str(spec.model.folder), "--device", "cpu", "--dtype", "float32", "--host", LOCAL,
        "--port", str(port), "--tp", str(spec.tp), "--pp-size", str(spec.pp), "--page-size", str(spec.page_size), "--max-total-tokens", "8192",
        "--max-running-requests", "32", "--random-seed", "1", "--skip-server-warmup",
        # Idle ranks otherwise poll without pause, which keeps the other servers from starting on a small machine.
        "--sleep-on-idle",
        *spec.model.arguments,
    ]
    if spec.role != "single":
        arguments += ["--disaggregation-mode", spec.role, "--disaggregation-transfer-backend", "mooncake",
                      "--disaggregation-bootstrap-port", str(bootstrap_port)]
    if spec.role == "decode" and _has_backup_option(spec.release):
        # The default backs retracted requests up in memory pinned with the CUDA runtime.
        arguments += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
    return [*arguments, *spec.arguments]


class Server:
    """One server with its ranks, in a process group of its own."""

    def __init__(self, spec: Spec, log: Path, bootstrap_port: int = 0) -> None:
        self.spec, self.log, self.port = spec, log, free_port()
        self.bootstrap_port = bootstrap_port
        self._scratch = Path(tempfile.mkdtemp(prefix="kvs-"))    # short: it holds the servers' unix sockets
        python, path = environment(spec.release)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [python, "-m", "sglang.launch_server", *_arguments(spec, self.port, bootstrap_port)],
                env=_variables(spec, path, self._scratch), cwd=str(self._scratch), stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True)

    def name(self) -> str:
        return f"{self.spec.role} TP {self.spec.tp} of SGLang {self.spec.release}"

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def ready(self) -> bool:
        if READY in self.text():
            return True
        if self._process.poll() is not None:
            raise ServerFailed(f"{self.name()} ended with status {self._process.returncode}; {self.tail()}")
        return False

    def tail(self, lines: int = 25) -> str:
        return f"the end of {self.log}:\n" + "\n".join(line[:300] for line in self.text().splitlines()[-lines:])

    def _group_lives(self) -> bool:
        self._process.poll()    # a zombie still counts as a member of its group
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def ask_to_stop(self) -> None:
        self._signal(signal.SIGTERM)

    def stop(self, seconds: float = ORDERLY_SECONDS) -> None:
        """Stop every process of the group: with SIGTERM, and what is left after some seconds with SIGKILL."""
        self.ask_to_stop()
        end = time.monotonic() + seconds
        while self._group_lives() and time.monotonic() < end:
            time.sleep(0.05)
        self._signal(signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)


def wait_until_ready(servers: Sequence[Server], seconds: float,
                     progress: Callable[[str], None] = lambda text: None) -> None:
    start, said = time.monotonic(), 0.0
    waiting = list(servers)
    while True:
        waiting = [server for server in waiting if not server.ready()]
        passed = time.monotonic() - start
        if not waiting:
            return
        names = ", ".join(server.name() for server in waiting)
        if passed > seconds:
            raise ServerFailed(f"not ready after {seconds:.0f} s: {names}; {waiting[0].tail()}")
        if passed - said >= 10:
            said = passed
            progress(f"{passed:.0f} s, waits for {names}")
        time.sleep(0.1)


@contextlib.contextmanager
def running(specs: Sequence[Spec], logs: Path, seconds: float = 300.0,
            progress: Callable[[str], None] = lambda text: None) -> Iterator[list[Server]]:
    """Servers that are ready; all of them are stopped at the end, however it comes."""
    servers: list[Server] = []
    bootstrap_port = free_port()
    try:
        for spec in specs:
            servers.append(Server(spec, logs / f"{spec.role}.log", bootstrap_port))
        wait_until_ready(servers, seconds, progress)
        yield servers
    finally:
        for server in servers:
            server.ask_to_stop()
        for server in servers:
            server.stop()
