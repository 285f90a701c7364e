# SPDX-License-Identifier: Apache-2.0
"""Parents that change LD_PRELOAD for their children: who is hooked, and what the parent says."""
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Dict, List, Tuple

from .check import ROOT, Context, Result, Waived, check, equal, program, true
from .fixture import lay, python
from .pythons import every_hookable_python

WORKER = """
def work():
    import kvs_fixture.conn as conn
    print(conn.Receiver().poll(), flush=True)

if __name__ == "__main__":
    work()
"""
# Each way of starting a process is tried in a fork of its own, since a process warns once.
PARENT = '''
import json, multiprocessing, os, subprocess, sys
import worker
COMMAND = [sys.executable, "worker.py"]

def with_environment(value, call, unset=False):
    """As torch_memory_saver does it: the variable is changed around the start of a process."""
    old = os.environ["LD_PRELOAD"]
    if unset and not value:
        del os.environ["LD_PRELOAD"]
    else:
        os.environ["LD_PRELOAD"] = value
    try:
        call()
    finally:
        os.environ["LD_PRELOAD"] = old

def start_method(method):
    process = multiprocessing.get_context(method).Process(target=worker.work)
    process.start()
    process.join()

def environment(value):
    return {**os.environ, "LD_PRELOAD": value}

def fork_and_exec(value):
    child = os.fork()
    if child == 0:
        os.execve(sys.executable, COMMAND, environment(value))
    os.waitpid(child, 0)

def with_bytes(value):
    given = {os.fsencode(name): os.fsencode(text) for name, text in environment(value).items()}
    subprocess.run(COMMAND, env=given)

WAYS = {
    "spawn": lambda value: with_environment(value, lambda: start_method("spawn")),
    "forkserver": lambda value: with_environment(value, lambda: start_method("forkserver")),
    "inherited": lambda value: with_environment(value, lambda: subprocess.run(COMMAND)),
    "inherited through a shell": lambda value: with_environment(value, lambda: os.system(f"exec '{sys.executable}' worker.py"), unset=True),
    "subprocess": lambda value: subprocess.run(COMMAND, env=environment(value)),
    "subprocess, bytes": with_bytes,
    "spawnve": lambda value: os.waitpid(os.spawnve(os.P_NOWAIT, sys.executable, COMMAND, environment(value)), 0),
    "posix_spawn": lambda value: os.waitpid(os.posix_spawn(sys.executable, COMMAND, environment(value)), 0),
    "fork and exec": fork_and_exec,
}

def main():
    if os.environ["PACKAGE"]:
        import kvs_fixture
    for number, value in enumerate(json.loads(os.environ["VALUES"])):
        for way, start in WAYS.items():
            child = os.fork()
            if child == 0:
                log = os.open(f"log.{number}.{way}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                for _ in range(int(os.environ["TIMES"])):
                    start(value)
                os._exit(0)
            os.waitpid(child, 0)
    print(json.dumps(list(WAYS)))

if __name__ == "__main__":
    main()
'''
SPLICED = "('spliced', 3)"
WARNING = re.compile(r"kvsplice\[\d+/-\] warn: launch: LD_PRELOAD of what this process starts no longer has libkvsplice-fixture\.so: "
                     r"those processes run without kvsplice\..* The list now: (.*)")


def parent(context: Context, interpreter: str, values: List[str], package: bool, times: int = 1) -> Dict[Tuple[str, str], List[str]]:
    """The lines of each list of libraries and way to start a process with it, some times."""
    lay(context)
    context.write("worker.py", WORKER)
    result = python(context, PARENT, interpreter, VALUES=json.dumps(values), PACKAGE="yes" if package else "", TIMES=str(times), PYTHONWARNINGS="ignore")
    true(result.status == 0 and result.err == "", result.show())
    found = {}
    for way in json.loads(result.out):
        for number, value in enumerate(values):
            found[value, way] = (context.folder / f"log.{number}.{way}").read_text().splitlines()
    return found


def lists(context: Context) -> Tuple[List[str], List[str]]:
    """Lists with the library in them, and lists without."""
    other = context.compile("empty_hook.c", shared=True)
    def after(*names: object) -> str:
        return ":".join([*context.before, *map(str, names)])
    return [after(other, context.fixture), after(f"{context.fixture} {other}")], [after(other), after()]


@every_hookable_python
def kept(context: Context, interpreter: str) -> None:
    """workers whose list has the library anywhere are hooked, and the server says nothing"""
    for (value, way), lines in parent(context, interpreter, lists(context)[0], True).items():
        equal([SPLICED], lines, f"{way} with {value!r}")


