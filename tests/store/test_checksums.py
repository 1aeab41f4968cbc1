"""Checksums: recorded while writing, verified by the first read after a resume, exact in the message."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdtune.errors import FormatError
from ssdtune.io.buffers import Buffer
from ssdtune.store.checksums import Checksums
from tests.store.helpers import PAGE, UNITS, check_unit, content, create, write_unit
from tests.store.test_store import reopen

CHECK = 2 * PAGE


@pytest.fixture
def saved(tmp_path, backend):
    """Return the manifest of a store that was written with checksums."""
    with create(tmp_path, backend, check_bytes=CHECK) as store:
        store.checksum_writes(True)
        for unit in UNITS:
            write_unit(store, unit.name, 1)
        manifest = store.freeze("checkpoint-1")
        store.sync()
    return manifest


def place(path, manifest, unit, state, offset):
    """Return file and offset of a byte of a state's live version."""
    from ssdtune.store.layout import StoreLayout

    layout = StoreLayout.build(UNITS, 2, manifest["weights"], stripe_bytes=manifest["stripe_bytes"])
    page = offset // PAGE * PAGE
    piece = layout.pieces(unit, state, manifest["versions"][unit], page, PAGE)[0]
    return path / "ab"[piece.directory_index] / "ssdtune-states.bin", piece.offset + offset - page


def flip(path, manifest, unit, state, offset):
    file_path, at = place(path, manifest, unit, state, offset)
    with file_path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    return file_path


def test_intact_states_pass(tmp_path, backend, saved):
    assert set(saved["checksums"]) == {unit.name for unit in UNITS}
    with reopen(tmp_path, backend, {"checkpoint-1": saved}) as store:
        for unit in UNITS:
            check_unit(store, unit.name, 1)
        assert store.freeze("again")["checksums"] == saved["checksums"]


@pytest.mark.parametrize("offset", [0, 5 * PAGE + 17, 7 * PAGE + 4095])
def test_a_flipped_bit_is_found_by_the_first_read(tmp_path, backend, saved, offset):
    path = flip(tmp_path, saved, "block.0", "exp_avg", offset)
    start = offset // CHECK * CHECK
    with reopen(tmp_path, backend, {"checkpoint-1": saved}) as store:
        ticket = store.read("block.0", "exp_avg", Buffer(4 * 7777).view)
        for _ in range(2):
            with pytest.raises(FormatError) as caught:
                ticket.wait()
        text = str(caught.value)
        index = start // CHECK
        said = saved["checksums"]["block.0"]["exp_avg"][8 * index : 8 * index + 8]
        assert text.startswith("unit block.0, exp_avg: checksum is ")
        assert f"the manifest says {said} ({path.parent.parent}" in text
        assert f", {CHECK} bytes)" in text and "Resume from an intact checkpoint." in text
        # Still found by the next read, as long as nothing good was written over it.
        with pytest.raises(FormatError):
            store.read("block.0", "exp_avg", Buffer(CHECK).view, offset=start).wait()
        check_unit(store, "embed", 1)


def test_a_read_of_part_of_a_piece_leaves_it_for_a_later_one(tmp_path, backend, saved):
    flip(tmp_path, saved, "block.0", "exp_avg", 3)
    with reopen(tmp_path, backend, {"checkpoint-1": saved}) as store:
        store.read("block.0", "exp_avg", Buffer(PAGE).view).wait()
        store.read("block.0", "exp_avg", Buffer(2 * PAGE).view, offset=PAGE).wait()
        with pytest.raises(FormatError):
            store.read("block.0", "exp_avg", Buffer(3 * PAGE).view).wait()


def test_a_piece_is_verified_once(tmp_path, backend, saved):
    with reopen(tmp_path, backend, {"checkpoint-1": saved}) as store:
        check_unit(store, "block.0", 1)
        flip(tmp_path, saved, "block.0", "exp_avg", 3)
        store.read("block.0", "exp_avg", Buffer(CHECK).view).wait()


def test_what_is_overwritten_is_not_compared_with_the_old_checksum(tmp_path, backend, saved):
    with reopen(tmp_path, backend, {"checkpoint-1": saved}) as store:
        store.release("checkpoint-1")
        buffer = content(PAGE, "new")
        store.write("block.0", "exp_avg", buffer.view).wait()  # in place, without a checksum
        store.commit("block.0")
        found = Buffer(CHECK)
        store.read("block.0", "exp_avg", found.view).wait()
        assert found.view[:PAGE] == buffer.view
        text = store.freeze("checkpoint-2")["checksums"]["block.0"]["exp_avg"]
        assert text == "-" * 8 + saved["checksums"]["block.0"]["exp_avg"][8:]


def test_a_fresh_place_does_not_inherit_checksums(tmp_path, backend, saved):
    with reopen(tmp_path, backend, {"checkpoint-1": saved}) as store:
        write_unit(store, "block.0", 2)
        assert "block.0" not in store.freeze("checkpoint-2")["checksums"]
        store.release("checkpoint-1")
        store.checksum_writes(True)
        write_unit(store, "block.0", 3)
        manifest = store.freeze("checkpoint-3")
        store.checksum_writes(False)
        store.sync()
    with reopen(tmp_path, backend, {"checkpoint-3": manifest}) as store:
        check_unit(store, "block.0", 3)
        check_unit(store, "embed", 1)


def test_states_that_a_fresh_place_lacks_have_no_checksums(tmp_path, backend):
    with create(tmp_path, backend, check_bytes=CHECK) as store:
        store.checksum_writes(True)
        for seed in (1, 2):
            write_unit(store, "head", seed)
            store.freeze(str(seed))
        store.release("1")
        store.write("head", "weights", content(6, 3).view).wait()
        store.commit("head", states=["weights"])
        assert list(store.freeze("3")["checksums"]["head"]) == ["weights"]


def test_writes_with_checksums_must_be_whole_pieces(tmp_path, backend):
    with create(tmp_path, backend, check_bytes=CHECK) as store:
        store.checksum_writes(True)
        page = Buffer(PAGE).view
        with pytest.raises(ValueError, match=f"4096 bytes at 4096 are not whole pieces of {CHECK}"):
            store.write("block.0", "exp_avg", page, offset=PAGE)
        store.write("head", "weights", page).wait()  # a whole state, shorter than a piece
        store.write("block.0", "gradient", page, offset=PAGE).wait()  # has no versions


@given(st.integers(1, 9), st.integers(1, 40), st.data())
def test_which_pieces_a_range_covers(check_pages, extent_pages, data):
    first = data.draw(st.integers(0, extent_pages - 1))
    count = data.draw(st.integers(0, extent_pages - first))
    sums = Checksums(check_pages)
    covered = set(range(first, first + count))
    expected = [
        i
        for i in range(-(-extent_pages // check_pages))
        if set(range(i * check_pages, min((i + 1) * check_pages, extent_pages))) <= covered
    ]
    assert list(sums.whole_pieces(extent_pages, first, count)) == expected
