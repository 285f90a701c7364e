# SPDX-License-Identifier: Apache-2.0
"""scripts/kvsplice: run and options."""
from __future__ import annotations

import os
import re
import shutil
import stat
from pathlib import Path
from typing import Optional, Sequence

from .check import ROOT, Context, Result, Waived, check, equal, program, true
from .fixture import lay, python

KVSPLICE = ROOT / "scripts" / "kvsplice"


def kvsplice(context: Context, *words: object, script: Path = KVSPLICE, library: Optional[Path] = None, preload: Sequence[object] = (), **extra: str) -> Result:
    first, *rest = words
    return context.run([script, first, "--library", library or context.library, *rest], preload, **extra)


def refused(result: Result, status: int, text: str) -> None:
    equal(status, result.status, result.show())
    true(result.err.startswith("kvsplice: ") and text in result.err and result.err.count("\n") == 1, f"{text!r}: {result.show()}")


@check
def runs(context: Context) -> None:
    """run: arguments, input, output and exit status are the command's"""
    result = kvsplice(context, "run", "--", "sh", "-c", 'echo "$LD_PRELOAD|$1|$2"; echo error >&2; exit 7', "sh", "a b", "--library")
    equal(f"status 7\n--- output\n{context.library}|a b|--library\n--- error\nerror\n", result.show(), "sh")
    equal("x\n", kvsplice(context, "run", "echo", "x").out, "without --")
    lay(context)
    context.write("use.py", "import kvs_fixture.conn as conn\nprint(conn.Receiver().poll())\n")
    result = kvsplice(context, "run", "--", "python3", "use.py", library=context.fixture)
    equal("status 0\n--- output\n('spliced', 3)\n--- error\n", result.show(), "python3")


@check
def keeps_others(context: Context) -> None:
    """run: what is preloaded stays, ours stands first and once"""
    second = context.compile("second.c", shared=True)
    shows = ["--", "sh", "-c", "echo $LD_PRELOAD"]
    result = kvsplice(context, "run", *shows, preload=[second])
    equal(":".join(map(str, [context.library, *context.before, second])) + "\n", result.out, result.show())
    for listed in ([second, context.library], [context.library]):
        result = kvsplice(context, "run", *shows, preload=listed)
        equal(":".join(map(str, [*context.before, *listed])) + "\n", result.out, result.show())


@check
def verbose(context: Context) -> None:
    """run --verbose: says what it preloads, and the library what it hooks"""
    lay(context)
    context.write("use.py", "import kvs_fixture.conn\n")
    result = kvsplice(context, "run", "--verbose", "--", "python3", "use.py", library=context.fixture)
    for text in (f"kvsplice: library {context.fixture}\n", f"kvsplice: LD_PRELOAD={context.fixture}\n", "kvsplice: python3 is run by /", "info: hook: kvsplice "):
        true(text in result.err, f"{text!r}: {result.show()}")
    quiet = kvsplice(context, "run", "--verbose", "--", "python3", "use.py", library=context.fixture, KVSPLICE_LOG="error")
    true("info:" not in quiet.err, quiet.show())


@check
def refuses(context: Context) -> None:
    """run: setuid, setgid, static, musl and foreign programs, with the reason"""
    true_copy = context.folder / "copy"
    for bit, name in ((stat.S_ISUID, "setuid"), (stat.S_ISGID, "setgid")):
        shutil.copy(program("true"), true_copy)
        true_copy.chmod(0o755 | bit)
        refused(kvsplice(context, "run", "--", true_copy), 2, f"is a {name} program")
    static = context.compile("quiet.c", "-static", "-DSTATIC")
    refused(kvsplice(context, "run", "--", static), 2, "is statically linked")
    musl = context.compile("second.c", "-Wl,--dynamic-linker=/lib/ld-musl-x86_64.so.1", "-Wl,-e,0", "-nostartfiles")
    refused(kvsplice(context, "run", "--", musl), 2, "is linked with musl (/lib/ld-musl-x86_64.so.1)")
    image = bytearray(Path(program("true")).resolve().read_bytes())
    image[18:20] = b"\x28\x00"
    true_copy.write_bytes(image)
    true_copy.chmod(0o755)
    refused(kvsplice(context, "run", "--", true_copy), 2, "is for another kind of machine")


@check
def refuses_through_scripts(context: Context) -> None:
    """run: a script is judged by its interpreter"""
    static = context.compile("quiet.c", "-static", "-DSTATIC")
    script = context.write("script", f"#!{static} -x\n")
    script.chmod(0o755)
    refused(kvsplice(context, "run", "--", script), 2, "is statically linked")
    script.write_text("#!/usr/bin/env -S sh -e\necho ran; exit 3\n")
    equal("status 3\n--- output\nran\n--- error\n", kvsplice(context, "run", "--", script).show(), "a shell script")


@check
def wrong_use(context: Context) -> None:
    """run: no such command, no such library, nothing to run"""
    refused(kvsplice(context, "run", "--", "kvs-no-such-command"), 127, "kvs-no-such-command: command not found")
    plain = context.write("plain", "text\n")
    refused(kvsplice(context, "run", "--", plain), 126, "is not an executable file")
    refused(kvsplice(context, "run", "--", "true", library=Path("/nonexistent/lib.so")), 2, "there is no such file")
    refused(kvsplice(context, "run", "--", "true", library=plain), 2, "is no shared library")
    refused(kvsplice(context, "run"), 2, "nothing to run")
    equal(2, context.run([KVSPLICE]).status, "no command")
    equal(2, context.run([KVSPLICE, "walk"]).status, "an unknown command")
    for words in (["--help"], ["run", "--help"], ["options", "--help"], ["ps", "--help"]):
        result = context.run([KVSPLICE, *words])
        true(result.status == 0 and "usage: kvsplice" in result.out, result.show())