@every_hookable_python
def dropped(context: Context, interpreter: str) -> None:
    """a server that drops the library from its workers' list says so once"""
    for (value, way), lines in parent(context, interpreter, lists(context)[1], True, times=2).items():
        found = [match.group(1) for match in map(WARNING.fullmatch, lines) if match]
        equal(["3"] * 2, [line for line in lines if not WARNING.fullmatch(line)], f"{way} with {value!r}: {lines}")
        # A process that is about to become another cannot know what one before it has said.
        times = 2 if way in ("spawnve", "fork and exec") else 1
        equal([value or "(empty)"] * times, found, f"{way} with {value!r}: {lines}")


@check
def plain_parents(context: Context) -> None:
    """a program without such a package may change the list: it hears nothing"""
    having, without = lists(context)
    for (value, way), lines in parent(context, "python3", having + without, False).items():
        equal([SPLICED if value in having else "3"], lines, f"{way} with {value!r}")


@check
def changed_before(context: Context) -> None:
    """a list that was changed before the package came is reported when it comes, unless it is as it was by then"""
    lay(context)
    change = "import os\nold = os.environ['LD_PRELOAD']\nos.environ['LD_PRELOAD'] = '/nonexistent/other.so'\n"
    imports = ("import kvs_fixture", "import importlib; importlib.import_module('kvs_fixture'); import colorsys", "import kvs_fixture.conn")
    for statement in imports:
        result = python(context, f"{change}{statement}\n")
        true(WARNING.fullmatch(result.err.strip()), f"{statement}: {result.show()}")
        for end in ("os.environ['LD_PRELOAD'] = old", "os.environ['LD_PRELOAD'] = 'libc.so.6:libkvsplice-fixture.so'",
                    "os.environ['LD_PRELOAD'] = '/$LIB/libkvsplice-fixture.so'"):
            equal("", python(context, f"{change}{end}\n{statement}\n").err, f"{end}; {statement}")


@check
def others_started(context: Context) -> None:
    """a server that starts a program that is no Python with a clean environment, or that is told to be quiet, says nothing"""
    lay(context)
    head = "import kvs_fixture, os, subprocess, sys\n"
    for statement in (
        "subprocess.run(['/bin/true'], env={})",
        "subprocess.run(['sh', '-c', 'exit 0'], env={'PATH': os.environ['PATH']})",
        "os.environ['OTHER'] = os.environ['LD_PRELOAD']; subprocess.run([sys.executable, '-c', 'pass'])",
        "subprocess.run([sys.executable, '-c', 'pass'], env=os.environ)",
        "subprocess.run([sys.executable, '-c', 'pass'], env=dict(os.environ, X='y'))",
    ):
        equal("status 0\n--- output\n--- error\n", python(context, head + statement).show(), statement)
    dropping = "subprocess.run([sys.executable, '-c', 'pass'], env={})"
    true(WARNING.fullmatch(python(context, head + dropping).err.strip()), "an empty environment")
    for options in ({"KVSPLICE_LOG": "error"}, {"KVSPLICE_ENABLE": "0"}):
        equal("", python(context, head + dropping, **options).err, str(options))


SENSELESS = """
import kvs_fixture, os, sys
class Odd(dict):
    def __missing__(self, key):
        raise RuntimeError("asked")
class Same:
    def __hash__(self):
        return hash("LD_PRELOAD")
    def __eq__(self, other):
        raise RuntimeError("compared")
given = [(), (1,), (None, None, None, None), (b"LD_PRELOAD",), ("LD_PRELOAD", 5), (b"LD_PRELOAD", "\\udc80"), (b"\\xff", b"\\xff"),
         (object(), [], "x", {1: 2}), ("python", [], None, 7), ("python", [], None, {"LD_PRELOAD": 7}), ("python", [], None, {Same(): "x"}),
         ("python", [], {"LD_PRELOAD": None}, "text"), ("\\udc80", [], {}, {}), (b"/bin/true", [], {}, {}), ("python", [], {b"LD_PRELOAD": b"\\xff"})]
full = {**os.environ}
def calls(count):
    for _ in range(count):
        sys.audit("subprocess.Popen", "python", ["x"], None, full)
        sys.audit("subprocess.Popen", sys.executable, ["x"], None, os.environ)
        sys.audit("os.posix_spawn", "python", ["x"], Odd(LD_PRELOAD=full["LD_PRELOAD"]))
        sys.audit("os.putenv", b"LD_PRELOAD", full["LD_PRELOAD"])
        sys.audit("os.putenv", b"OTHER", b"x")
calls(100)
before = sys.getallocatedblocks()
calls(5000)
print(sys.getallocatedblocks() - before < 1000)
for event in ("os.putenv", "os.unsetenv", "os.exec", "os.posix_spawn", "subprocess.Popen", "os.", "subprocess.", "o", "s", "os"):
    for arguments in given:
        sys.audit(event, *arguments)
"""


