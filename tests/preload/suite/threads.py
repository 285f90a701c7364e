# SPDX-License-Identifier: Apache-2.0
"""Threads that import at once, and forks among threads."""
from __future__ import annotations

from .check import Context, check, equal, true
from .fixture import CONN, lay, python

SLOW = f"import time\ntime.sleep(0.3)\n{CONN}\ntime.sleep(0.2)\n"
TOGETHER = """
import importlib, sys, threading
sys.setswitchinterval(0.000001)
start, results = threading.Barrier(6), []

def use(way):
    start.wait()
    if way == 0:
        import kvs_fixture.conn as conn
    elif way == 1:
        from kvs_fixture import conn
    else:
        conn = importlib.import_module("kvs_fixture.conn")
        open("/dev/null").close()
    if way in CERTAIN:
        results.append(conn.Receiver().poll())

threads = [threading.Thread(target=use, args=(WAYS[number % len(WAYS)],)) for number in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(30)
print(set(results))
"""


@check
def together(context: Context) -> None:
    """threads that import the module at once all find it patched"""
    for conn in (SLOW, CONN):
        lay(context, conn=conn)
        # Where importlib comes first there is no event, so only the threads that raise one before the use are certain.
        for ways, certain in (((0,), (0,)), ((1,), (1,)), ((0, 1), (0, 1)), ((2,), (2,)), ((0, 1, 2), (2,))):
            for _ in range(3):
                result = python(context, f"WAYS, CERTAIN = {ways}, {certain}\n" + TOGETHER, KVSPLICE_LOG="info")
                equal(f"{{{('spliced', 3)}}}\n", result.out, f"{ways}: {result.show()}")
                equal(1, result.err.count("hooked fixture"), result.err)


SPIN = """
import sys, threading, time
sys.setswitchinterval(0.000001)
seen = []

def spin():
    while True:
        module = sys.modules.get("kvs_fixture.conn")
        if module is not None and not module.__spec__._initializing:
            seen.append(type(vars(module.Receiver)["poll"]).__name__)
            return

threads = [threading.Thread(target=spin) for _ in range(4)]
for thread in threads:
    thread.start()
import kvs_fixture.conn
for thread in threads:
    thread.join(30)
print(set(seen))
"""


@check
def never_seen_unpatched(context: Context) -> None:
    """the moment the module counts as imported, it is patched, for threads that wait for nothing too"""
    lay(context)
    for _ in range(10):
        result = python(context, SPIN)
        equal("{'method_descriptor'}\n", result.out, result.show())


@check
def failing_together(context: Context) -> None:
    """threads whose import fails at once: at least one sees the error, none hangs"""
    # A thread that waits for another's failing import goes on without an error: that is how the interpreter does it.
    lay(context, conn="import time\ntime.sleep(0.2)\nraise RuntimeError('broken on purpose')\n")
    result = python(context, """
        import threading
        start, errors, ended = threading.Barrier(4), set(), []
        def use():
            start.wait()
            try:
                import kvs_fixture.conn
            except RuntimeError as error:
                errors.add(str(error))
            ended.append(1)
        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join(30)
        print(errors, len(ended))
    """)
    equal("{'broken on purpose'} 4\n", result.out, result.show())


@check
def daemons_at_exit(context: Context) -> None:
    """daemon threads inside a replaced method when the interpreter ends"""
    lay(context, conn=CONN.replace("return 3", "time.sleep(60)").replace("class Common:", "import time\nclass Common:", 1))
    result = python(context, """
        import threading, time
        import kvs_fixture.conn as conn
        for _ in range(8):
            threading.Thread(target=conn.Receiver().poll, daemon=True).start()
        time.sleep(0.2)
        raise SystemExit(5)
    """)
    equal("status 5\n--- output\n--- error\n", result.show(), "at exit")


@check
def forks_among_threads(context: Context) -> None:
    """a thousand forks of a process with busy threads, each child using the patched class"""
    lay(context)
    result = python(context, """
        import os, sys, threading, time, warnings
        warnings.simplefilter("ignore")
        import kvs_fixture.conn as conn
        stop = False
        def busy():
            while not stop:
                conn.Manager().send(1, 2, 3)
                sys.audit("kvs.test", 1)
                time.sleep(0.0005)
        threads = [threading.Thread(target=busy, daemon=True) for _ in range(15)]
        for thread in threads: thread.start()
        bad = 0
        for _ in range(1000):
            child = os.fork()
            if child == 0:
                os._exit(0 if conn.Receiver().poll() == ("spliced", 3) else 1)
            bad += os.waitpid(child, 0)[1] != 0
        stop = True
        print(bad)
    """)
    equal("0\n", result.out, result.show())


@check
def fork_while_importing(context: Context) -> None:
    """a fork in the middle of the connector's import: parent and child both find it patched"""
    lay(context, conn=f"import os\nCHILD = os.fork()\n{CONN}")
    result = python(context, """
        import os, sys
        import kvs_fixture.conn as conn
        good = conn.Receiver().poll() == ("spliced", 3)
        if conn.CHILD == 0:
            os._exit(0 if good else 1)
        print(good, os.waitpid(conn.CHILD, 0)[1])
    """)
    true(result.out == "True 0\n", result.show())
