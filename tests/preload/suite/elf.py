# SPDX-License-Identifier: Apache-2.0
"""What the built library needs, exports and asks of the loader, read from the file."""
from __future__ import annotations

import re
from typing import List, Set

from .check import Context, Failed, check, equal, program, true


def readelf(context: Context, *options: str) -> str:
    return context.run([program("readelf"), "--wide", *options, context.library]).out


def dynamic(context: Context, tag: str) -> List[str]:
    return re.findall(rf"\({tag}\)\s+(.*)", readelf(context, "--dynamic"))


def symbols(context: Context) -> List[List[str]]:
    """The rows of the dynamic symbol table: number, value, size, type, binding, visibility, section, name."""
    rows = [line.split() for line in readelf(context, "--dyn-syms").splitlines()]
    return [row for row in rows if len(row) >= 8 and row[0].rstrip(":").isdigit()]


@check
def needed(context: Context) -> None:
    """needs libc alone"""
    found: Set[str] = {re.sub(r".*\[(.*)\].*", r"\1", text) for text in dynamic(context, "NEEDED")}
    extra = {name for name in found - {"libc.so.6"} if not name.startswith("ld-linux")}
    true("libc.so.6" in found and not extra, f"needed: {sorted(found)}")


@check
def exported(context: Context) -> None:
    """exports nothing but its version node"""
    defined = [row[7].split("@")[0] for row in symbols(context) if row[6] != "UND"]
    equal(["KVSPLICE_1"], defined, "defined dynamic symbols")


@check
def undefined(context: Context) -> None:
    """asks for no symbol but libc's"""
    for row in symbols(context):
        if row[6] != "UND":
            continue
        weak = row[4] == "WEAK"  # the compiler's own optional ones
        if not weak and "@GLIBC_" not in row[7]:
            raise Failed(f"undefined symbol {row[7]}")


@check
def flags(context: Context) -> None:
    """is bound at once, read-only afterwards, never unloaded"""
    words = " ".join(dynamic(context, "FLAGS") + dynamic(context, "FLAGS_1"))
    for word in ("NOW", "NODELETE"):
        true(re.search(rf"\b{word}\b", words), f"flags {words!r} lack {word}")
    headers = readelf(context, "--program-headers")
    true("GNU_RELRO" in headers, "no GNU_RELRO segment")
    stack = re.search(r"GNU_STACK\s.*", headers)
    true(stack and "E" not in stack.group(0).split()[-2], "the stack is executable")
    true(not dynamic(context, "TEXTREL"), "has text relocations")
    true(not dynamic(context, "RPATH") and not dynamic(context, "RUNPATH"), "has a run path")
