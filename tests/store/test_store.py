"""The store: round trips of odd sizes, commits, frozen versions, counters, threads, misuse."""

import errno
import json
import os
import threading
from pathlib import Path

import pytest

from ssdtune.errors import CapacityError, ConfigError, FormatError, StorageError
from ssdtune.io.buffers import Buffer
from ssdtune.io.threads import PythonBackend
from ssdtune.store.layout import StateSpec, UnitSpec, versioned_units
from ssdtune.store.store import Store
from tests.store.helpers import (
    ODD_SIZES,
    PAGE,
    UNITS,
    check_unit,
    content,
    create,
    training_unit,
    write_unit,
)


def reopen(path, backend, manifests, live=None, **options):
    """Open the store of `create` again."""
    checkpoints = {path / "out" / name: manifest for name, manifest in manifests.items()}
    settings = {
        "directories": [path / "a", path / "b"],
        "units": UNITS,
        "output_dir": path / "out",
        "checkpoints": checkpoints,
        "live": path / "out" / (live or next(iter(manifests))),
    }
    return Store.open(backend=backend, **(settings | options))


@pytest.mark.parametrize("num_directories", [1, 2, 3])
@pytest.mark.parametrize("stripe_bytes", [None, PAGE, 5 * PAGE])
def test_odd_sizes_come_back_as_written(tmp_path, backend, num_directories, stripe_bytes):
    states = [StateSpec(f"s{n}", n, "weights") for n in (0, *ODD_SIZES)]
    states += [StateSpec("inputs", 9 * PAGE + 1, "activations", versioned=False)]
    directories = [tmp_path / str(i) for i in range(num_directories)]
    with create(
        tmp_path,
        backend,
        units=[UnitSpec("block.0", tuple(states))],
        directories=directories,
        weights=[1 + i for i in range(num_directories)],
        stripe_bytes=stripe_bytes,
    ) as store:
        tickets = [store.write("block.0", s.name, content(s.nbytes, s.name).view) for s in states]
        for ticket in tickets:
            ticket.wait()
            assert ticket.done()
        store.commit("block.0")
        for s in states:
            buffer = Buffer(s.nbytes)
            store.read("block.0", s.name, buffer.view).wait()
            assert buffer.view == content(s.nbytes, s.name).view


def test_parts_of_a_state_in_any_order(tmp_path, backend):
    with create(
        tmp_path, backend, units=[training_unit("u", 9 * 2048)], stripe_bytes=2 * PAGE
    ) as s:
        whole = content(9 * PAGE, "whole")
        for spec in UNITS[0].states[1:4]:
            s.write("u", spec.name, content(s.layout.state("u", spec.name).nbytes, 0).view).wait()
        for start, count in [(5, 4), (0, 3), (3, 2)]:
            part = whole.view[start * PAGE : (start + count) * PAGE]
            s.write("u", "weights", part, offset=start * PAGE).wait()
        s.commit("u")
        for start, count in [(0, 9), (2, 5), (8, 1)]:
            buffer = Buffer(count * PAGE)
            s.read("u", "weights", buffer.view, offset=start * PAGE).wait()
            assert buffer.view == whole.view[start * PAGE : (start + count) * PAGE]


def test_versions_stay_readable_while_the_next_is_written(tmp_path, backend):
    with create(tmp_path, backend) as store:
        assert store.version("head") is None
        write_unit(store, "head", 1)
        first = store.version("head")
        store.freeze("checkpoint-1")
        for spec in UNITS[2].states[:4]:
            store.write("head", spec.name, content(spec.nbytes, (2, "head", spec.name)).view).wait()
            check_unit(store, "head", 1)
        store.commit("head")
        assert store.version("head") != first
        check_unit(store, "head", 2)
        # Nothing holds the live version now, so the next one goes over it.
        write_unit(store, "head", 3)
        assert store.version("head") != first
        check_unit(store, "head", 3)
        store.release("checkpoint-1")
        assert store.frozen_labels == []


def test_a_speculative_update_can_be_discarded(tmp_path, backend):
    with create(tmp_path, backend) as store:
        write_unit(store, "head", 1)
        store.freeze("lease")
        buffer = content(6, "speculative")
        store.write("head", "weights", buffer.view).wait()
        store.discard("head")
        check_unit(store, "head", 1)
        store.release("lease")
        store.write("head", "weights", buffer.view).wait()
        with pytest.raises(ValueError, match="its live version was overwritten"):
            store.discard("head")


