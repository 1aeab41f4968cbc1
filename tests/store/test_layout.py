"""Places of states: aligned, apart from each other, within the files, dealt in proportion."""

import json
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdtune.store.layout import KINDS, StateSpec, StoreLayout, UnitSpec, versioned_units

PAGE = 4096

sizes = st.integers(0, 40 * PAGE)
states = st.builds(
    lambda nbytes, kind, versioned: (nbytes, kind, versioned),
    sizes,
    st.sampled_from(KINDS),
    st.booleans(),
)
units = st.lists(st.lists(states, max_size=4), max_size=5).map(
    lambda found: [
        UnitSpec(f"unit.{i}", tuple(StateSpec(f"state.{j}", *s) for j, s in enumerate(unit)))
        for i, unit in enumerate(found)
    ]
)
weights = st.lists(st.floats(0.05, 20), min_size=1, max_size=5)
stripes = st.one_of(st.none(), st.integers(1, 9).map(lambda n: n * PAGE))


def all_places(layout):
    for unit in layout.units:
        for state in unit.states:
            for copy in range(layout.copies if state.versioned else 1):
                yield unit.name, state, copy


@given(units, st.integers(1, 4), weights, stripes)
def test_places_are_aligned_disjoint_and_within_the_files(units, copies, weights, stripe_bytes):
    layout = StoreLayout.build(units, copies, weights, stripe_bytes=stripe_bytes)
    used = [[] for _ in weights]
    for unit, state, copy in all_places(layout):
        pieces = layout.pieces(unit, state.name, copy)
        assert sum(p.nbytes for p in pieces) == state.extent_bytes >= state.nbytes
        for piece in pieces:
            assert piece.nbytes > 0
            assert piece.offset % PAGE == piece.nbytes % PAGE == 0
            used[piece.directory_index].append((piece.offset, piece.offset + piece.nbytes))
    for ranges, size in zip(used, layout.directory_bytes, strict=True):
        ranges.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(ranges))
        # No byte of a file is wasted.
        assert sum(end - start for start, end in ranges) == size
        assert not ranges or ranges[-1][1] == size


