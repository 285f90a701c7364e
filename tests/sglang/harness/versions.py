# SPDX-License-Identifier: Apache-2.0
"""The library as another version of it would be: built from this tree with some lines changed."""
from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from .processes import ROOT

# file, what is there, what a later version has in its place
LATER = (
    ("CMakeLists.txt", "project(kvsplice VERSION 0.1.0 ", "project(kvsplice VERSION 0.2.0 "),
    ("transport/record.h", "#define KVS_RECORD_MINOR 0", "#define KVS_RECORD_MINOR 1"),
    ("transport/record.h", "\tuint32_t transports; /*", "\tuint32_t transports;\n\tuint8_t later[40]; /*"),
    ("transport/record.h", "sizeof(struct kvs_record) == 168", "sizeof(struct kvs_record) == 208"),
    ("transport/record.c", "record.size < sizeof(record)", "record.size < 168"),
)
OTHER_PROTOCOL = (
    ("CMakeLists.txt", "project(kvsplice VERSION 0.1.0 ", "project(kvsplice VERSION 0.3.0 "),
    ("transport/wire.h", "#define KVS_WIRE_VERSION 1", "#define KVS_WIRE_VERSION 2"),
)


def built(name: str, changes: tuple[tuple[str, str, str], ...]) -> Path:
    """The changed library, in .cache/; only what has changed since the last time is built again."""
    tree = ROOT / ".cache" / "versions" / name
    tree.mkdir(parents=True, exist_ok=True)
    sources = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True,
                             stdout=subprocess.PIPE, text=True).stdout.splitlines()
    for source in filter(lambda name: (ROOT / name).is_file(), sources):
        text = (ROOT / source).read_bytes()
        for path, before, after in changes:
            if path == source:
                if before.encode() not in text:
                    raise RuntimeError(f"{path} no longer has '{before}', which the version {name} changes")
                text = text.replace(before.encode(), after.encode())
        target = tree / source
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_bytes() != text:
            target.write_bytes(text)
            shutil.copymode(ROOT / source, target)
    for command in (["cmake", "-S", ".", "-B", "build", "-G", "Ninja"], ["cmake", "--build", "build", "--target", "kvsplice"]):
        subprocess.run(command, cwd=tree, check=True, stdout=subprocess.DEVNULL)
    return tree / "build" / "libkvsplice.so"
