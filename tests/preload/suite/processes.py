# SPDX-License-Identifier: Apache-2.0
"""Children of a hooked process, and where the library lies."""
from __future__ import annotations

import os

from .check import Context, check, equal, true
from .fixture import CONN, lay, python

POOL = """
import multiprocessing, os, sys

def use(_):
    import kvs_fixture.conn as conn
    return conn.Receiver().poll()

if __name__ == "__main__":
    if FIRST:
        import kvs_fixture.conn
    context = multiprocessing.get_context(METHOD)
    if METHOD == "forkserver" and PRELOAD:
        context.set_forkserver_preload(["kvs_fixture.conn"])
    with context.Pool(2) as pool:
        print(pool.map(use, range(4)))
    sys.exit(4)
"""


@check
def multiprocessing(context: Context) -> None:
    """multiprocessing: spawn, forkserver (with the module preloaded too) and fork"""
    lay(context)
    for method in ("spawn", "forkserver", "fork"):
        for first in (False, True):
            for preload in (False, True) if method == "forkserver" else (False,):
                head = f"METHOD, FIRST, PRELOAD = {method!r}, {first}, {preload}\n"
                result = python(context, head + POOL)
                equal(f"status 4\n--- output\n{[('spliced', 3)] * 4}\n--- error\n", result.show(), f"{method}, {first}, {preload}")


@check
def unchanged_pools(context: Context) -> None:
    """multiprocessing without a connector: as without the library"""
    path = context.write("pool.py", """
        import multiprocessing, sys
        if __name__ == "__main__":
            for method in ("spawn", "forkserver", "fork"):
                with multiprocessing.get_context(method).Pool(2) as pool:
                    print(method, pool.map(abs, [-1, 2]))
            sys.exit(4)
    """)
    equal(4, context.same(["python3", path]).status, "status")


@check
def children(context: Context) -> None:
    """children with another list: hooked wherever ours stands in it, plain where it was dropped"""
    lay(context)
    second = context.compile("second.c", shared=True)
    context.write("child.py", "import kvs_fixture.conn as conn\nprint(conn.Receiver().poll(), flush=True)\n")
    before = "".join(f"{path}:" for path in context.before)
    for value, expected in (
        (f"{context.fixture}", "('spliced', 3)"), (f"{second}:{context.fixture}", "('spliced', 3)"),
        (f"{context.fixture}:{second}", "('spliced', 3)"), (f"{context.fixture} {second}", "('spliced', 3)"),
        (f"{context.fixture}:{context.fixture}", "('spliced', 3)"), (f"{second}", "3"), ("", "3"),
    ):
        for start in ("subprocess.run([sys.executable, 'child.py'], env=env)", "os.waitpid(os.spawnve(os.P_NOWAIT, sys.executable, ['python3', 'child.py'], env), 0)"):
            result = python(context, f"import os, subprocess, sys\nenv = {{**os.environ, 'LD_PRELOAD': {before + value!r}}}\n{start}\n")
            equal(expected + "\n", result.out, f"{value}: {result.show()}")


@check
def paths(context: Context) -> None:
    """the library by a relative path, from a folder with a space, and by a link"""
    lay(context)
    folder = context.folder / "with space"
    folder.mkdir()
    (folder / "copy.so").write_bytes(context.fixture.read_bytes())
    (folder / "link.so").symlink_to(context.fixture)
    script = context.write("script.py", "import kvs_fixture.conn as conn\nprint(conn.Receiver().poll())\n")
    for name in ("./copy.so", "./link.so"):
        result = context.run(["python3", script], [name], cwd=folder, PYTHONPATH=str(context.folder))
        equal("status 0\n--- output\n('spliced', 3)\n--- error\n", result.show(), name)
    link = context.folder / "link.so"
    link.symlink_to(os.path.relpath(context.fixture, context.folder))
    result = context.run(["python3", script], [link], PYTHONPATH=str(context.folder))
    equal("status 0\n--- output\n('spliced', 3)\n--- error\n", result.show(), "by a link")


@check
def nothing_left(context: Context) -> None:
    """a hooked process that registers nothing has no thread, descriptor or signal handler more"""
    lay(context)
    script = """
        import os, signal
        import kvs_fixture.conn as conn
        print(sorted(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
        print([signal.getsignal(n) for n in range(1, 32)])
    """
    equal(python(context, script, hooked=False).show(), python(context, script).show(), "with the library")


@check
def spoken_to_a_closed_stream(context: Context) -> None:
    """a closed or full standard error harms nobody"""
    lay(context, conn=CONN.replace("def poll(self)", "def poll(self, timeout)"))
    command = "import os\nos.close(2)\nimport kvs_fixture.conn as conn\nprint(conn.Manager().shared())\n"
    result = python(context, command, KVSPLICE_LOG="debug", KVSPLICE_HELP="1")
    true(result.status == 0 and result.out == "('spliced', 'shared')\n", result.show())
    result = python(context, command.replace("os.close(2)", "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)"), KVSPLICE_LOG="debug", KVSPLICE_HELP="1")
    true(result.status == 0 and result.out == "('spliced', 'shared')\n", result.show())