@every_hookable_python
def senseless_events(context: Context, interpreter: str) -> None:
    """events with arguments that make no sense, or refuse to be looked at, harm nobody, and none leaves an object behind"""
    lay(context)
    for options in ((), ("-X", "dev")):
        result = python(context, SENSELESS, interpreter, options=options)
        true(result.status == 0 and result.out == "True\n" and all(map(WARNING.fullmatch, result.err.splitlines())), result.show())


@check
def listed_elsewhere(context: Context) -> None:
    """a library that came by another way than the variable is not missed in it"""
    lay(context)
    script = "import ctypes, kvs_fixture, os\nctypes.CDLL({library!r})\nos.environ['LD_PRELOAD'] = '/nonexistent/other.so'\n"
    result = python(context, script.format(library=str(context.fixture)), hooked=False)
    equal("status 0\n--- output\n--- error\n", result.show(), "by ctypes")


SAVED = """
import multiprocessing, os, worker

if __name__ == "__main__":
    import kvs_fixture, torch_memory_saver
    before = os.environ["LD_PRELOAD"]
    context = multiprocessing.get_context("spawn")
    for _ in range(2):
        with torch_memory_saver.configure_subprocess():
            process = context.Process(target=worker.work)
            process.start()
        process.join()
    print(process.exitcode, os.environ["LD_PRELOAD"] == before)
"""


def stand_ins(context: Context, library: Path) -> Path:
    """A folder with a libcuda and a libcudart that have what this library asks them for, and can do nothing."""
    folder = context.folder / "stand-ins"
    folder.mkdir(exist_ok=True)
    asked = re.findall(r" U (cu\w+)(?:@\S+)?$", context.run([program("nm"), "-D", "--undefined-only", library]).out, re.M)
    for name, start in (("libcuda.so.1", r"cu[A-Z]"), ("libcudart.so.12", r"cuda[A-Z]")):
        source = context.write("stand-in.c", "".join(f"int {symbol}(void) {{ return 1; }}\n" for symbol in asked if re.match(start, symbol)))
        versions = context.write("versions", f"{name if 'cudart' in name else 'driver'} {{ *; }};\n")
        flags = [f"-Wl,-soname,{name}", *([f"-Wl,--version-script={versions}"] if "cudart" in name else [])]
        built = context.run(["gcc", "-shared", "-fPIC", source, "-o", folder / name, *flags])
        equal(0, built.status, built.show())
    return folder


def memory_saver(context: Context, version_name: str) -> Result:
    """A server that starts its workers through this torch_memory_saver; a worker says whether it is in there."""
    interpreter, home = ROOT / ".cache/venv/bin/python", ROOT / f".cache/launch/torch_memory_saver-{version_name}"
    if not interpreter.exists() or not home.is_dir():
        raise Waived(f"torch_memory_saver {version_name} and torch are not installed (scripts/environment --for launch)")
    lay(context)
    folder = stand_ins(context, next(iter(sorted(home.glob("*mode_preload*cu12*.so")) or sorted(home.glob("*mode_preload*.so")))))
    context.write("worker.py", WORKER.replace("import kvs_fixture.conn as conn", "print('_preload' in open('/proc/self/maps').read())\n    import kvs_fixture.conn as conn"))
    return python(context, SAVED, str(interpreter), LD_LIBRARY_PATH=str(folder), PYTHONPATH=f"{context.folder}:{home}")


@check
def replacing_memory_saver(context: Context) -> None:
    """torch_memory_saver 0.0.9, which replaces the list: the worker has no hook, and the server says so once"""
    result = memory_saver(context, "0.0.9")
    equal("True\n3\nTrue\n3\n0 True\n", result.out, result.show())
    match = WARNING.fullmatch(result.err.strip())
    true(match and match.group(1).endswith("torch_memory_saver_hook_mode_preload.abi3.so"), result.show())