def test_what_is_written_beside_the_live_version_can_be_discarded(tmp_path, backend):
    with create(tmp_path, backend, copies=2) as store:
        assert store.has_room_beside()
        write_unit(store, "head", 1)
        for number in (2, 3):
            version = store.version("head")
            for keeps in (False, True):
                for state in next(unit.states for unit in UNITS if unit.name == "head"):
                    data = content(state.nbytes, (number, "head", state.name))
                    store.write("head", state.name, data.view, beside=True).wait()
                assert store.version("head") == version
                check_unit(store, "head", number - 1)
                store.commit("head") if keeps else store.discard("head")
            assert store.version("head") != version
            check_unit(store, "head", number)
        store.freeze("checkpoint")
        assert store.has_room_beside()
        write_unit(store, "head", 4)
        assert not store.has_room_beside()
        with pytest.raises(CapacityError, match="all 2 places are held by checkpoint"):
            store.write("head", "weights", content(6, 5).view, beside=True)
        check_unit(store, "head", 4)
    with create(tmp_path, backend, copies=1) as store:
        assert not store.has_room_beside()


def test_a_saved_store_is_opened_again(tmp_path, backend):
    with create(tmp_path, backend, copies=3) as store:
        for unit in UNITS:
            write_unit(store, unit.name, 1)
        one = json.loads(json.dumps(store.freeze("checkpoint-1", tmp_path / "out/checkpoint-1")))
        write_unit(store, "head", 2)
        two = store.freeze("checkpoint-2", tmp_path / "out/checkpoint-2")
        store.sync()
        write_unit(store, "head", 3)
    for live, seed in (("checkpoint-1", 1), ("checkpoint-2", 2)):
        with reopen(tmp_path, backend, {"checkpoint-1": one, "checkpoint-2": two}, live) as store:
            assert store.run_id == "run-1"
            assert store.frozen_labels == ["checkpoint-1", "checkpoint-2"]
            check_unit(store, "head", seed)
            check_unit(store, "embed", 1)
            write_unit(store, "head", 4)  # never over either of them
            check_unit(store, "head", 4)


def test_more_copies_can_be_had_later(tmp_path, backend):
    with create(tmp_path, backend, copies=1) as store:
        write_unit(store, "head", 1)
        manifest = store.freeze("checkpoint-1")
        with pytest.raises(
            CapacityError, match=r"unit head: all 1 places are held by checkpoint-1"
        ):
            write_unit(store, "head", 2)
    with reopen(tmp_path, backend, {"checkpoint-1": manifest}, copies=3) as store:
        write_unit(store, "head", 2)
        again = store.freeze("checkpoint-2")
        store.release("checkpoint-1")
    with reopen(tmp_path, backend, {"checkpoint-2": again}) as store:
        check_unit(store, "head", 2)
        assert store.layout.copies == 3


def test_a_folder_holds_its_label(tmp_path, backend):
    folder = tmp_path / "out" / "checkpoint-1"
    folder.mkdir(parents=True)
    with create(tmp_path, backend) as store:
        write_unit(store, "head", 1)
        store.freeze("checkpoint-1", folder)
        with pytest.raises(ValueError, match=r"remove .*/checkpoint-1 first"):
            store.release("checkpoint-1")
        store.close(delete_files=True)
        assert (tmp_path / "a" / "ssdtune-states.bin").exists()
    folder.rmdir()
    create(tmp_path, backend).close(delete_files=True)
    assert not list((tmp_path / "a").iterdir())


def test_a_forgotten_checkpoint_is_not_destroyed_by_resuming(tmp_path, backend):
    with create(tmp_path, backend, copies=3) as store:
        for step in (1, 2):
            (tmp_path / f"out/checkpoint-{step}").mkdir(parents=True)
            write_unit(store, "head", step)
            manifest = store.freeze(f"checkpoint-{step}", tmp_path / f"out/checkpoint-{step}")
    with pytest.raises(ConfigError, match=r"checkpoint-1 has its states .* would be destroyed"):
        reopen(tmp_path, backend, {"checkpoint-2": manifest})


