# SPDX-License-Identifier: Apache-2.0
"""A throw-away virtual machine: Debian's kernel with software RDMA devices, on the host's own file system.

The host's root is shared read-only with a memory overlay on top, this repository read-write. The kernel is unpacked
into .cache/vm/, never installed. With /dev/kvm the machine runs on it, else under emulation, about ten times slower.
"""
from __future__ import annotations

import gzip
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence

ROOT = Path(__file__).resolve().parent.parent.parent
CACHE = ROOT / ".cache" / "vm"
HERE = Path(__file__).resolve().parent
PACKAGES = ("qemu-system-x86", "busybox-static", "cpio", "kmod", "rdma-core", "iproute2", "ibverbs-utils", "perftest",
            "ibverbs-providers", "libibverbs-dev")
MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay", "crc32_generic", "rdma_rxe", "rdma_ucm", "ib_uverbs", "dummy",
           "veth", "sch_netem")
KVM_BOOT_S = 20


class CannotBoot(Exception):
    """This host has no way to run the machine; the text says why."""


class Result(NamedTuple):
    status: int  # of the command; 124: not finished in time
    seconds: float
    accelerated: bool


def missing_packages() -> List[str]:
    query = subprocess.run(["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *PACKAGES],
                           capture_output=True, text=True, check=False)
    there = {line.split()[0] for line in query.stdout.splitlines() if line.endswith(" installed")}
    return [name for name in PACKAGES if name not in there]


def install_packages() -> None:
    if not shutil.which("dpkg-query"):
        raise CannotBoot("not a Debian system")
    missing = missing_packages()
    if not missing:
        return
    print(f"vm: Debian packages: {' '.join(missing)}", flush=True)
    prefix = [] if os.geteuid() == 0 else ["sudo", "-n"]
    command = [*prefix, "apt-get", "-o", "DPkg::Lock::Timeout=300", "install", "-y", "--no-install-recommends", *missing]
    done = subprocess.run(command, capture_output=True, text=True, check=False,
                          env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})
    if done.returncode != 0:
        raise CannotBoot(f"packages could not be installed: {' '.join(missing)}: {done.stderr.strip()[-300:]}")


class Kernel(NamedTuple):
    image: Path
    tree: Path
    release: str


def find_kernel() -> Optional[Kernel]:
    tree = CACHE / "kernel"
    for image in sorted((tree / "boot").glob("vmlinuz-*")):
        release = image.name[len("vmlinuz-"):]
        if (tree / "lib" / "modules" / release / "modules.dep").exists():
            return Kernel(image, tree, release)
    return None


