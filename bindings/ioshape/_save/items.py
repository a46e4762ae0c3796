# SPDX-License-Identifier: Apache-2.0
"""Examined checkpoints that consist of many archives, of several processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ioshape._core.context import current, encoded
from ioshape._core.errors import last_failure
from ioshape._core.report import ALARMS
from ioshape._core.structs import Owner, said
from ioshape._native import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Set

    from ioshape._load.reader import Reader

#: The names of the tensors that raised an alarm, by the name of the rule. The rule "unchanged"
#: names none.
Alarms = dict[str, list[str]]


class Verdict(NamedTuple):
    """The result of judging the tensors of one or several processes."""

    alarms: Alarms
    #: the first alarm as a sentence; "" if there is none
    alarm: str
    #: struct save_standstill
    still: int
    moves: int
    before: str


class Items(Owner):
    """The tensors that this process saves to, or loads from, a checkpoint."""

    def __init__(self, path: str) -> None:
        context = current()
        super().__init__("items", path, context)
        self._path = path
        if lib.save_items_make(context.pointer, encoded(path), self._out):
            raise last_failure(path, "save")

    @property
    def pointer(self) -> object:
        """The C object."""
        return self._pointer

    def judge(self) -> Verdict:
        """Judge the saved tensors by all rules but "unchanged". Raise what a failing rule finds."""
        found = ffi.new("struct save_verdict *")
        if lib.save_items_judge(self._pointer, found):
            raise last_failure(self._path, "save")
        alarms: Alarms = {rule: [] for bit, rule in ALARMS.items() if found.alarms & bit}
        next_, bits = ffi.new("uint64_t *"), ffi.new("uint32_t *")
        while name := lib.save_items_alarm(self._pointer, next_, bits):
            for rule in (rule for bit, rule in ALARMS.items() if bits[0] & bit):
                alarms[rule].append(said(name))
        one = found.standstill
        return Verdict(alarms, said(found.alarm), one.still, one.moves, said(one.before))

    def add_loaded(self, reader: Reader, name: str, alarms: Mapping[str, Set[str]]) -> None:
        """Add the tensor of an archive that was loaded."""
        bits = sum(bit for bit, rule in ALARMS.items() if name in alarms.get(rule, ()))
        reader.add_to(self._pointer, name, bits)

    def remember(self, alarms: Iterable[str]) -> None:
        """Compare the next save with what was loaded. The rules `alarms` had found something."""
        bits = sum(bit for bit, rule in ALARMS.items() if rule in alarms)
        lib.save_items_loaded(self._pointer, bits)


def judge_together(path: str, verdicts: Iterable[Verdict]) -> Verdict:
    """Unite the verdicts of all processes, and judge by the rule "unchanged".

    A process may save only tensors that stand still for a good reason, such as frozen ones. So this
    rule needs all of them. Raise a StorageError if it finds something and fails saves.
    """
    alarms: Alarms = {}
    still, moves, alarm, before = 0, 0, "", ""
    for one in verdicts:
        for rule, names in one.alarms.items():
            alarms.setdefault(rule, []).extend(names)
        still, moves = still | one.still, moves | one.moves
        alarm, before = alarm or one.alarm, before or one.before
    standstill = ffi.new("struct save_standstill *", {"still": still, "moves": moves})
    standstill.before = before.encode()[: ffi.sizeof(standstill.before) - 1]
    found = ffi.new("struct save_verdict *")
    if lib.save_items_judge_standstill(current().pointer, encoded(path), standstill, found):
        raise last_failure(path, "save")
    if found.alarms:
        alarms["unchanged"] = []
    alarms = {rule: alarms[rule] for rule in ALARMS.values() if rule in alarms}
    return Verdict(alarms, alarm or said(found.alarm), still, moves, before)