def test_a_moved_output_folder_can_be_resumed(tmp_path, backend):
    with create(tmp_path, backend) as store:
        (tmp_path / "old/checkpoint-1").mkdir(parents=True)
        write_unit(store, "head", 1)
        manifest = store.freeze("checkpoint-1", tmp_path / "old/checkpoint-1")
    (tmp_path / "old").rename(tmp_path / "out")
    with reopen(tmp_path, backend, {"checkpoint-1": manifest}) as store:
        check_unit(store, "head", 1)


def test_other_units_are_refused_with_the_difference(tmp_path, backend):
    with create(tmp_path, backend) as store:
        manifest = store.freeze("checkpoint-1")
    for units, message in [
        (UNITS[:2], "unit head is not there any more"),
        ((*UNITS, training_unit("new", 5)), "unit new is new"),
        (
            (*UNITS[:2], training_unit("head", 4)),
            r"unit head was \[\['weights', 6, .*is \[\['weights', 8",
        ),
        (UNITS[::-1], "order of units"),
    ]:
        with pytest.raises((ConfigError, FormatError), match=message):
            reopen(tmp_path, backend, {"checkpoint-1": manifest}, units=units)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2, not 1"),
        ({"extra": 1}, "unknown ones: extra"),
        ({"versions": []}, "bad value of versions"),
        ({"versions": {"embed": 7}}, "no version 7"),
        ({"versions": {}}, "does not agree with itself"),
        ({"layout": "0123"}, "does not agree with itself"),
        ({"weights": [0.0]}, "weights of directories"),
        ({"check_bytes": 0}, "bad value of check_bytes"),
        ({"checksums": {"head": {"weights": "zz"}}}, "damaged checksums of unit head, weights"),
        ({"checksums": {"tail": {}, "head": {"w": ""}}}, "damaged checksums"),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path, backend, change, message):
    with create(tmp_path, backend) as store:
        write_unit(store, "head", 1)
        manifest = store.freeze("checkpoint-1")
    with pytest.raises(FormatError, match=rf"checkpoint-1.*{message}"):
        reopen(tmp_path, backend, {"checkpoint-1": manifest | change})


def test_a_file_that_was_cut_short_is_refused(tmp_path, backend):
    with create(tmp_path, backend) as store:
        manifest = store.freeze("checkpoint-1")
        size = store.layout.versioned_directory_bytes[1]
    path = tmp_path / "b" / "ssdtune-states.bin"
    assert size < path.stat().st_size  # behind it are states that nobody needs again
    os.truncate(path, size - 1)
    with pytest.raises(
        FormatError, match=rf"{path} has {size - 1} bytes.*needs {size}: it was cut"
    ):
        reopen(tmp_path, backend, {"checkpoint-1": manifest})
    assert path.stat().st_size == size - 1


@pytest.mark.parametrize("copies", [2, 3])
def test_states_without_versions_may_be_others_when_a_run_goes_on(tmp_path, backend, copies):
    """Where gradients and block inputs wait depends on the memory that is free today."""
    kept = tuple(versioned_units(UNITS))
    more = (
        *UNITS,
        UnitSpec("block.0.input.0", (StateSpec("inputs", 90_001, "activations", False),)),
    )
    with create(tmp_path, backend) as store:
        for unit in UNITS:
            write_unit(store, unit.name, 1)
        manifest = store.freeze("checkpoint-1")
    for units in (kept, more, UNITS):
        with reopen(
            tmp_path, backend, {"checkpoint-1": manifest}, units=units, copies=copies
        ) as store:
            for unit in units:
                for state in unit.states:
                    if not state.versioned:
                        store.write(unit.name, state.name, content(state.nbytes, 2).view).wait()
            write_unit(store, "block.0", 3)
            check_unit(store, "block.0", 3)
        with reopen(
            tmp_path, backend, {"checkpoint-1": manifest}, units=units, copies=copies
        ) as store:
            for unit in UNITS:
                check_unit(store, unit.name, 1)


def test_bytes_are_counted_by_kind(tmp_path, backend):
    with create(tmp_path, backend) as store:
        write_unit(store, "block.0", 1)
        store.write("block.0", "gradient", Buffer(4 * 7777).view).wait()
        store.read("block.0", "weights", Buffer(PAGE).view, offset=PAGE).wait()
        ticket = store.read("block.0", "exp_avg", Buffer(2 * PAGE).view)
        ticket.wait()
        ticket.wait()
        assert store.counters == {
            "weights": {"read": PAGE, "written": 4 * PAGE},
            "master": {"read": 0, "written": 4 * PAGE},
            "moments": {"read": 2 * PAGE, "written": 16 * PAGE},
            "gradients": {"read": 0, "written": 8 * PAGE},
            "activations": {"read": 0, "written": 0},
        }