@given(units, st.integers(1, 3), weights, stripes, st.data())
def test_part_of_a_state_lies_where_the_whole_says(units, copies, weights, stripe_bytes, data):
    layout = StoreLayout.build(units, copies, weights, stripe_bytes=stripe_bytes)
    places = [place for place in all_places(layout) if place[1].nbytes]
    if not places:
        return
    unit, state, copy = data.draw(st.sampled_from(places))
    first = data.draw(st.integers(0, state.extent_bytes // PAGE - 1))
    count = data.draw(st.integers(1, state.extent_bytes // PAGE - first))

    def pages(pieces):
        return [
            (p.directory_index, p.offset + at) for p in pieces for at in range(0, p.nbytes, PAGE)
        ]

    whole = pages(layout.pieces(unit, state.name, copy))
    part = layout.pieces(unit, state.name, copy, first * PAGE, count * PAGE)
    assert pages(part) == whole[first : first + count]


@given(units, weights)
def test_more_copies_leave_versioned_places_and_the_fingerprint(units, weights):
    small = StoreLayout.build(units, 2, weights)
    large = StoreLayout.build(units, 5, weights)
    assert small.fingerprint == large.fingerprint == small.with_copies(3).fingerprint
    for unit, state, copy in all_places(small):
        if state.versioned:
            assert small.pieces(unit, state.name, copy) == large.pieces(unit, state.name, copy)


@given(units, weights)
def test_states_without_versions_have_no_say_in_where_the_others_lie(units, weights):
    whole = StoreLayout.build(units, 2, weights, stripe_bytes=PAGE)
    kept = StoreLayout.build(versioned_units(units), 2, weights, stripe_bytes=PAGE)
    assert whole.fingerprint == kept.fingerprint
    assert whole.versioned_directory_bytes == kept.directory_bytes
    for unit, state, copy in all_places(kept):
        assert whole.pieces(unit, state.name, copy) == kept.pieces(unit, state.name, copy)


@given(st.lists(st.floats(0.2, 5), min_size=1, max_size=6))
def test_bytes_are_dealt_in_proportion_to_the_weights(weights):
    units = [UnitSpec("block.0", (StateSpec("weights", 4096 * PAGE, "weights"),))]
    layout = StoreLayout.build(units, 1, weights, stripe_bytes=PAGE)
    for size, weight in zip(layout.directory_bytes, weights, strict=True):
        share = weight / sum(weights)
        assert size / layout.total_bytes == pytest.approx(share, abs=1 / 30)


def test_equal_drives_share_every_chunk():
    units = [UnitSpec("block.0", (StateSpec("exp_avg", 1 << 30, "moments"),))]
    layout = StoreLayout.build(units, 2, [1, 1, 1, 1])
    chunk = layout.pieces("block.0", "exp_avg", 1, 16 << 20, 16 << 20)
    assert sorted(p.directory_index for p in chunk) == [0, 1, 2, 3]
    assert {p.nbytes for p in chunk} == {4 << 20}


def test_a_tiny_store_uses_all_drives():
    units = [UnitSpec("block.0", (StateSpec("weights", 50_000, "weights"),))]
    assert min(StoreLayout.build(units, 2, [1, 1]).directory_bytes) > 0


def test_the_layout_is_the_same_in_another_process():
    script = (
        "from ssdtune.store.layout import *; import json\n"
        "u = [UnitSpec(f'b{i}', (StateSpec('w', 9999 * i, 'weights'),)) for i in range(9)]\n"
        "l = StoreLayout.build(u, 2, [3.1, 1.7])\n"
        "print(json.dumps([l.fingerprint, [p.offset for p in l.pieces('b8', 'w', 1)]]))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert json.loads(outputs.pop())[1]


def test_other_units_or_stripes_have_another_fingerprint():
    def fingerprint(nbytes=9999, kind="weights", weights=(1, 1), stripe_bytes=PAGE):
        units = [UnitSpec("block.0", (StateSpec("weights", nbytes, kind),))]
        return StoreLayout.build(units, 2, weights, stripe_bytes=stripe_bytes).fingerprint

    others = [
        fingerprint(nbytes=9998),
        fingerprint(kind="master"),
        fingerprint(weights=(1, 2)),
        fingerprint(stripe_bytes=2 * PAGE),
    ]
    assert len({fingerprint(), *others}) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"copies": 0}, "copies is 0"),
        ({"directories_weights": []}, "weights of directories"),
        ({"directories_weights": [1, 0]}, "weights of directories"),
        ({"directories_weights": [float("nan")]}, "weights of directories"),
        ({"stripe_bytes": 5000}, "stripe_bytes is 5000"),
        ({"units": [UnitSpec("a", ()), UnitSpec("a", ())]}, "same name"),
        ({"units": [UnitSpec("a", (StateSpec("w", 1, "weight"),))]}, "bad state"),
        ({"units": [UnitSpec("a", (StateSpec("w", -1, "weights"),))]}, "bad state"),
        ({"units": [UnitSpec("a", (StateSpec("w", 1, "weights"),) * 2)]}, "two states"),
    ],
)
def test_nonsense_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        StoreLayout.build(**({"units": [], "copies": 2} | change))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("block.1", "weights"), "no state weights in a unit block.1"),
        (("block.0", "weights", 2), "no copy 2"),
        (("block.0", "gradient", 1), "no copy 1"),
        (("block.0", "weights", 0, 100), "no multiple of 4096"),
        (("block.0", "weights", 0, 0, 3 * PAGE), "leave its 8192 bytes"),
        (("block.0", "weights", 0, -PAGE, PAGE), "leave its 8192 bytes"),
    ],
)
def test_ranges_outside_a_state_are_refused(arguments, message):
    states = (
        StateSpec("weights", 5000, "weights"),
        StateSpec("gradient", 5000, "gradients", versioned=False),
    )
    layout = StoreLayout.build([UnitSpec("block.0", states)], 2)
    with pytest.raises(ValueError, match=message):
        layout.pieces(*arguments)
