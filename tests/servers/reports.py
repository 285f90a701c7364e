# SPDX-License-Identifier: Apache-2.0
"""What the library says about the rooms that it served, read from a server's log."""
from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(r"kvsplice\[\d+/\S+\] info: kvs_room_report: room (?P<room>\d+) (?P<end>\w+)(?::(?P<rest>.*))?")
_PAIR = re.compile(r"(\w+)=([^\s(),;]+)")


@dataclass(frozen=True)
class Report:
    """One rank's part of one room."""
    room: int
    end: str                    # done, or how else it ended
    values: dict[str, str]

    def number(self, name: str) -> float:
        try:
            return float(self.values.get(name, "0"))
        except ValueError:
            return 0.0


@dataclass(frozen=True)
class Summary:
    """A room, over the ranks of the decode."""
    ends: frozenset[str]
    routes: tuple[str, ...]
    bytes: int
    copies: int
    milliseconds: float         # of the slowest rank

    def done(self) -> bool:
        return self.ends == {"done"}


def reports(log: Path) -> list[Report]:
    found = []
    for match in _LINE.finditer(log.read_text(errors="replace")):
        found.append(Report(int(match["room"]), match["end"], dict(_PAIR.findall(match["rest"] or ""))))
    return found


def summary(log: Path, room: int) -> Summary:
    own = [report for report in reports(log) if report.room == room]
    return Summary(frozenset(report.end for report in own),
                   tuple(sorted({report.values["route"] for report in own if "route" in report.values})),
                   int(sum(report.number("bytes") for report in own)),
                   int(sum(report.number("copies") for report in own)),
                   max((report.number("ms") for report in own), default=0.0))
