# SPDX-License-Identifier: Apache-2.0
"""Programs that are no server: the same output, error text and exit status with the library as without."""
from __future__ import annotations

import glob
import os
import re
from typing import List

from .check import Context, Waived, check, equal, program, true


@check
def shell(context: Context) -> None:
    """bash: pipes, subshells, exit status, error text"""
    bash = program("bash")
    context.same([bash, "-c", "printf 'b\\na\\n' | sort | (cat; echo end) ; ls /nonexistent; echo $((6*7)); exit 7"])
    context.same([bash, "-c", "kill -TERM $$"])
    context.same([bash, "-c", "syntax ("])


@check
def git(context: Context) -> None:
    """git: a repository, a commit, its log"""
    program("git")
    script = """
        set -e
        rm -rf repo; git init -q repo; cd repo; echo text > file; git add file
        git -c user.name=a -c user.email=a@b commit -q -m first; git log --format='%H %s'; git status --short
        git show nothing
    """
    stamps = {"GIT_AUTHOR_DATE": "2020-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2020-01-01T00:00:00Z"}
    result = context.same(["sh", "-c", script], **stamps)
    equal(128, result.status, "git show nothing")


@check
def compiler(context: Context) -> None:
    """gcc: a program that compiles and runs, and one that does not"""
    context.write("good.c", "#include <stdio.h>\nint main(void) { puts(\"hello\"); return 3; }\n")
    context.write("bad.c", "int main(void) { return x; }\n")
    equal(3, context.same(["sh", "-c", "gcc good.c -o good && ./good"]).status, "the program's status")
    equal(1, context.same([program("gcc"), "bad.c"]).status, "gcc's status")


@check
def tools(context: Context) -> None:
    """ninja, ldconfig, curl, tar: quiet and unchanged"""
    for command in (["ninja", "--version"], ["/sbin/ldconfig", "-p"], ["curl", "--version"], ["tar", "-cf", "/dev/null", "/etc/hostname"]):
        if command[0].startswith("/") or any(os.access(os.path.join(p, command[0]), os.X_OK) for p in os.get_exec_path()):
            context.same(command)


@check
def cuda_tools(context: Context) -> None:
    """ptxas and nvcc, children that a GPU server starts"""
    found = [path for name in ("ptxas", "nvcc") for path in glob.glob(f"/usr/local/cuda*/bin/{name}")]
    if not found:
        raise Waived("no CUDA toolkit in /usr/local/cuda*/bin")
    context.write("kernel.ptx", ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry k() { ret; }\n")
    for path in found:
        context.same([path, "--version"])
        if path.endswith("ptxas"):
            equal(0, context.same([path, "kernel.ptx", "-o", "/dev/null"]).status, "ptxas")


@check
def static_program(context: Context) -> None:
    """a static binary"""
    built = context.compile("quiet.c", "-static", "-DSTATIC")
    context.same([built])


@check
def undisturbed(context: Context) -> None:
    """errno, dlerror, threads, descriptors and signals in main are as without"""
    built = context.compile("quiet.c", "-ldl")
    result = context.same([built])
    true("threads 1" in result.out and "dlerror none" in result.out, result.show())


def jemalloc() -> str:
    found = glob.glob("/usr/lib/*/libjemalloc.so.2") + glob.glob("/usr/lib*/libjemalloc.so.2")
    if not found:
        raise Waived("libjemalloc.so.2 is not installed")
    return found[0]


@check
def other_allocator(context: Context) -> None:
    """under jemalloc, before and after ours"""
    other = jemalloc()
    busy = "x = [bytes(i) for i in range(5000)]; print(len(x)); raise SystemExit(4)"
    for command in (["bash", "-c", "echo hello; exit 2"], [program("python3"), "-c", busy]):
        plain = context.run(command, [other])
        for order in ([context.library, other], [other, context.library]):
            equal(plain.show(), context.run(command, order).show(), "under jemalloc")


@check
def second_preload(context: Context) -> None:
    """with a second preload before and after ours, its constructor and destructor speaking"""
    second = context.compile("second.c", shared=True)
    for command in (["bash", "-c", "echo hello; exit 5"], [program("python3"), "-c", "import json; print(json.dumps([1]))"]):
        plain = context.run(command, [second])
        true("second: ready" in plain.err, plain.show())
        for order in ([context.library, second], [second, context.library]):
            equal(plain.show(), context.run(command, order).show(), "with a second preload")


def looked_up(context: Context, command: List[object], **extra: str) -> List[str]:
    """The Python symbols that the library asked the loader for."""
    log = context.folder / "loader"
    context.run(command, [context.library], LD_DEBUG="symbols", LD_DEBUG_OUTPUT=str(log), **extra)
    text = "".join(path.read_text(errors="replace") for path in context.folder.glob("loader.*"))
    for path in context.folder.glob("loader.*"):
        path.unlink()
    return re.findall(r"symbol=(Py\w+);  lookup in file=/bin/true|symbol=(PySys_AddAuditHook);", text)


@check
def kill_switch(context: Context) -> None:
    """KVSPLICE_ENABLE=0: nothing looked up"""
    true(looked_up(context, ["/bin/true"]), "without the switch PySys_AddAuditHook should be looked up")
    for value in ("0", "off", "no", "false"):
        equal([], looked_up(context, ["/bin/true"], KVSPLICE_ENABLE=value), f"KVSPLICE_ENABLE={value}")
    true(looked_up(context, ["/bin/true"], KVSPLICE_ENABLE="1"), "KVSPLICE_ENABLE=1 is on")
    true(looked_up(context, ["/bin/true"], KVSPLICE_ENABLE=""), "an empty variable is an unset one")


@check
def silent(context: Context) -> None:
    """says nothing in a process without a connector, whatever the options"""
    for command in (["/bin/true"], [program("python3"), "-c", "pass"]):
        result = context.run(command, [context.library], KVSPLICE_HELP="1", KVSPLICE_LOG="debug", KVSPLICE_TYPO="x", KVSPLICE_STAGING_MB="-1")
        equal("status 0\n--- output\n--- error\n", result.show(), str(command[0]))


@check
def kept_for_children(context: Context) -> None:
    """LD_PRELOAD is left as found, for children too"""
    second = context.compile("second.c", shared=True)
    value = f"{context.library}:{second}"
    code = "import os, subprocess; print(os.environ['LD_PRELOAD']); subprocess.run(['sh', '-c', 'echo $LD_PRELOAD'])"
    result = context.run([program("python3"), "-u", "-c", code], [context.library, second])
    true(result.out.splitlines() == [":".join([*context.before, value])] * 2, result.show())
