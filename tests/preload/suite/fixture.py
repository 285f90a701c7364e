# SPDX-License-Identifier: Apache-2.0
"""The package that the test connectors of connector/fixture.c know, in a shape that fits."""
from __future__ import annotations

from pathlib import Path
from typing import Optional, Sequence

from .check import Context, Result

PACKAGE = '__version__ = "9.8.7"\n'
CONN = '''
class Common:
    def shared(self):
        return "shared"

    @classmethod
    def from_wire(cls, msg):
        return (cls.__name__, msg)


class Manager(Common):
    def send(self, req, pages, executor, more=None):
        return (req, pages, executor, more)


class Info(Common):
    pass


class Sender:
    def __init__(self, mgr, addr, room):
        self.args = (mgr, addr, room)


class Receiver:
    def poll(self):
        return 3
'''
OTHER = '''
class Other:
    def work(self):
        return "worked"
'''
HOOKED = r"kvsplice\[\d+/-\] info: hook: kvsplice \S+ hooked fixture prefill, decode of kvs_fixture 9\.8\.7; policy auto; transports cuda_ipc,rdma,host,tcp,engine\n"


def lay(context: Context, conn: str = CONN, package: str = PACKAGE, other: str = OTHER) -> Path:
    """Write the package into the check's folder, which is to be on the module path."""
    context.write("kvs_fixture/__init__.py", package)
    context.write("kvs_fixture/conn.py", conn)
    context.write("kvs_fixture/other.py", other)
    return context.folder


def python(context: Context, script: str, interpreter: str = "python3", hooked: bool = True, options: Sequence[str] = (), arguments: Sequence[str] = (), **extra: Optional[str]) -> Result:
    """Run a script that may import the package, with the library (or, to compare, without)."""
    path = context.write("script.py", script)
    preload = [context.fixture] if hooked else []
    extra.setdefault("PYTHONPATH", str(context.folder))
    extra.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    return context.run([interpreter, *options, path, *arguments], preload, **extra)
