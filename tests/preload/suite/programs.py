# SPDX-License-Identifier: Apache-2.0
"""Programs that are no server: the same output, error text and exit status with the library as without."""
from __future__ import annotations

import glob
import os
import re
from typing import List

from .check import ROOT, Context, Waived, check, equal, program, true


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
def builder(context: Context) -> None:
    """ninja: a build that works, one that fails, one that is not there"""
    ninja = program("ninja")
    context.write("build.ninja", """
        rule copy
          command = cp $in $out
        rule fail
          command = echo failing >&2; exit 3
        build copied: copy good
        build broken: fail good
        default copied
    """)
    context.write("good", "text\n")
    for target, status in (("copied", 0), ("broken", 1), ("missing", 1)):
        result = context.same(["sh", "-c", f"rm -rf copied .ninja*; {ninja} {target}"])
        true((result.status == 0) == (status == 0), f"{target}: {result.show()}")


@check
def downloader(context: Context) -> None:
    """curl: its version, a file, a server that is not there"""
    curl = program("curl")
    context.write("page", "text\n")
    context.same([curl, "--version"])
    equal("text\n", context.same([curl, "-sS", f"file://{context.folder}/page"]).out, "the file")
    equal(7, context.same([curl, "-sS", "http://127.0.0.1:1/"]).status, "curl's status")


@check
def loader_cache(context: Context) -> None:
    """ldconfig: its list, a wrong option"""
    if not os.access("/sbin/ldconfig", os.X_OK):
        raise Waived("there is no /sbin/ldconfig")
    true("libc.so.6" in context.same(["/sbin/ldconfig", "-p"]).out, "libc is listed")
    context.same(["/sbin/ldconfig", "--no-such-option"])


@check
def archiver(context: Context) -> None:
    """tar with gzip: what is packed is unpacked"""
    program("gzip")
    context.write("in/file", "text\n")
    tar = program("tar")
    equal("text\n", context.same([program("sh"), "-c", f"{tar} -czf out.tgz in && {tar} -xzOf out.tgz in/file"]).out, "the file")


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
def go_program(context: Context) -> None:
    """a static program in Go: shfmt formats a script, and refuses one"""
    shfmt = ROOT / ".cache/launch/go/bin/shfmt"
    if not shfmt.exists():
        raise Waived("no static Go program is installed (scripts/environment --for launch)")
    context.write("good.sh", "if true;then echo hello;fi\n")
    context.write("bad.sh", "if (\n")
    equal("if true; then echo hello; fi\n", context.same([shfmt, "good.sh"]).out, "the script")
    equal(1, context.same([shfmt, "bad.sh"]).status, "its status")


@check
def lookups(context: Context) -> None:
    """dlsym in the default order, after the program, and in a library: the same from any path of ours"""
    built = context.compile("lookups.c", "-ldl")
    driver = context.compile("few_cuda.c", "-Wl,-soname,libcuda.so.1", shared=True)
    stand_in = context.folder / "drivers" / "libcuda.so.1"
    stand_in.parent.mkdir()
    driver.rename(stand_in)
    odd = context.folder / "with space: and $ODD"
    odd.mkdir()
    (odd / "copy.so").write_bytes(context.library.read_bytes())
    (odd / "link.so").symlink_to(context.library)
    command = [built, "libc.so.6", "libcuda.so.1", "libnothing.so.1"]
    plain = context.run(command, cwd=odd, LD_LIBRARY_PATH=str(stand_in.parent))
    true("libcuda.so.1 cuGetProcAddress: libcuda.so.1, no error\n" in plain.out and plain.status == 8, plain.show())
    for path in ("./copy.so", "./link.so", str(context.library)):
        equal(plain.show(), context.run(command, [path], cwd=odd, LD_LIBRARY_PATH=str(stand_in.parent)).show(), path)
    code = "import ctypes; d = ctypes.CDLL('libcuda.so.1'); print(d.cuGetProcAddress(b'cuInit', ctypes.byref(ctypes.c_void_p()), 12000, 0), hasattr(d, 'cuInit'))"
    for path in ("./copy.so", "./link.so", str(context.library)):
        result = context.run([program("python3"), "-c", code], [path], cwd=odd, LD_LIBRARY_PATH=str(stand_in.parent))
        equal("status 0\n--- output\n500 False\n--- error\n", result.show(), path)


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