def get_kernel() -> Kernel:
    kernel = find_kernel()
    if kernel:
        return kernel
    depends = subprocess.run(["apt-cache", "depends", "linux-image-amd64"], capture_output=True, text=True, check=False)
    names = [line.split()[-1] for line in depends.stdout.splitlines() if "Depends: linux-image" in line]
    if not names:
        raise CannotBoot("the package lists know no kernel (apt-get update)")
    print(f"vm: kernel {names[0]}", flush=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        subprocess.run(["apt-get", "download", "-q", names[0]], cwd=folder, capture_output=True, check=False)
        packages = list(Path(folder).glob("*.deb"))
        if not packages:
            raise CannotBoot(f"the package {names[0]} could not be downloaded")
        tree = Path(folder) / "kernel"
        subprocess.run(["dpkg-deb", "-x", str(packages[0]), str(tree)], check=True)
        release = next((tree / "lib" / "modules").iterdir()).name
        subprocess.run(["depmod", "-b", str(tree), release], check=True)
        shutil.rmtree(CACHE / "kernel", ignore_errors=True)
        tree.rename(CACHE / "kernel")
    kernel = find_kernel()
    if not kernel:
        raise CannotBoot(f"the package {names[0]} holds no kernel")
    return kernel


def module_files(kernel: Kernel) -> List[Path]:
    """The modules and what they need, in load order."""
    found: Dict[str, None] = {}
    for module in MODULES:
        shown = subprocess.run(["modprobe", "-d", str(kernel.tree), "-S", kernel.release, "--show-depends", module],
                               capture_output=True, text=True, check=False)
        for line in shown.stdout.splitlines():
            words = line.split()
            if words and words[0] == "insmod":
                found[words[1]] = None
    return [Path(name) for name in found]


def build_initramfs(kernel: Kernel, archive: Path, folder: Path) -> None:
    root = folder / "root"
    for name in ("bin", "dev", "proc", "sys", "modules", "host", "ram", "new"):
        (root / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    if not busybox:
        raise CannotBoot("no busybox")
    shutil.copy(busybox, root / "bin" / "busybox")
    for number, module in enumerate(module_files(kernel)):
        shutil.copy(module, root / "modules" / f"{number:03}-{module.name}")
    shutil.copy(HERE / "guest-init", root / "init")
    (root / "init").chmod(0o755)
    (root / "repository").write_text(f"{ROOT}\n")
    names = "\n".join(str(path.relative_to(root)) for path in [root, *sorted(root.rglob("*"))])
    packed = subprocess.run(["cpio", "-o", "-H", "newc", "--quiet"], cwd=root, input=names.encode(), capture_output=True,
                            check=True)
    archive.write_bytes(gzip.compress(packed.stdout, 1))


def kvm_refused() -> Path:
    """Exists once KVM has failed here since the host's own start: some hosts have the device and cannot run anything."""
    return CACHE / f"no-kvm-{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


def kvm_works() -> bool:
    return os.access("/dev/kvm", os.R_OK | os.W_OK) and not kvm_refused().exists()


def share(path: Path, tag: str, readonly: bool = False) -> List[str]:
    options = f"local,path={path},mount_tag={tag},security_model=none,multidevs=remap"
    return ["-virtfs", options + (",readonly=on" if readonly else "")]


def qemu_command(kernel: Kernel, archive: Path, job: Path, memory_mb: int, cpus: int, kvm: bool) -> List[str]:
    accelerator = ["-accel", "kvm", "-cpu", "host,arch-capabilities=off"] if kvm else ["-accel", "tcg,thread=multi", "-cpu", "max"]
    return ["qemu-system-x86_64", *accelerator, "-smp", str(cpus), "-m", str(memory_mb), "-display", "none", "-monitor",
            "none", "-serial", "stdio", "-no-reboot", "-net", "none", "-kernel", str(kernel.image), "-initrd",
            str(archive), "-append", "console=ttyS0 quiet panic=-1 loglevel=3", *share(Path("/"), "hostroot", True),
            *share(ROOT, "worktree"), *share(job, "job")]


def boot(command: Sequence[str], memory_mb: int, cpus: int, limit_s: float, kvm: bool, line: Callable[[str], None]) -> Result:
    """Run a command in the machine; line gets its output."""
    install_packages()
    kernel = get_kernel()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        archive, job = folder / "initramfs", folder / "job"
        job.mkdir()
        build_initramfs(kernel, archive, folder)
        quoted = " ".join(shlex.quote(word) for word in command)
        (job / "run").write_text(f"cd {shlex.quote(str(ROOT))}\n{quoted}\n")
        qemu = qemu_command(kernel, archive, job, memory_mb, cpus, kvm)
        # timeout(1), so that a machine that hangs without a word ends too.
        with subprocess.Popen(["timeout", "-k", "5", f"{limit_s:.0f}", *qemu], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, errors="replace") as process:
            assert process.stdout is not None

            def end_unless_booted() -> None:
                if not (job / "booted").exists():
                    process.terminate()

            watchdog = threading.Timer(KVM_BOOT_S, end_unless_booted)
            watchdog.daemon = True
            if kvm:
                watchdog.start()
            for text in process.stdout:
                line(text.replace("\r", "").rstrip("\n"))
            process.wait()
            watchdog.cancel()
        seconds = time.monotonic() - started
        status = job / "status"
        if not (job / "booted").exists():
            raise CannotBoot(f"the machine did not boot ({'kvm' if kvm else 'emulation'}, qemu's status {process.returncode})")
        if not status.exists() or not status.read_text().strip():
            return Result(124, seconds, kvm)
        return Result(int(status.read_text()), seconds, kvm)


def run(command: Sequence[str], memory_mb: int = 4096, cpus: int = 2, limit_s: float = 600,
        line: Callable[[str], None] = lambda text: print(text, flush=True)) -> Result:
    """As boot, on KVM where that works, else under emulation."""
    if kvm_works():
        try:
            return boot(command, memory_mb, cpus, limit_s, True, line)
        except CannotBoot as error:
            kvm_refused().touch()
            print(f"vm: {error}; trying emulation", file=sys.stderr, flush=True)
    return boot(command, memory_mb, cpus, limit_s, False, line)
