# SPDX-License-Identifier: Apache-2.0
"""The import hook: when and how a connector module is patched, and what stays as it was."""
from __future__ import annotations

import re

from .check import Context, check, equal, true
from .fixture import CONN, HOOKED, PACKAGE, lay, python
from .pythons import every_hookable_python

SHOW = "print(conn.Receiver().poll())"
SPLICED = "('spliced', 3)\n"


# Some raise no event of their own: those are noticed at the next one, here the import of a module that was not there.
@check
def ways(context: Context) -> None:
    """every way to import a module"""
    lay(context)
    for statement in (
        "import kvs_fixture.conn as conn",
        "from kvs_fixture import conn",
        "from kvs_fixture.conn import Receiver; import kvs_fixture.conn as conn; assert Receiver is conn.Receiver",
        "conn = __import__('kvs_fixture.conn', fromlist=['x'])",
        "import importlib; conn = importlib.import_module('kvs_fixture.conn'); import colorsys",
        "import importlib; conn = importlib.import_module('.conn', 'kvs_fixture'); open('/dev/null').close()",
        "import pkgutil; conn = pkgutil.resolve_name('kvs_fixture.conn'); import colorsys",
        "exec('import kvs_fixture.conn as conn')",
    ):
        result = python(context, f"{statement}\n{SHOW}")
        equal(SPLICED, result.out, f"{statement}: {result.show()}")
        equal("", result.err, f"{statement}: nothing to say at the level warn")


@check
def by_the_package(context: Context) -> None:
    """imported by its package, absolutely and relatively, used right after"""
    for statement in ("from .conn import Receiver", "from kvs_fixture.conn import Receiver", "import kvs_fixture.conn; from .conn import Receiver"):
        lay(context, package=f"{PACKAGE}{statement}\n")
        for script in ("import kvs_fixture", "import kvs_fixture.conn", "from kvs_fixture.conn import Manager"):
            result = python(context, f"{script}\nprint(__import__('kvs_fixture').Receiver().poll())")
            equal(SPLICED, result.out, f"{statement} / {script}: {result.show()}")


@check
def circular(context: Context) -> None:
    """in a circle of imports"""
    lay(context, conn=f"import kvs_fixture.helper\n{CONN}")
    context.write("kvs_fixture/helper.py", "import kvs_fixture.conn\nfrom kvs_fixture import conn\n")
    for first in ("kvs_fixture.conn", "kvs_fixture.helper"):
        result = python(context, f"import {first}\nimport kvs_fixture.conn as conn\n{SHOW}")
        equal(SPLICED, result.out, result.show())


@every_hookable_python
def objects(context: Context, interpreter: str) -> None:
    """exact objects are ours; subclasses, a duck-typed self and base classes take the stock path"""
    lay(context)
    result = python(context, """
        import kvs_fixture.conn as conn

        class Ascend(conn.Manager):
            pass

        class Other(conn.Manager):
            def send(self, *args, **kwargs):
                return "mine", super().send(*args, **kwargs)

        print(conn.Manager().send(1, 2, 3), conn.Manager().send(1, 2, executor=3, more=4))
        print(conn.Manager.send(conn.Manager(), 1, 2, 3))
        print(Ascend().send(1, 2, 3), Other().send(1, 2, 3))
        print(conn.Manager.send("a duck", 1, 2, 3), conn.Manager.send(None, req=1, pages=2, executor=3))
        print(conn.Common().shared(), conn.Common.from_wire(1), "shared" in vars(conn.Common) and "send" in vars(conn.Manager))
        print(conn.Info.from_wire(2), conn.Info().from_wire(2), type("Sub", (conn.Info,), {}).from_wire(2))
        print(conn.Sender(1, 2, room=3).__dict__, type("Sub", (conn.Sender,), {})(1, 2, 3).__dict__)
        bound = conn.Manager().send
        print(bound(1, 2, 3), list(map(conn.Manager().send, [1], [2], [3])))
    """, interpreter)
    equal(
        "('spliced', (1, 2, 3, None)) ('spliced', (1, 2, 3, 4))\n"
        "('spliced', (1, 2, 3, None))\n"
        "(1, 2, 3, None) ('mine', (1, 2, 3, None))\n"
        "(1, 2, 3, None) (1, 2, 3, None)\n"
        "shared ('Common', 1) True\n"
        "('spliced', ('Info', 2)) ('spliced', ('Info', 2)) ('Sub', 2)\n"
        "{'args': (1, 2, 3), 'mark': 'spliced'} {'args': (1, 2, 3)}\n"
        "('spliced', (1, 2, 3, None)) [('spliced', (1, 2, 3, None))]\n",
        result.out, result.show(),
    )


@check
def two_roles(context: Context) -> None:
    """a method in two roles: the later one's original is the earlier one's replacement"""
    lay(context)
    result = python(context, "import kvs_fixture.conn as conn\nprint(conn.Manager().shared())")
    equal("('spliced', ('spliced', 'shared'))\n", result.out, result.show())


