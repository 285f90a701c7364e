# SPDX-License-Identifier: Apache-2.0
"""A class, method or parameter that is not as expected: the role stays exactly as it was, and one line says why."""
from __future__ import annotations

import re
from typing import List, Tuple

from .check import Context, check, equal, true
from .fixture import CONN, lay, python

# what is replaced in the fitting module, by what, and what the line says
PREFILL: List[Tuple[str, str, str]] = [
    ("class Sender:", "class Senders:", "there is no class Sender"),
    ("def send(", "def transfer(", "class Manager has no method send"),
    ("req, pages, executor, more=None", "req, executor, pages, more=None", "Manager.send parameter 3 is 'executor', expected 'pages'"),
    ("req, pages, executor, more=None", "req, pages", "Manager.send takes 3 parameters, without 'executor'"),
    ("req, pages, executor, more=None", "req, pages, executor, more", "Manager.send has a further parameter 'more' without a default"),
    ("req, pages, executor, more=None", "req, pages, executor, *, more", "Manager.send has a further keyword-only parameter without a default"),
    ("req, pages, executor, more=None", "req, pages, *, executor=1, more=None", "Manager.send takes 3 parameters, without 'executor'"),
    ("    @classmethod\n", "    @staticmethod\n", "Info.from_wire is no class method"),
    ("    @classmethod\n", "", "Info.from_wire is no class method"),
    ("    def send(", "    @classmethod\n    def send(", "Manager.send is no method of instances"),
    ("    def send(", "    @staticmethod\n    def send(", "Manager.send is no method of instances"),
    ("    def send(self, req, pages, executor, more=None):\n        return (req, pages, executor, more)", "    send = len", "Manager.send is no Python function"),
    ("    def send(self, req, pages, executor, more=None):\n        return (req, pages, executor, more)", "    send = property(lambda self: 1)", "Manager.send is no Python function"),
    ("class Sender:\n    def __init__(self, mgr, addr, room):\n        self.args = (mgr, addr, room)", "class Sender:\n    pass", "Sender.__init__ is no Python function"),
    ("class Info(Common):\n    pass", "Info = None", "class Info has no method from_wire"),
]
INSPECT = """
import types
import kvs_fixture.conn as conn
ours = []
for name, value in vars(conn).items():
    if isinstance(value, type):
        ours += [f"{name}.{k}" for k, v in vars(value).items() if type(v).__name__ in ("method_descriptor", "classmethod_descriptor")]
print(sorted(ours))
"""
DECODE_ONLY = "['Manager.shared', 'Receiver.poll']\n"


@check
def prefill_alone(context: Context) -> None:
    """prefill's misfits: decode is hooked all the same"""
    for old, new, text in PREFILL:
        true(old in CONN, f"{old!r} is not in the module")
        lay(context, conn=CONN.replace(old, new))
        result = python(context, INSPECT)
        lines = result.err.splitlines()
        true(len(lines) == 1 and re.match(r"kvsplice\[\d+/-\] warn: hook: fixture prefill of kvs_fixture 9\.8\.7 is left as it was: ", lines[0]), f"{new!r}: {result.show()}")
        true(text in lines[0], f"{new!r}: {lines[0]!r} lacks {text!r}")
        equal(DECODE_ONLY, result.out, f"{new!r}: what is ours")


@check
def decode_alone(context: Context) -> None:
    """decode's misfit: prefill is hooked all the same"""
    lay(context, conn=CONN.replace("def poll(self)", "def poll(self, timeout)"))
    result = python(context, INSPECT)
    true("fixture decode of kvs_fixture 9.8.7 is left as it was: Receiver.poll has a further parameter 'timeout'" in result.err, result.show())
    equal("['Info.from_wire', 'Manager.send', 'Manager.shared', 'Sender.__init__']\n", result.out, result.show())


@check
def both_roles(context: Context) -> None:
    """neither role fits: two lines, nothing is ours, no line that says hooked"""
    lay(context, conn="unrelated = 1\n")
    result = python(context, INSPECT, KVSPLICE_LOG="debug")
    equal("[]\n", result.out, result.show())
    equal(2, result.err.count(" is left as it was: "), result.err)
    true("hooked" not in result.err, result.err)


@check
def accepted(context: Context) -> None:
    """what fits: further parameters with defaults, *args, annotations, a decorator that keeps what it wraps"""
    for old, new in (
        ("more=None", "more=None, *rest, key=1, **others"),
        ("req, pages, executor, more=None", "req, pages, executor: int, more: 'str' = None"),
        ("    def send(", "    @decorated\n    @decorated\n    def send("),
        ("mgr, addr, room", "mgr, addr, room, dest_tp_ranks, pp_rank"),
    ):
        decorator = "import functools\ndef decorated(function):\n    @functools.wraps(function)\n    def wrapper(*args, **kwargs):\n        return function(*args, **kwargs)\n    return wrapper\n"
        lay(context, conn=decorator + CONN.replace(old, new))
        result = python(context, INSPECT + "print(conn.Manager().send(1, 2, 3)[0])")
        equal("['Info.from_wire', 'Manager.send', 'Manager.shared', 'Receiver.poll', 'Sender.__init__']\nspliced\n", result.out, f"{new!r}: {result.show()}")


@check
def undone(context: Context) -> None:
    """a class that cannot be changed: the role's earlier changes are taken back"""
    meta = "class Meta(type):\n    def __setattr__(cls, name, value):\n        raise TypeError('frozen')\n"
    lay(context, conn=meta + CONN.replace("class Sender:", "class Sender(metaclass=Meta):"))
    result = python(context, INSPECT + "print(conn.Manager().send(1, 2, 3), 'from_wire' in vars(conn.Info), conn.Info.from_wire(1), conn.Manager().shared())")
    true("fixture prefill of kvs_fixture 9.8.7 is left as it was: Sender.__init__ cannot be replaced" in result.err, result.show())
    equal(f"{DECODE_ONLY}(1, 2, 3, None) False ('Info', 1) ('spliced', 'shared')\n", result.out, result.show())


@check
def left_alone(context: Context) -> None:
    """a connector whose adapter says no is left alone"""
    lay(context, conn="LEAVE_ALONE = True\n" + CONN)
    result = python(context, INSPECT)
    equal("status 0\n--- output\n[]\n--- error\n", result.show(), "left alone")


@check
def without_lock(context: Context) -> None:
    """a Python without the interpreter lock is left as it was, with one line"""
    lay(context)
    result = python(context, "import sys\nsys.abiflags = 't'\n" + INSPECT)
    equal("[]\n", result.out, result.show())
    true("warn: hook: fixture is left as it was: this Python was built without the interpreter lock" in result.err, result.show())


@check
def no_version(context: Context) -> None:
    """a package without a version is of version unknown"""
    for package in ("", "__version__ = 3\n", "__version__ = 'x' * 500\n"):
        lay(context, package=package)
        result = python(context, INSPECT, KVSPLICE_LOG="info")
        true("hooked fixture prefill, decode of kvs_fixture unknown; " in result.err, result.show())