@check
def adding_memory_saver(context: Context) -> None:
    """torch_memory_saver 0.0.10, which adds to the list: the worker has both"""
    result = memory_saver(context, "0.0.10")
    equal(f"True\n{SPLICED}\nTrue\n{SPLICED}\n0 True\n", result.out, result.show())
    true("kvsplice" not in result.err, result.show())


# A worker of ray is started by its raylet, a program in C++ with the environment of the driver, or what the task asks for.
RAY = """
import os, sys
import kvs_fixture, ray

FOLDER = os.getcwd()
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _node_ip_address="127.0.0.1", _temp_dir=FOLDER)

@ray.remote
def work():
    import os, sys
    sys.path.insert(0, FOLDER)
    import kvs_fixture.conn as conn
    return open(f"/proc/{os.getppid()}/comm").read().strip(), conn.Receiver().poll()

print(ray.get(work.remote()))
print(ray.get(work.options(runtime_env={"env_vars": {"LD_PRELOAD": sys.argv[1]}}).remote()))
ray.shutdown()
"""


@check
def ray_workers(context: Context) -> None:
    """ray, whose raylet executes the workers: hooked with the driver's list, and with a task's own that has ours in it"""
    interpreter, home = ROOT / ".cache/venv/bin/python", ROOT / ".cache/launch/ray"
    if not interpreter.exists() or not home.is_dir():
        raise Waived("ray is not installed (scripts/environment --for launch)")
    lay(context)
    result = python(context, RAY, str(interpreter), arguments=lists(context)[0][:1], PYTHONPATH=f"{context.folder}:{home}", PYTHONWARNINGS="ignore",
                    RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
    equal(f"('raylet', {SPLICED})\n" * 2, result.out, result.show())
    true(result.status == 0 and "kvsplice" not in result.err, result.show())


EXECUTED = """
import os, sys
import kvs_fixture

def start(environment):
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve("/bin/sh", ["sh", "-c", f"exec {sys.executable} worker.py"], environment)
        os._exit(os.wait()[1])
    return os.waitpid(child, 0)[1]

few = {name: text for name, text in os.environ.items() if name in ("PATH", "PYTHONPATH", "LD_PRELOAD")}
print(start(few), start({**os.environ, "EXTRA": "x"}), flush=True)
"""


@check
def executed_workers(context: Context) -> None:
    """a daemon that executes workers through a shell, with a reduced and an enlarged environment"""
    lay(context)
    context.write("worker.py", WORKER)
    result = python(context, EXECUTED)
    equal(f"status 0\n--- output\n{SPLICED}\n{SPLICED}\n0 0\n--- error\n", result.show(), "workers")


LOOP = """
import asyncio, multiprocessing, os, sys
import uvloop, worker

async def echo(reader, writer):
    import kvs_fixture.conn as conn
    writer.write(await reader.readline() + str(conn.Receiver().poll()).encode())
    writer.close()

async def main():
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"line\\n")
    print((await reader.read()).decode(), flush=True)
    for environment in (None, {**os.environ, "LD_PRELOAD": ""}):
        child = await asyncio.create_subprocess_exec(sys.executable, "worker.py", env=environment)
        print(await child.wait(), flush=True)
    for method in ("spawn", "forkserver", "fork"):
        process = multiprocessing.get_context(method).Process(target=worker.work)
        process.start()
        await asyncio.get_running_loop().run_in_executor(None, process.join)
        print(method, process.exitcode, flush=True)
    sys.exit(4)

if __name__ == "__main__":
    print(type(uvloop.new_event_loop()).__module__, flush=True)
    uvloop.run(main())
"""


@check
def under_uvloop(context: Context) -> None:
    """uvloop: a hooked class in its loop, children started from it by its own means and by multiprocessing"""
    interpreter = ROOT / ".cache/venv/bin/python"
    if not interpreter.exists() or context.run([interpreter, "-c", "import uvloop"]).status:
        raise Waived("uvloop is not installed (scripts/environment --for launch)")
    lay(context)
    context.write("worker.py", WORKER)
    result = python(context, LOOP, str(interpreter))
    expected = f"uvloop\nline\n{SPLICED}\n{SPLICED}\n0\n3\n0\n" + "".join(f"{SPLICED}\n{method} 0\n" for method in ("spawn", "forkserver", "fork"))
    equal(expected, result.out, result.show())
    true(result.status == 4 and "Traceback" not in result.err, result.show())
    stock = python(context, LOOP, str(interpreter), hooked=False, LD_PRELOAD="")
    equal(expected.replace(SPLICED, "3"), stock.out, stock.show())
