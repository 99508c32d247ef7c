"""Damaged and hostile items: one error for each way to be wrong, and never a crash."""

from __future__ import annotations

import contextlib
import io
import struct
import zipfile
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.dtypes import dtype_named
from ckptool.errors import CkptoolError, DamagedError, UnsupportedError
from ckptool.formats.crc import crc32
from ckptool.formats.dcp_item import (
    NeedMore,
    check_item,
    encode_item,
    encode_value_item,
    parse_tensor_item,
    parse_value_item,
)
from ckptool.formats.partial_bytes import PartialBytes
from ckptool.formats.tensor_pickle import tensor_pickle
from ckptool.formats.zip_archive import plan_archive
from ckptool.formats.zip_reading import StoredZip

F32 = dtype_named("float32")
PAYLOAD = bytes(range(24))


def good_item() -> bytes:
    framing = encode_item(dtype=F32, shape=(2, 3))
    return framing.head + PAYLOAD + framing.tail(crc32(PAYLOAD))


ITEM = good_item()


def parse(data: bytes) -> object:
    return parse_tensor_item(length=len(data), head=data)


def patched(at: int, new: bytes, data: bytes = ITEM) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def central_at(name: bytes) -> int:
    """Where the directory's record of that name begins."""
    return ITEM.index(name, ITEM.index(b"PK\1\2")) - 46


PAYLOAD_AT = (
    704 if len(ITEM) == 0 else encode_item(dtype=F32, shape=(2, 3)).archive.payload_offset(0)
)
LOCAL_AT = ITEM.index(b"archive/data/0") - 30
CENTRAL_AT = central_at(b"archive/data/0")
END_AT = len(ITEM) - 22
DESCRIPTOR_AT = PAYLOAD_AT + len(PAYLOAD)

WRONG: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too few"),
    "no zip": (bytes(200), "no zip end record"),
    "cut at its end": (ITEM[:-1], "no zip end record"),
    "bytes before it": (b"x" + ITEM, "zip64 locator points"),
    "a comment": (patched(len(ITEM) - 2, b"\1"), "no zip end record"),
    "a count": (patched(END_AT + 8, b"\6\0\6\0"), "contradicts"),
    "several disks": (patched(END_AT + 4, b"\1"), "several disks"),
    "no directory record": (patched(CENTRAL_AT, b"XX"), "no directory record"),
    "a record's name": (patched(CENTRAL_AT + 46, b"Archive"), "another name"),
    "a name that is no text": (patched(CENTRAL_AT + 46, b"\xff"), "not UTF-8"),
    "the stored size": (patched(CENTRAL_AT + 20, b"\1"), "1 on disk 0"),
    "both sizes": (patched(CENTRAL_AT + 20, struct.pack("<II", 20, 20)), "data descriptor"),
    "sizes beyond the next": (patched(CENTRAL_AT + 20, struct.pack("<II", 900, 900)), "beyond"),
    "a size of 4 GiB": (patched(CENTRAL_AT + 20, b"\xff" * 8), "no zip64 extra field"),
    "the offset": (patched(CENTRAL_AT + 42, struct.pack("<I", LOCAL_AT + 1)), "no local header"),
    "an offset outside": (patched(CENTRAL_AT + 42, b"\xfe" * 4), "beyond|outside|ends"),
    "the local header": (patched(LOCAL_AT, b"XX"), "no local header"),
    "the local name": (patched(LOCAL_AT + 30, b"X"), "another name"),
    "the local name's length": (patched(LOCAL_AT + 26, b"\1"), "another name"),
    "the local size": (patched(LOCAL_AT + 18, b"\1"), "contradicts"),
    "the local flags": (patched(LOCAL_AT + 6, b"\0"), "contradicts"),
    "the local padding": (patched(LOCAL_AT + 28, b"\1"), "no data descriptor"),
    "padding beyond the next": (patched(LOCAL_AT + 28, b"\xff\xff"), "beyond"),
    "no descriptor": (patched(DESCRIPTOR_AT, b"XX"), "no data descriptor"),
    "the descriptor's CRC": (patched(DESCRIPTOR_AT + 4, b"\0\0\0\0"), "CRC-32 0x00000000"),
    "the descriptor's size": (patched(DESCRIPTOR_AT + 8, b"\1"), "data descriptor"),
    "the pickle": (patched(ITEM.index(b"_rebuild"), b"X"), "'data.pkl' .* CRC-32"),
    "the byte order's text": (patched(ITEM.index(b"little"), b"L"), "'byteorder' .* CRC-32"),
    "an unknown flag": (patched(CENTRAL_AT + 8, b"\x18"), "flags"),
    "the locator": (patched(END_AT - 12, b"\0\0"), "zip64 locator points"),
    "the zip64 end": (patched(END_AT - 20 - 56, b"XX"), "no zip64 end"),
    "the directory's size": (patched(END_AT - 20 - 16, b"\1"), "does not end where"),
    "no locator": (patched(END_AT - 20, b"XX"), "does not end where"),
}  # fmt: skip