@check
def originals_raise(context: Context) -> None:
    """an original's exception goes through, its traceback too"""
    lay(context, conn=CONN.replace("return 3", "raise ValueError('from inside')").replace("return (req, pages", "return (req.missing, pages"))
    script = """
        import kvs_fixture.conn as conn
        try:
            conn.Manager().send(1, 2, 3)
        except AttributeError as error:
            print(error)
        try:
            conn.Manager().send()
        except TypeError as error:
            print(error)
        conn.Receiver().poll()
    """
    equal(python(context, script, hooked=False).show(), python(context, script).show(), "with the library")


@check
def references(context: Context) -> None:
    """a million calls leave no object behind"""
    lay(context)
    result = python(context, """
        import gc, sys
        import kvs_fixture.conn as conn
        manager, request = conn.Manager(), object()
        def calls(count):
            for _ in range(count):
                manager.send(request, 2, executor=3)
                conn.Info.from_wire(request)
                conn.Receiver().poll()
        calls(100)
        before = sys.getrefcount(manager), sys.getrefcount(request), sys.getrefcount(None), sys.getallocatedblocks()
        calls(100000)
        after = sys.getrefcount(manager), sys.getrefcount(request), sys.getrefcount(None), sys.getallocatedblocks()
        print([abs(a - b) < 50 for a, b in zip(before, after)])
    """)
    equal("[True, True, True, True]\n", result.out, result.show())


FAILING = '''
import os
with open(os.environ["COUNT"], "a") as file:
    file.write("x")

def deep():
    raise RuntimeError("broken on purpose")

deep()
'''


@check
def failing_module(context: Context) -> None:
    """a module whose import fails: the stock traceback, executed once"""
    for raised in ("RuntimeError('broken on purpose')", "ImportError('no such thing')", "SystemExit(7)", "KeyboardInterrupt()"):
        lay(context, conn=FAILING.replace("RuntimeError('broken on purpose')", raised).replace('RuntimeError("broken on purpose")', raised))
        for statement in ("import kvs_fixture.conn", "from kvs_fixture import conn", "import importlib; importlib.import_module('kvs_fixture.conn')"):
            texts = []
            for hooked in (False, True):
                counter = context.write("count", "")
                texts.append(python(context, f"{statement}\n", hooked=hooked, COUNT=str(counter)).show())
                equal("x", counter.read_text(), f"{statement}, {raised}: times executed")
            equal(texts[0], texts[1], "with the library")


@check
def failing_then_good(context: Context) -> None:
    """an import that failed can be tried again, and is then hooked"""
    lay(context, conn=f"import os\nif os.environ.pop('FAIL', ''):\n    raise ValueError('not yet')\n{CONN}")
    result = python(context, f"""
        try:
            import kvs_fixture.conn
        except ValueError as error:
            print(error, error.__context__)
        import kvs_fixture.conn as conn
        {SHOW}
    """, FAIL="1")
    equal(f"not yet None\n{SPLICED}", result.out, result.show())


@check
def missing_module(context: Context) -> None:
    """a module that is not there: the stock error"""
    context.write("kvs_fixture/__init__.py", "")
    for statement in ("import kvs_fixture.conn", "from kvs_fixture.conn import Manager", "from kvs_fixture import conn"):
        equal(python(context, statement, hooked=False).show(), python(context, statement).show(), statement)
    (context.folder / "kvs_fixture" / "__init__.py").unlink()
    (context.folder / "kvs_fixture").rmdir()
    equal(python(context, "import kvs_fixture.conn", hooked=False).show(), python(context, "import kvs_fixture.conn").show(), "no package")


@check
def blocked_module(context: Context) -> None:
    """a module that was made unimportable (None in sys.modules): the stock error"""
    lay(context)
    script = "import sys\nsys.modules['kvs_fixture.conn'] = None\nimport stat\nimport kvs_fixture.conn\n"
    equal(python(context, script, hooked=False).show(), python(context, script).show(), "with the library")


@check
def other_audit_hooks(context: Context) -> None:
    """a Python audit hook that refuses the import is obeyed, and sees its events"""
    lay(context)
    script = """
        import sys
        def refuse(event, args):
            if event == "import" and args[0] == "kvs_fixture.conn":
                raise RuntimeError("refused by a hook")
        sys.addaudithook(refuse)
        import kvs_fixture.conn
    """
    stock, loaded = python(context, script, hooked=False), python(context, script)
    equal(stock.status, loaded.status, loaded.show())
    true("RuntimeError: refused by a hook" in loaded.err, loaded.show())


