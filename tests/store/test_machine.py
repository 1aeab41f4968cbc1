"""Random sequences of writes, commits, freezes, releases and resumes against a model of dictionaries."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ssdtune.errors import CapacityError
from ssdtune.io.buffers import Buffer
from ssdtune.io.select import open_backend
from ssdtune.store.layout import StateSpec, UnitSpec
from ssdtune.store.store import Store
from tests.store.helpers import PAGE, content

COPIES = 3
UNITS = tuple(
    UnitSpec(name, (StateSpec("weights", 100, "weights"), StateSpec("exp_avg", 9000, "moments")))
    for name in ("block.0", "block.1")
)
unit_names = st.sampled_from([unit.name for unit in UNITS])


class StoreMachine(RuleBasedStateMachine):
    """The model: content number of each unit's live version and of each label's."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)
        self.backend = open_backend("python", queue_depth=1, request_bytes=PAGE)
        self.store = Store.create(
            [self.path / "a", self.path / "b"],
            UNITS,
            copies=COPIES,
            run_id="r",
            backend=self.backend,
            output_dir=self.path,
            check_bytes=PAGE,
        )
        self.live = {unit.name: None for unit in UNITS}
        self.pending = {}
        self.torn = set()
        self.labels = {}
        self.manifests = {}
        self.next_number = 0

    def teardown(self):
        self.store.close()
        self.backend.close()
        self.folder.cleanup()

    def held_places(self, unit):
        return {m["versions"][unit] for m in self.manifests.values()}

    @rule(unit=unit_names, whole=st.booleans(), beside=st.booleans())
    def write(self, unit, whole, beside):
        live = self.store.version(unit)
        held = self.held_places(unit)
        full = len((held | {live}) - {None}) == COPIES
        if unit not in self.pending and full and (beside or live in held):
            with pytest.raises(CapacityError):
                self.store.write(unit, "weights", content(100, 0).view, beside=beside)
            return
        in_place = unit not in self.pending and live not in {None, *held} and not beside
        self.next_number += 1
        for name, size in (("weights", 100), ("exp_avg", 9000))[: 1 + whole]:
            data = content(size, (self.next_number, name)).view
            self.store.write(unit, name, data, beside=beside).wait()
        before = self.pending.get(unit, {})
        numbers = {"weights": self.next_number}
        if whole:
            numbers["exp_avg"] = self.next_number
        self.pending[unit] = before | numbers
        if in_place:
            self.torn.add(unit)
        if unit in self.torn:
            self.live[unit] = self.live[unit] | numbers

    @rule(unit=unit_names)
    def commit(self, unit):
        pending = self.pending.get(unit, {})
        if unit not in self.torn and len(pending) < 2:
            with pytest.raises(ValueError, match=r"lacks part|nothing was written"):
                self.store.commit(unit)
            return
        self.store.commit(unit)
        if unit not in self.torn:
            self.live[unit] = pending
        del self.pending[unit]
        self.torn.discard(unit)

    @rule(unit=unit_names)
    def discard(self, unit):
        if unit not in self.pending or unit in self.torn:
            with pytest.raises(ValueError, match=r"overwritten|nothing was written"):
                self.store.discard(unit)
            return
        self.store.discard(unit)
        del self.pending[unit]

    @precondition(lambda self: len(self.labels) < 4)
    @rule(checksums=st.booleans())
    def freeze(self, checksums):
        label = f"checkpoint-{self.next_number}-{len(self.labels)}"
        if self.torn:
            with pytest.raises(ValueError, match="being overwritten"):
                self.store.freeze(label)
        elif label not in self.labels:
            self.manifests[label] = self.store.freeze(label)
            self.labels[label] = {unit: dict(n) if n else None for unit, n in self.live.items()}
        self.store.checksum_writes(checksums)

    @precondition(lambda self: self.labels)
    @rule(data=st.data())
    def release(self, data):
        label = data.draw(st.sampled_from(sorted(self.labels)))
        self.store.release(label)
        del self.labels[label], self.manifests[label]

    @precondition(lambda self: self.labels)
    @rule(data=st.data())
    def resume(self, data):
        label = data.draw(st.sampled_from(sorted(self.labels)))
        self.store.close()
        self.store = Store.open(
            [self.path / "a", self.path / "b"],
            UNITS,
            checkpoints={self.path / name: m for name, m in self.manifests.items()},
            live=self.path / label,
            backend=self.backend,
            output_dir=self.path,
        )
        self.live = {unit: dict(n) if n else None for unit, n in self.labels[label].items()}
        self.pending.clear()
        self.torn.clear()

    @invariant()
    def live_content_is_as_the_model_says(self):
        for unit, numbers in self.live.items():
            if numbers is None:
                assert self.store.version(unit) is None
                continue
            for name, size in (("weights", 100), ("exp_avg", 9000)):
                buffer = Buffer(size)
                self.store.read(unit, name, buffer.view).wait()
                assert buffer.view == content(size, (numbers[name], name)).view

    @invariant()
    def room_is_known(self):
        used = [len(self.held_places(u) - {None} | {self.store.version(u)}) for u in self.live]
        assert self.store.has_room_beside() == (max(used) < COPIES)

    @invariant()
    def frozen_versions_are_never_pending(self):
        assert sorted(self.store.frozen_labels) == sorted(self.labels)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