@pytest.mark.parametrize("why", WRONG)
def test_each_contradiction_is_damage(why: str) -> None:
    """The message says what is wrong and at which byte, and check_item reports it too."""
    data, message = WRONG[why]
    with pytest.raises(DamagedError, match=message):
        parse(data)
    assert check_item(data)


@pytest.mark.parametrize("at", [CENTRAL_AT + 10, LOCAL_AT + 8])
def test_compressed_records_are_unsupported(at: int) -> None:
    """torch never deflates; who does is told so by name."""
    with pytest.raises(UnsupportedError, match=r"compressed \(zip method 8\)"):
        parse(patched(at, b"\x08"))


@pytest.mark.parametrize("at", [CENTRAL_AT + 8, LOCAL_AT + 6])
def test_encrypted_records_are_unsupported(at: int) -> None:
    """An encrypted record is named."""
    with pytest.raises(UnsupportedError, match=r"data/0.*encrypted"):
        parse(patched(at, b"\x09"))


def with_records(*records: tuple[str, bytes]) -> bytes:
    return plan_archive(list(records)).head


def test_a_big_endian_item_is_unsupported() -> None:
    """Bytes in the other order are never taken for ours."""
    item = with_records(
        ("data.pkl", tensor_pickle(F32, (0,))), ("byteorder", b"big"), ("data/0", b"")
    )
    with pytest.raises(UnsupportedError, match="'big'"):
        parse(item)
    assert [type(error) for error in check_item(item)] == [UnsupportedError]


def test_a_value_where_a_tensor_is_expected_is_damage() -> None:
    """The item of a value does not pass for a tensor."""
    with pytest.raises(DamagedError, match=r"holds a value \(int\)"):
        parse(encode_value_item(b"\x80\x02K\x0c."))


def test_another_class_is_named() -> None:
    """A tensor subclass stops with its name, and nothing of it is imported."""
    pickled = b"\x80\x02cmy.module\nMyTensor\n)R."
    with pytest.raises(UnsupportedError, match=r"my\.module\.MyTensor") as caught:
        parse(encode_value_item(pickled))
    assert caught.value.facts["class_name"] == "my.module.MyTensor"


def test_a_missing_record_is_named() -> None:
    """Pickle without payload, and payload without pickle."""
    with pytest.raises(DamagedError, match="no record 'data/0'"):
        parse(with_records(("data.pkl", tensor_pickle(F32, (2,)))))
    with pytest.raises(DamagedError, match=r"no record 'data\.pkl'"):
        parse(with_records(("data/0", b"12345678")))


def test_payload_and_pickle_agree_on_the_size() -> None:
    """A record of another length than the storage is damage."""
    item = with_records(("data.pkl", tensor_pickle(F32, (3,))), ("data/0", bytes(8)))
    with pytest.raises(DamagedError, match="has 8 bytes, its pickle says 12"):
        parse(item)


def test_a_view_outside_its_storage_is_damage() -> None:
    """Strides must stay inside the storage."""
    pickled = tensor_pickle(F32, (2, 3)).replace(b"K\x03K\x01\x86", b"K\x09K\x01\x86")
    with pytest.raises(DamagedError, match="ends at byte"):
        parse(with_records(("data.pkl", pickled), ("data/0", bytes(24))))


def test_a_pickle_of_any_size_is_not_read() -> None:
    """A tensor's pickle is small; a large one is refused before it is read."""
    item = with_records(("data.pkl", bytes(2 << 20)), ("data/0", b""))
    with pytest.raises(DamagedError, match=r"'data\.pkl' claims"):
        parse_tensor_item(length=len(item), head=item[:1000], tail=item[-2000:])