@every_hookable_python
def sub_interpreter(context: Context, interpreter: str) -> None:
    """a sub-interpreter is left alone, before and after the main one is hooked"""
    lay(context)
    result = python(context, f"""
        try:
            import _interpreters as interpreters
        except ImportError:
            import _xxsubinterpreters as interpreters
        code = "import sys; sys.path.insert(0, {str(context.folder)!r}); import kvs_fixture.conn as conn; import stat; print(conn.Receiver().poll(), flush=True)"
        def sub():
            number = interpreters.create()
            interpreters.run_string(number, code)
            interpreters.destroy(number)
        sub()
        import kvs_fixture.conn as conn
        print(conn.Receiver().poll(), flush=True)
        sub()
    """, interpreter)
    equal(f"3\n{SPLICED}3\n", result.out, result.show())


@check
def lines(context: Context) -> None:
    """one line when hooked, at the level info, and no other"""
    lay(context)
    script = "import kvs_fixture.conn, kvs_fixture.other\nimport kvs_fixture.conn\n"
    result = python(context, script, KVSPLICE_LOG="info")
    first, rest = result.err.split("\n", 1)
    true(re.fullmatch(HOOKED, first + "\n"), result.show())
    true(re.fullmatch(r"kvsplice\[\d+/-\] info: hook: kvsplice \S+ hooked other prefill of kvs_fixture .*\n", rest), result.show())
    for level in ("error", "warn"):
        equal("", python(context, script, KVSPLICE_LOG=level).err, f"KVSPLICE_LOG={level}")


@check
def option_lines(context: Context) -> None:
    """warnings about options and the table come once, when a connector is hooked"""
    lay(context)
    result = python(context, "print('before', flush=True)\nimport kvs_fixture.conn, kvs_fixture.other\n",
                    KVSPLICE_HELP="1", KVSPLICE_STAGING_MB="99999", KVSPLICE_TRANSPROT="host")
    for text in ("KVSPLICE_STAGING_MB=99999 is outside 1 to 4096; 4096 is used", "there is no variable KVSPLICE_TRANSPROT (maybe KVSPLICE_TRANSPORT?)",
                 "options (environment variables)"):
        equal(1, result.err.count(text), f"{text!r} in {result.err}")


@check
def kill_switch(context: Context) -> None:
    """KVSPLICE_ENABLE=0 hooks nothing and says nothing"""
    lay(context)
    result = python(context, f"import kvs_fixture.conn as conn\n{SHOW}", KVSPLICE_ENABLE="0", KVSPLICE_LOG="debug", KVSPLICE_HELP="1")
    equal("status 0\n--- output\n3\n--- error\n", result.show(), "with KVSPLICE_ENABLE=0")


@check
def import_system(context: Context) -> None:
    """the import system is as before: finders, loader, spec, path hooks"""
    lay(context)
    script = """
        import sys
        before = list(sys.meta_path), list(sys.path_hooks)
        import kvs_fixture.conn as conn
        print((sys.meta_path, sys.path_hooks) == before, conn.__spec__, sorted(vars(conn.__loader__)), conn.__spec__._initializing)
        print(sys.modules["kvs_fixture"].conn is conn, conn.__loader__.exec_module)
    """
    def without_addresses(text: str) -> str:
        return re.sub(r"0x[0-9a-f]+", "0x", text)
    equal(without_addresses(python(context, script, hooked=False).show()), without_addresses(python(context, script).show()), "with the library")


@check
def own_finders(context: Context) -> None:
    """a module that another finder or loader brings, one whose loader cannot be wrapped, and one from a zip file"""
    lay(context)
    head = """
        import importlib.abc, importlib.machinery, sys
        class Loader(importlib.abc.Loader):
            BODY
            def exec_module(self, module):
                exec(open("kvs_fixture/source").read(), vars(module))
        class Finder:
            def find_spec(self, name, path, target=None):
                if name == "kvs_fixture.conn":
                    return importlib.machinery.ModuleSpec(name, Loader())
        sys.meta_path.insert(0, Finder())
        sys.meta_path.append(Finder())
        before = list(sys.meta_path)
        import kvs_fixture.conn as conn
        print(conn.Receiver().poll(), sys.meta_path == before)
    """
    context.write("kvs_fixture/source", CONN)
    (context.folder / "kvs_fixture" / "conn.py").unlink()
    for body in ("pass", "__slots__ = ()", "def __setattr__(self, name, value): raise TypeError('frozen')"):
        result = python(context, head.replace("BODY", body))
        equal("('spliced', 3) True\n", result.out, f"{body}: {result.show()}")
    result = python(context, """
        import sys, zipfile
        with zipfile.ZipFile("pack.zip", "w") as pack:
            pack.write("kvs_fixture/__init__.py")
            pack.write("kvs_fixture/source", "kvs_fixture/conn.py")
            pack.write("kvs_fixture/other.py")
        sys.path.insert(0, "pack.zip")
        import kvs_fixture.conn as conn, kvs_fixture.other as other
        print(conn.__loader__.archive, conn.Receiver().poll(), other.Other().work())
    """)
    equal("pack.zip ('spliced', 3) ('spliced', 'worked')\n", result.out, result.show())