def test_all_space_is_reserved_at_once(tmp_path, backend):
    with create(tmp_path, backend) as store:
        for directory, size in zip(store.directories, store.layout.directory_bytes, strict=True):
            status = (directory / "ssdtune-states.bin").stat()
            assert status.st_size == size
            assert status.st_blocks * 512 >= size


def test_no_room_leaves_nothing_behind(tmp_path, backend):
    units = [UnitSpec("block.0", (StateSpec("weights", 10**15, "weights"),))]
    with pytest.raises(CapacityError, match=r"cannot reserve .* are free \[ENOSPC\]"):
        create(tmp_path, backend, units=units)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
    create(tmp_path, backend).close()


def test_a_removed_or_replaced_file_is_noticed(tmp_path, backend):
    with create(tmp_path, backend) as store:
        write_unit(store, "head", 1)
        path = tmp_path / "b" / "ssdtune-states.bin"
        path.rename(tmp_path / "kept")
        for action in (store.check_files, store.sync, lambda: store.freeze("x")):
            with pytest.raises(StorageError, match=rf"{path} failed.*ENOENT.*was removed or moved"):
                action()
        path.write_bytes(b"other")
        with pytest.raises(StorageError, match="Another file was put in its place"):
            store.sync()
        path.unlink()
        (tmp_path / "kept").rename(path)
        store.sync()


def test_two_drives_are_used_with_constant_descriptors(tmp_path, backend):
    def count():
        return len(list(Path("/proc/self/fd").iterdir()))

    before = count()
    with create(tmp_path, backend) as store:
        opened = count()
        # kvikio opens each of the two files twice more, once for direct I/O
        assert opened <= before + (8 if backend.name == "kvikio" else 4)
        for seed in range(5):
            for unit in UNITS:
                write_unit(store, unit.name, seed)
            store.freeze(f"checkpoint-{seed}")
            store.sync()
            store.release(f"checkpoint-{seed}")
        assert count() == opened
    assert count() == before


def test_many_threads_at_once(tmp_path, backend):
    units = [training_unit(f"block.{i}", 5000 + i) for i in range(6)]
    errors = []
    with create(tmp_path, backend, units=units, copies=3) as store:

        def work(unit):
            try:
                for seed in range(4):
                    write_unit(store, unit, seed)
                    check_unit(store, unit, seed)
            except Exception as error:
                errors.append(error)

        def save():
            try:
                for label in map(str, range(8)):
                    # A unit may be in the middle of an update in place: then it cannot be frozen.
                    try:
                        store.freeze(label)
                    except ValueError as error:
                        assert "being overwritten" in str(error)
                    else:
                        store.release(label)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(u.name,)) for u in units]
        threads.append(threading.Thread(target=save))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        moments = sum(2 * u.states[2].extent_bytes for u in units)
        assert store.counters["moments"] == {"read": 4 * moments, "written": 4 * moments}


