# SPDX-License-Identifier: Apache-2.0
"""Checks, how they are run and counted, and what they share."""
from __future__ import annotations

import argparse
import concurrent.futures
import copy
import difflib
import os
import shutil
import subprocess
import tempfile
import textwrap
import time
import traceback
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = ROOT / "tests" / "preload" / "programs"


class Failed(Exception):
    """The check found something wrong; the text says what."""


class Waived(Exception):
    """The check cannot run here; the text says why."""


class Result(NamedTuple):
    status: int
    out: str
    err: str

    def show(self) -> str:
        return f"status {self.status}\n--- output\n{self.out}--- error\n{self.err}"


class Context:
    """The libraries under test, and a folder of the running check's own."""

    def __init__(self, library: Path, fixture: Path, before: Sequence[str]) -> None:
        self.library = library
        self.fixture = fixture
        self.before = list(before)
        self.folder = Path()

    def environment(self, preload: Sequence[object] = (), **extra: Optional[str]) -> Dict[str, str]:
        """This process's environment without a preload or options of ours, then what is given; None takes out."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVSPLICE_", "LD_", "PYTHON"))}
        # What a killed process leaves behind goes with the folder.
        kept["TMPDIR"] = str(self.folder)
        if preload:
            kept["LD_PRELOAD"] = ":".join([*self.before, *map(str, preload)])
        for name, value in extra.items():
            kept.pop(name, None)
            if value is not None:
                kept[name] = value
        return kept

    def run(self, command: Sequence[object], preload: Sequence[object] = (), cwd: Optional[Path] = None, **extra: Optional[str]) -> Result:
        done = subprocess.run(
            [str(word) for word in command], cwd=cwd or self.folder, env=self.environment(preload, **extra),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120, check=False,
        )
        return Result(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))

    def same(self, command: Sequence[object], others: Sequence[object] = (), library: Optional[Path] = None, **extra: Optional[str]) -> Result:
        """Run without and with the library (in front of the others): output, error text and status must be equal."""
        plain = self.run(command, others, **extra)
        loaded = self.run(command, [library or self.library, *others], **extra)
        equal(plain.show(), loaded.show(), "with the library")
        return plain

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def compile(self, source: str, *flags: str, shared: bool = False) -> Path:
        """Build one of the small C programs beside this suite."""
        target = self.folder / (Path(source).stem + (".so" if shared else ""))
        kind = ["-shared", "-fPIC"] if shared else []
        command = ["gcc", "-O1", "-Wall", *kind, str(PROGRAMS / source), "-o", str(target), *flags]
        built = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        if built.returncode:
            raise Failed(f"{' '.join(command)}: {built.stdout.decode(errors='replace')}")
        return target


def equal(expected: object, found: object, what: str) -> None:
    if expected == found:
        return
    if isinstance(expected, str) and isinstance(found, str) and "\n" in expected:
        lines = difflib.unified_diff(expected.splitlines(), found.splitlines(), "expected", "found", lineterm="")
        raise Failed(f"{what}: not the same\n" + "\n".join(lines))
    raise Failed(f"{what}: expected {expected!r}, found {found!r}")


def true(condition: object, what: str) -> None:
    if not condition:
        raise Failed(what)


def program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise Waived(f"{name} is not installed")
    return path


Check = Callable[[Context], None]
checks: List[Tuple[str, Check]] = []
measuring: List[Check] = []


def check(function: Check) -> Check:
    """Register a check; its docstring's first line is its name."""
    module = function.__module__.rsplit(".", 1)[-1]
    checks.append((f"{module}: {(function.__doc__ or function.__name__).splitlines()[0]}", function))
    return function


def measures(function: Check) -> Check:
    """Mark a check that measures time: it runs when no other does."""
    measuring.append(function)
    return function


def build_fixture(library: Path) -> Path:
    """The library with the tests' own connectors, from the build folder that the library is in."""
    folder = library.parent
    if not (folder / "CMakeCache.txt").is_file():
        raise SystemExit(f"{folder} is no build folder: give --fixture PATH")
    command = ["cmake", "--build", str(folder), "--target", "kvsplice-fixture"]
    built = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if built.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{built.stdout.decode(errors='replace')}")
    return folder / "tests" / "preload" / "libkvsplice-fixture.so"


def run_one(shared: Context, name: str, function: Check) -> str:
    started = time.monotonic()
    context = copy.copy(shared)
    with tempfile.TemporaryDirectory(prefix="kvsplice-preload-") as folder:
        context.folder = Path(folder)
        try:
            function(context)
            outcome, detail = "ok", ""
        except Waived as reason:
            outcome, detail = "WAIVED", f": {reason}"
        except Failed as reason:
            outcome, detail = "FAIL", "\n" + textwrap.indent(str(reason), "      ")
        except Exception:  # a broken check is a failed one, and the others still run
            outcome, detail = "FAIL", "\n" + textwrap.indent(traceback.format_exc(), "      ")
    print(f"  {outcome:6} {name} ({time.monotonic() - started:.1f} s){detail}", flush=True)
    return outcome


def run_all(context: Context, chosen: Sequence[Tuple[str, Check]]) -> List[str]:
    """As many at once as there are processors: most of them wait for one process at a time."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        running = [pool.submit(run_one, context, name, function) for name, function in chosen if function not in measuring]
        outcomes = [one.result() for one in running]
    return outcomes + [run_one(context, name, function) for name, function in chosen if function in measuring]


def main(description: Optional[str]) -> int:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--library", type=Path, default=ROOT / "build" / "libkvsplice.so", metavar="PATH", help="the library under test (default: build/libkvsplice.so)")
    parser.add_argument("--fixture", type=Path, metavar="PATH", help="the library with the tests' own connectors (default: built in the library's build folder)")
    parser.add_argument("--before", action="append", default=[], metavar="PATH", help="preload this in front of everything, such as a sanitizer's runtime")
    parser.add_argument("--only", default="", metavar="TEXT", help="run the checks whose names have this text")
    options = parser.parse_args()
    library = options.library.absolute()
    if not library.is_file():
        print(f"there is no {library}: build it, or give --library PATH")
        return 2
    fixture = options.fixture.absolute() if options.fixture else build_fixture(library)
    context = Context(library, fixture, options.before)
    outcomes = run_all(context, [(name, function) for name, function in checks if options.only in name])
    passed, failed, skipped = (outcomes.count(kind) for kind in ("ok", "FAIL", "WAIVED"))
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 1 if failed or not passed else 0
