# SPDX-License-Identifier: Apache-2.0
"""Methods whose parameters differ between releases, and methods that only some releases have."""
from __future__ import annotations

from .check import Context, check, equal, true
from .fixture import CONN, OTHER, lay, python
from .pythons import every_hookable_python

# the class, what is called on it, what that gives, hooked; the adapter knows work in three shapes and two methods that
# need not be there
FITTING = [
    (OTHER, "work()", "('spliced', 'worked')"),
    (OTHER.replace("(self)", "(self, job)"), "work(job=3)", "('spliced', 'worked')"),
    (OTHER.replace("(self)", "(self, job, further=1)"), "work(3)", "('spliced', 'worked')"),
    (OTHER.replace("(self)", "(self, further=1)"), "work(3)", "('spliced', 'worked')"),
    (OTHER.replace("(self)", "(self, task, size, a, b, *c, d, **e)"), "work(1, 2, 3, 4, d=5)", "('spliced', 'worked')"),
    (OTHER + "    def extra(self, more):\n        return more\n", "extra(5)", "('spliced', 5)"),
    (OTHER + "    def late(self, when):\n        return when\n", "late(6)", "('spliced', 6)"),
    (OTHER + "class Base:\n    def late(self):\n        return 7\nclass Other(Base, Other):\n    pass\n", "late()", "('spliced', 7)"),
    (OTHER, "__dict__", "{}"),
]
# ... and what the line says when it is left as it was: the last of several shapes is the one that it is compared with
UNFIT = [
    (OTHER.replace("(self)", "(self, nothing)"), "Other.work parameter 2 is 'nothing', expected 'task'"),
    (OTHER.replace("(self)", "(self, task)"), "Other.work takes 2 parameters, without 'size'"),
    (OTHER.replace("(self)", "(me)"), "Other.work parameter 1 is 'me', expected 'self'"),
    (OTHER + "    def extra(self):\n        return 1\n", "Other.extra takes 1 parameters, without 'more'"),
    (OTHER + "    @staticmethod\n    def extra(self, more):\n        return 1\n", "Other.extra is no method of instances"),
    (OTHER + "    late = 5\n", "Other.late is no Python function"),
    (OTHER + "    def late(self, when, *, how):\n        return 1\n", "Other.late has a further keyword-only parameter without a default"),
]
OURS = "print(sorted(name for name, value in vars(other.Other).items() if type(value).__name__ == 'method_descriptor'))"


@every_hookable_python
def fitting(context: Context, interpreter: str) -> None:
    """any of a method's shapes fits, and a method that need not be there is hooked where it is"""
    for other, call, expected in FITTING:
        lay(context, other=other)
        result = python(context, f"import kvs_fixture.other as other\nprint(other.Other().{call})\n", interpreter)
        equal(f"status 0\n--- output\n{expected}\n--- error\n", result.show(), f"{other}\n{call}")


@every_hookable_python
def unfit(context: Context, interpreter: str) -> None:
    """no shape fits, or a method that need not be there has another one: nothing is hooked, and one line says why"""
    for other, text in UNFIT:
        lay(context, other=other)
        result = python(context, f"import kvs_fixture.other as other\n{OURS}\n", interpreter)
        equal("[]\n", result.out, f"{other}: {result.show()}")
        true(result.err.count("\n") == 1 and f"other prefill of kvs_fixture 9.8.7 is left as it was: {text}" in result.err, f"{text!r}: {result.show()}")


@every_hookable_python
def class_methods(context: Context, interpreter: str) -> None:
    """class methods, inherited and own, called on the class, on an object and on a subclass"""
    own = CONN.replace("class Info(Common):\n    pass", "class Info(Common):\n    @classmethod\n    def from_wire(cls, msg):\n        return super().from_wire(msg) + ('own',)")
    script = "import kvs_fixture.conn as conn\nclass Sub(conn.Info):\n    pass\nprint(conn.Info.from_wire(1), conn.Info().from_wire(2), Sub.from_wire(3), conn.Common.from_wire(4))"
    for module, mark in ((CONN, ""), (own, ", 'own'")):
        lay(context, conn=module)
        equal(f"('spliced', ('Info', 1{mark})) ('spliced', ('Info', 2{mark})) ('Sub', 3{mark}) ('Common', 4)\n", python(context, script, interpreter).out, "class methods")


@check
def optional_one_is_gone(context: Context) -> None:
    """a class without the methods that need not be there does not get them"""
    lay(context)
    result = python(context, "import kvs_fixture.other as other\nprint(hasattr(other.Other, 'extra'), hasattr(other.Other, 'late'))")
    equal("False False\n", result.out, result.show())