def test_one_ticket_may_be_waited_for_by_several_threads(tmp_path, backend):
    with create(tmp_path, backend) as store:
        ticket = store.write("block.0", "exp_avg", Buffer(4 * 7777).view)
        threads = [threading.Thread(target=ticket.wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.counters["moments"]["written"] == 8 * PAGE


def failing_backend(numbers):
    """Return a backend whose n-th write fails, for each n in `numbers`."""
    count = iter(range(1 << 30))

    def pwritev(descriptor, views, offset):
        if next(count) in numbers:
            raise OSError(errno.EIO, "injected")
        return os.pwritev(descriptor, views, offset)

    return PythonBackend(queue_depth=1, request_bytes=PAGE, pwritev=pwritev)


def test_a_failed_write_is_reported_and_never_committed(tmp_path):
    backend = failing_backend({0})
    with create(tmp_path, backend) as store:
        tickets = [
            store.write("block.0", s.name, content(s.nbytes, 1).view) for s in UNITS[1].states[:4]
        ]
        for _ in range(2):
            with pytest.raises(StorageError, match=r"write of .*ssdtune-states\.bin failed .*EIO"):
                tickets[0].wait()
        for ticket in tickets[1:]:
            ticket.wait()
        with pytest.raises(ValueError, match="1 writes failed"):
            store.commit("block.0")
        assert store.version("block.0") is None
        assert store.counters["weights"]["written"] == 0
        store.discard("block.0")
        write_unit(store, "block.0", 2)
        check_unit(store, "block.0", 2)
    backend.close()


def test_closing_waits_for_what_is_under_way(tmp_path, backend):
    store = create(tmp_path, backend)
    tickets = [store.write("block.0", s.name, Buffer(s.nbytes).view) for s in UNITS[1].states]
    store.close()
    store.close()
    for ticket in tickets:
        ticket.wait()
    with pytest.raises(ValueError, match="store is closed"):
        store.write("head", "weights", Buffer(PAGE).view)


def test_misuse_is_refused(tmp_path, backend):
    page = Buffer(PAGE).view
    with create(tmp_path, backend) as store:
        for call, message in [
            (lambda: store.read("head", "weights", page), "nothing was written yet"),
            (lambda: store.read("head", "gradient", page), "nothing was written yet"),
            (lambda: store.read("tail", "weights", page), "no state weights in a unit tail"),
            (lambda: store.write("head", "weights", page[:100]), "100 bytes is no multiple"),
            (lambda: store.write("head", "weights", page, offset=PAGE), "leave its 4096 bytes"),
            (lambda: store.write("head", "weights", page, offset=8), "no multiple of 4096"),
            (lambda: store.commit("head"), "nothing was written"),
            (lambda: store.commit("tail"), "no unit tail"),
            (lambda: store.discard("head"), "nothing was written"),
            (lambda: store.release("x"), "nothing is frozen as x"),
        ]:
            with pytest.raises(ValueError, match=message):
                call()
        ticket = store.write("head", "weights", page)
        with pytest.raises(ValueError, match="wait for its 1 writes"):
            store.commit("head")
        ticket.wait()
        with pytest.raises(ValueError, match="lacks part of low, exp_avg, exp_avg_sq"):
            store.commit("head")
        write_unit(store, "head", 1)
        store.freeze("x")
        with pytest.raises(ValueError, match="x is frozen already"):
            store.freeze("x")
        store.release("x")
        store.write("head", "weights", page).wait()
        with pytest.raises(ValueError, match="head are being overwritten"):
            store.freeze("y")
    with pytest.raises(ValueError, match="2 directories, but 3 weights"):
        create(tmp_path, backend, weights=[1, 2, 3])


def test_a_unit_may_become_live_before_all_its_states_exist(tmp_path, backend):
    with create(tmp_path, backend) as store:
        weights = content(6, "weights")
        store.write("head", "weights", weights.view).wait()
        with pytest.raises(ValueError, match="lacks part of low"):
            store.commit("head", states=["weights", "low"])
        store.commit("head", states=["weights"])
        found = Buffer(6)
        store.read("head", "weights", found.view).wait()
        assert found.view == weights.view


def test_activations_may_go_through_a_backend_of_their_own(tmp_path, backend):
    moved = []

    class Noting(PythonBackend):
        def read(self, file, offset, buffer, **options):
            moved.append(("read", len(buffer)))
            return super().read(file, offset, buffer, **options)

        def write(self, file, offset, buffer):
            moved.append(("write", len(buffer)))
            return super().write(file, offset, buffer)

    inputs = UnitSpec("input", (StateSpec("inputs", 3 * PAGE, "activations", versioned=False),))
    before = len(list(Path("/proc/self/fd").iterdir()))
    with Noting(queue_depth=2, request_bytes=PAGE) as other:
        with create(tmp_path, backend, units=(*UNITS, inputs), activations=other) as store:
            write_unit(store, "block.0", 1)
            assert moved == []
            sent, back = content(3 * PAGE, "input"), Buffer(3 * PAGE)
            store.write("input", "inputs", sent.view).wait()
            store.read("input", "inputs", back.view).wait()
            store.sync()
            assert back.view == sent.view
            assert sum(n for _, n in moved) == 6 * PAGE and {way for way, _ in moved} == {"read", "write"}  # fmt: skip
            assert store.counters["activations"] == {"read": 3 * PAGE, "written": 3 * PAGE}
            check_unit(store, "block.0", 1)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1