def test_no_item_makes_us_read_a_payload() -> None:
    """A pickle that claims to stand in the middle of 1 TiB is damage, not a wish for more."""
    length = 1 << 40
    archive = plan_archive([("data/0", length), ("data.pkl", b"1234"), ("data/1", length)])
    tail = archive.ending([1, 2])
    with pytest.raises(DamagedError, match="far from both ends"):
        parse_tensor_item(length=archive.length, head=archive.head, tail=tail)


def test_one_flipped_payload_bit_is_found() -> None:
    """The CRC-32 beside the payload is checked, not just carried."""
    for at in range(PAYLOAD_AT, DESCRIPTOR_AT):
        data = patched(at, bytes([ITEM[at] ^ 0x10]))
        (finding,) = check_item(data)
        assert "'data/0'" in finding.message
        with pytest.raises(DamagedError, match=r"'data/0' at byte \d+ has CRC-32"):
            parse_value_item(data)


def test_all_records_are_checked() -> None:
    """Flipped bits in several records give one finding each."""
    data = patched(ITEM.index(b"little"), b"X")
    data = patched(PAYLOAD_AT, b"\xff", data)
    assert [error.facts["record"] for error in check_item(data)] == ["byteorder", "data/0"]


def test_zips_of_other_writers_are_read() -> None:
    """An item without zip64 records, or with sizes in its local headers, is as good."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("x/data.pkl", tensor_pickle(F32, (2, 3)))
        archive.writestr("x/data/0", PAYLOAD)
    data = stream.getvalue()
    parsed = parse_tensor_item(length=len(data), head=data)
    assert (parsed.shape, parsed.crc32) == ((2, 3), crc32(PAYLOAD))
    assert check_item(data) == []


def flipped(data: st.DataObject, whole: bytes) -> bytes:
    out = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        out[data.draw(st.integers(0, len(out) - 1))] = data.draw(st.integers(0, 255))
    return bytes(out)


def cut(data: st.DataObject, whole: bytes) -> bytes:
    start = data.draw(st.integers(0, len(whole)))
    return whole[start : data.draw(st.integers(start, len(whole)))]


@settings(max_examples=400, deadline=None)
@given(st.data(), st.sampled_from([flipped, cut]))
def test_mutated_items_raise_our_errors_alone(
    data: st.DataObject, mutate: Callable[[st.DataObject, bytes], bytes]
) -> None:
    """Parsed, a ckptool error, or (of a part) a wish for more: nothing else, ever."""
    item = mutate(data, ITEM)
    try:
        parsed = parse_tensor_item(length=len(item), head=item)
        end = parsed.payload_offset + parsed.payload_num_bytes
        assert 0 <= parsed.payload_offset <= end <= len(item)
    except CkptoolError:
        assert check_item(item) is not None
    num_head = data.draw(st.integers(0, len(item)))
    num_tail = data.draw(st.integers(0, len(item)))
    more = wish(item, num_head, num_tail)
    if more is not None:
        assert num_head <= more.head_num_bytes <= len(item)
        assert num_tail <= more.tail_num_bytes <= len(item)
        assert (num_head, num_tail) != (more.head_num_bytes, more.tail_num_bytes)


def wish(item: bytes, num_head: int, num_tail: int) -> NeedMore | None:
    """What parsing start and end of an item asks for, None where it was parsed or refused."""
    tail = item[len(item) - num_tail :]
    try:
        parse_tensor_item(length=len(item), head=item[:num_head], tail=tail)
    except NeedMore as more:
        return more
    except CkptoolError:
        pass
    return None


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_mutated_values_raise_our_errors_alone(data: st.DataObject) -> None:
    """The same of values and of the raw zip reader."""
    whole = encode_value_item(b"\x80\x02K\x0c.", storages={"0": b"abc", "1": b""})
    item = flipped(data, whole)
    assert isinstance(check_item(item), list)
    with contextlib.suppress(DamagedError, UnsupportedError):
        parse_value_item(item)
    with contextlib.suppress(DamagedError, UnsupportedError):
        StoredZip(PartialBytes(length=len(item), head=item))


def test_two_records_never_claim_the_same_bytes() -> None:
    """An offset that another record has is damage; so is a name that another record has."""
    offset = ITEM[central_at(b"archive/byteorder") + 42 :][:4]
    with pytest.raises(DamagedError, match="beyond what follows it"):
        parse(patched(CENTRAL_AT + 42, offset))
    with pytest.raises(DamagedError, match="twice"):
        parse(with_records(("data.pkl", b"x"), ("data.pkl", b"y")))
