# SPDX-License-Identifier: Apache-2.0
"""Every Python of the machine: exit status, output and error text unchanged, at each of its memory settings."""
from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
from typing import Dict, List, Tuple

from .check import Context, Waived, check, equal, measures, program, true
from .fixture import HOOKED, lay, python

HOOKABLE = (3, 9)
SETTINGS: List[Tuple[str, List[str], Dict[str, str]]] = [
    ("plain", [], {}),
    ("-X dev", ["-X", "dev"], {}),
    ("PYTHONDEVMODE", [], {"PYTHONDEVMODE": "1"}),
    ("PYTHONMALLOC=debug", [], {"PYTHONMALLOC": "debug"}),
    ("PYTHONMALLOC=malloc", [], {"PYTHONMALLOC": "malloc"}),
    ("PYTHONMALLOC=malloc_debug", [], {"PYTHONMALLOC": "malloc_debug"}),
    ("PYTHONTRACEMALLOC=5", [], {"PYTHONTRACEMALLOC": "5"}),
    ("-X dev, PYTHONTRACEMALLOC=5", ["-X", "dev"], {"PYTHONTRACEMALLOC": "5"}),
]
SCRIPT = """
import json, logging, sys, threading
worker = threading.Thread(target=lambda: print(json.dumps({"a": 1})))
worker.start()
worker.join()
sys.exit(3)
"""
USE = """
import kvs_fixture.conn as conn
print(conn.Manager().send(1, 2, executor=3), conn.Info.from_wire(b"x"), conn.Receiver().poll())
raise SystemExit(3)
"""


def interpreters() -> List[str]:
    """Paths of the different Python 3 programs of this machine."""
    names = [glob.glob(f"{folder}/python3*") for folder in os.get_exec_path()]
    names += [glob.glob("/usr/bin/python3*"), glob.glob(f"{os.path.expanduser('~')}/.pyenv/versions/*/bin/python3*"), glob.glob("/opt/*/bin/python3*")]
    found: Dict[str, str] = {}
    for path in (path for paths in names for path in paths):
        with open(path, "rb") as file:
            elf = file.read(4) == b"\x7fELF"
        if elf and re.fullmatch(r"python3(\.\d+)?", os.path.basename(path)):
            found.setdefault(os.path.realpath(path), path)
    return sorted(found.values())


def version(interpreter: str) -> Tuple[int, ...]:
    text = subprocess.run([interpreter, "-c", "import sys; print(*sys.version_info[:3])"], stdout=subprocess.PIPE, check=True).stdout
    return tuple(int(word) for word in text.split())


def every_python(check_one, least: Tuple[int, int] = (3, 0)) -> None:  # type: ignore[no-untyped-def]
    """Register one check per interpreter, of this version or later."""
    for interpreter in (path for path in interpreters() if version(path) >= least):
        def one(context: Context, interpreter: str = interpreter) -> None:
            check_one(context, interpreter)
        one.__module__ = check_one.__module__
        one.__doc__ = f"{interpreter}: {check_one.__doc__}"
        check(one)


def every_hookable_python(check_one) -> None:  # type: ignore[no-untyped-def]
    """Register one check per interpreter that the hook knows."""
    every_python(check_one, HOOKABLE)


@every_python
def settings(context: Context, interpreter: str) -> None:
    """exit status, output and errors at every memory setting"""
    script = context.write("plain.py", SCRIPT)
    for name, options, variables in SETTINGS:
        for library in (context.library, context.fixture):
            result = context.same([interpreter, *options, script], library=library, **variables)
            equal(3, result.status, name)


@every_python
def hooked(context: Context, interpreter: str) -> None:
    """hooked at every memory setting from 3.9, left alone before"""
    lay(context)
    for name, options, variables in SETTINGS:
        result = python(context, USE, interpreter, options=options, KVSPLICE_LOG="info", **variables)
        equal(3, result.status, f"{name}: {result.show()}")
        if version(interpreter) >= HOOKABLE:
            equal("('spliced', (1, 2, 3, None)) ('spliced', ('Info', b'x')) ('spliced', 3)\n", result.out, name)
            true(re.fullmatch(HOOKED, result.err), f"{name}: {result.show()}")
        else:
            equal("(1, 2, 3, None) ('Info', b'x') 3\n", result.out, name)
            equal("", result.err, name)


def is_shared(interpreter: str) -> bool:
    return "libpython" in subprocess.run(["ldd", interpreter], stdout=subprocess.PIPE, check=False, universal_newlines=True).stdout