@check
def odd_places(context: Context) -> None:
    """run: a library in a folder with a space or a colon is preloaded through a link"""
    lay(context)
    context.write("use.py", "import kvs_fixture.conn as conn\nprint(conn.Receiver().poll())\n")
    temporary = context.folder / "tmp"
    temporary.mkdir()
    for name in ("with space", "with:colon"):
        library = context.folder / name / "libkvsplice.so"
        library.parent.mkdir()
        shutil.copy(context.fixture, library)
        for _ in range(2):
            result = kvsplice(context, "run", "--", "python3", "use.py", library=library, TMPDIR=str(temporary))
            equal("status 0\n--- output\n('spliced', 3)\n--- error\n", result.show(), name)
    made = temporary / f"kvsplice-{os.getuid()}"
    made.chmod(0o777)
    refused(kvsplice(context, "run", "--", "true", library=context.folder / "with space" / "libkvsplice.so", TMPDIR=str(temporary)), 2, "only you can write")


FAMILY = """
import os, subprocess, sys
SLEEP = [sys.executable, "-c", "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()", "a(b) c"]
def start(value):
    # Through a shell, which stays between the two.
    child = subprocess.Popen(["sh", "-c", '"$@"; exit $?', "sh", *SLEEP], env={**os.environ, "LD_PRELOAD": value}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return child, child.stdout.readline().strip().decode()
children = [start(value) for value in sys.argv[3:]]
print(os.getpid(), *(number for _, number in children), flush=True)
print(subprocess.run([sys.argv[1], sys.argv[2], "--width", "30"], stdout=subprocess.PIPE, universal_newlines=True).stdout)
for child, _ in children:
    child.communicate()
"""


@check
def processes(context: Context) -> None:
    """ps: processes with the library, and a child that was started without, with the list that it had"""
    kept = ":".join([*context.before, "/nonexistent/other.so", str(context.library)])
    script = context.write("family.py", FAMILY)
    for dropped, told in (("/nonexistent/other.so", "/nonexistent/other.so"), ("", "(empty)")):
        result = context.run([program("python3"), script, KVSPLICE, "ps", kept, dropped], [context.library])
        numbers, head, *rows = result.out.splitlines()
        parent, good, bad = numbers.split()
        equal(["PID", "PARENT", "LIBRARY", "COMMAND"], head.split(), result.show())
        found = {row.split()[0]: row.split() for row in rows if row.split()[:1] and row.split()[0].isdigit()}
        equal("yes", found[parent][2], result.show())
        equal("yes", found[good][2], result.show())
        equal("NO", found[bad][2], result.show())
        row = next(number for number, line in enumerate(rows) if line.split()[:1] == [bad])
        equal(f"started with LD_PRELOAD={told}: keep libkvsplice.so in that list", rows[row + 1].strip(), result.show())
    alone = context.run([KVSPLICE, "ps"])
    true(alone.status in (0, 1) and "Traceback" not in alone.err, alone.show())


@check
def installed(context: Context) -> None:
    """an installed kvsplice finds its library and its options"""
    if not (context.library.parent / "kvsplice-options").is_file():
        raise Waived("the library has no kvsplice-options beside it")
    for libraries in ("lib", "lib64", "lib/x86_64-linux-gnu"):
        prefix = context.folder / f"prefix {libraries.replace('/', '-')}"
        home = prefix / libraries / "kvsplice"
        home.mkdir(parents=True)
        (prefix / "bin").mkdir()
        shutil.copy(KVSPLICE, prefix / "bin" / "kvsplice")
        for name in ("libkvsplice.so", "kvsplice-options"):
            shutil.copy(context.library.parent / name, home / name)
        command = prefix / "bin" / "kvsplice"
        result = context.run([command, "run", "--verbose", "--", "true"], TMPDIR=str(context.folder))
        true(result.status == 0 and f"kvsplice: library {home}/libkvsplice.so\n" in result.err, result.show())
        true("KVSPLICE_ENABLE" in context.run([command, "options"]).out, "options")
        true(re.fullmatch(r"kvsplice \d+\.\d+\.\d+\n", context.run([command, "--version"]).out), "--version")
    (home / "libkvsplice.so").unlink()
    refused(context.run([command, "run", "--", "true"]), 2, "libkvsplice.so is in none of")


@check
def options_table(context: Context) -> None:
    """options: what KVSPLICE_HELP=1 prints, and what the README shows"""
    if not (context.library.parent / "kvsplice-options").is_file():
        raise Waived("the library has no kvsplice-options beside it")
    table = kvsplice(context, "options").out
    lay(context)
    spoken = python(context, "import kvs_fixture.conn\n", KVSPLICE_HELP="1")
    equal(table, spoken.err, "KVSPLICE_HELP=1")
    names = set(re.findall(r"KVSPLICE_[A-Z_]+", table))
    markdown = kvsplice(context, "options", "--markdown").out
    equal(names, set(re.findall(r"KVSPLICE_[A-Z_]+", markdown)), "variables of the Markdown table")
    found = re.search(r"<!-- options: [^\n]* -->\n(.*?)<!-- /options -->", (ROOT / "README.md").read_text(), re.S)
    if found and found.group(1).strip():
        equal(markdown.strip(), found.group(1).strip(), "the README's table (scripts/kvsplice options --markdown)")