@check
def both_kinds(context: Context) -> None:
    """a shared and a statically linked interpreter were among them"""
    kinds = {is_shared(path) for path in interpreters() if version(path) >= HOOKABLE}
    if kinds != {True, False}:
        raise Waived(f"only {'shared' if True in kinds else 'statically linked'} ones are on this machine")


def embedding_flags() -> List[str]:
    for name in ("python3-config", "/usr/bin/python3-config"):
        path = shutil.which(name)
        if path is None:
            continue
        flags = subprocess.run([path, "--embed", "--cflags", "--ldflags"], stdout=subprocess.PIPE, check=False, universal_newlines=True)
        folders = re.findall(r"-I(\S+)", flags.stdout)
        if flags.returncode == 0 and any(os.path.exists(f"{folder}/Python.h") for folder in folders):
            return [*flags.stdout.split(), *(f"-Wl,-rpath,{folder}" for folder in re.findall(r"-L(\S+)", flags.stdout))]
    raise Waived("no Python headers and no library to embed")


@check
def embedded(context: Context) -> None:
    """a program that embeds libpython, started and ended three times"""
    built = context.compile("embed.c", *embedding_flags(), "-Wno-all")
    lay(context)
    plain = context.run([built], PYTHONPATH=str(context.folder))
    equal("plain\nplain\nplain\n", plain.out, plain.show())
    for variables in ({}, {"PYTHONDEVMODE": "1"}, {"PYTHONMALLOC": "debug"}):
        loaded = context.run([built], [context.fixture], PYTHONPATH=str(context.folder), **variables)
        equal(plain.status, loaded.status, loaded.show())
        # The interpreter forgets its audit hooks when it ends, so only the first one is ours.
        equal("spliced\nplain\nplain\n", loaded.out, loaded.show())


@check
def venv(context: Context) -> None:
    """a venv, made of links and of copies, in a folder with a space"""
    lay(context)
    for kind in ("--symlinks", "--copies"):
        folder = context.folder / f"with space {kind}"
        made = context.run([program("python3"), "-m", "venv", "--without-pip", kind, folder])
        equal(0, made.status, made.show())
        result = python(context, USE, str(folder / "bin" / "python"))
        equal("('spliced', (1, 2, 3, None)) ('spliced', ('Info', b'x')) ('spliced', 3)\n", result.out, result.show())


COST = """
import sys, time
def cost(name, count=200000):
    audit = sys.audit
    started = time.process_time()
    for _ in range(count):
        audit(name, "module", None, None, None, None)
    return (time.process_time() - started) / count * 1e9
print(min(cost("import") for _ in range(20)), min(cost("open") for _ in range(20)))
"""


@check
@measures
def event_cost(context: Context) -> None:
    """what an audited event costs with our hook, less what it costs with one that does nothing"""
    script = context.write("cost.py", COST)
    empty = context.compile("empty_hook.c", shared=True)

    def measure(library: object) -> List[float]:
        return [float(word) for word in context.run([program("python3"), script], [library]).out.split()]

    rounds = [(measure(empty), measure(context.library)) for _ in range(3)]
    added = [min(loaded[i] for _, loaded in rounds) - min(plain[i] for plain, _ in rounds) for i in (0, 1)]
    print(f"         added per event: {added[0]:.0f} ns for an import, {added[1]:.0f} ns for any other")
    true(max(added) < 150, f"{added} ns")


START = """
import os, sys
def start(command, count=60):
    spent = []
    for _ in range(count):
        usage = os.wait4(os.posix_spawn(command[0], command, dict(os.environ)), 0)[2]
        spent.append(usage.ru_utime + usage.ru_stime)
    return sorted(spent)[count // 10] * 1e3
print(start(sys.argv[1:]))
"""


@check
@measures
def start_cost(context: Context) -> None:
    """what the library adds to the start of /bin/true and of python3 -c pass, in processor time"""
    script = context.write("start.py", START)
    for command in (["/bin/true"], [os.path.realpath(shutil.which("python3.11", path="/usr/bin") or program("python3")), "-I", "-S", "-c", "pass"]):
        def measure(preload: List[object]) -> float:
            return float(context.run([program("python3"), script, *command], preload).out)

        rounds = [(measure([]), measure([context.library])) for _ in range(3)]
        added = min(loaded for _, loaded in rounds) - min(plain for plain, _ in rounds)
        print(f"         {' '.join(command)}: {min(plain for plain, _ in rounds):.2f} ms, with the library {added:+.3f} ms")
        true(added < 1.5, f"{added} ms")  # 0.5 ms on a quiet machine, which a test run is not
