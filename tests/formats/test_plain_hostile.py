"""Values from a stranger: a hostile pickle ends in an error of ours, at once, and runs nothing."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.dtypes import DTYPES
from ckptool.errors import CkptoolError, DamagedError, UnsupportedError
from ckptool.formats.plain_values import NotPlain, TensorRef, decode_value, encode_value, short_repr

TENSOR = encode_value(TensorRef("0", 24, DTYPES["float32"], (2, 3), (3, 1)))
VALUE = encode_value({"a": [1, (2.5, "x", b"y")], "b": {3}, "t": decode_value(TENSOR)})


def test_nothing_is_called(tmp_path: Any) -> None:
    """A planted call is named and never made."""

    class Planted:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "harm"),)

    for protocol in range(2, 6):
        with pytest.raises(NotPlain, match="mkdir"):
            decode_value(pickle.dumps([Planted()], protocol))
    assert not (tmp_path / "harm").exists()


def test_cut_short_anywhere() -> None:
    """A value cut at any byte is damaged, and nothing else."""
    for data in (TENSOR, VALUE):
        for end in range(len(data)):
            with pytest.raises(DamagedError):
                decode_value(data[:end])


@settings(max_examples=400, deadline=None)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(VALUE) - 1), st.binary(max_size=4)), min_size=1, max_size=4
    )
)
def test_mutated_anyhow(edits: list[tuple[int, bytes]]) -> None:
    """Bytes changed at random give a value that can be shown and encoded, or our errors."""
    data = VALUE
    for position, replacement in edits:
        data = data[:position] + replacement + data[position + len(replacement) :]
    try:
        value = decode_value(data)
    except (DamagedError, UnsupportedError):
        return
    assert len(short_repr(value)) <= 80
    assert encode_value(value)


@pytest.mark.parametrize(
    "opcodes",
    [
        pytest.param(b"})" + b"\x85" * 1_000_000 + b"Ns", id="a key nested a million deep"),
        pytest.param(b"})" + b"2\x86" * 60 + b"Ns", id="a key of 2**60 parts"),
        pytest.param(b")" + b"2\x86" * 60 + b"Q", id="a persistent id of 2**60 parts"),
        pytest.param(b"]" * 200_000 + b"a" * 199_999, id="a list nested 200,000 deep"),
        pytest.param(b"]q\x00h\x00a", id="a list in itself"),
        pytest.param(b"}q\x00K\x01h\x00s", id="a dict in itself"),
        pytest.param(b"Nr\xff\xff\xff\xffj\xff\xff\xff\xfe", id="a memo slot of 2**32"),
        pytest.param(b"cbuiltins\neval\n", id="a bare global"),
        pytest.param(b"ctorch\nFloatStorage\n", id="a bare storage class"),
        pytest.param(b"ccollections\nOrderedDict\n", id="a bare OrderedDict"),
        pytest.param(b"ccollections\nOrderedDict\n)R}X\x05\0\0\0itemsNsb", id="items shadowed"),
        pytest.param(b"]}X\x05\0\0\0classNsb", id="attributes of a list"),
        pytest.param(b"c__builtin__\nset\n]K\x01a\x85R" + b"0" * 9, id="pops beyond the bottom"),
        pytest.param(b"\x8b\xff\xff\xff\x7f", id="an int of 2 GiB"),
        pytest.param(b"ctorch\nSize\nJ\xff\xff\xff\xff\x85\x85R", id="a size below 0"),
        pytest.param(b"c_codecs\nencode\nX\x01\0\0\0xX\x03\0\0\0hex\x86R", id="another codec"),
    ],
)
def test_hostile_opcodes(opcodes: bytes) -> None:
    """Each trick of a hostile pickle ends in one of our errors, at once."""
    with pytest.raises((DamagedError, UnsupportedError)):
        decode_value(b"\x80\x02" + opcodes + b".")


def test_values_that_unfold_without_end_are_described() -> None:
    """A list that unfolds to 2**60 parts is shown and encoded in its own small size."""
    value: list[Any] = []
    for _ in range(60):
        value = [value, value]
    decoded = decode_value(pickle.dumps(value))
    assert len(short_repr(decoded)) == 80
    assert len(encode_value(decoded)) < 2000


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"storage_num_bytes": 20}, "ends at byte 24 of a storage of 20 bytes"),
        ({"storage_offset": 1}, "ends at byte 28"),
        ({"strides": (2**40, 1)}, "ends at byte"),
        ({"shape": (2**40, 2**40)}, "beyond 64 bits"),
        ({"strides": (1,)}, "differ in dims"),
    ],
)
def test_tensors_that_reach_beyond_their_storage(changes: dict[str, Any], why: str) -> None:
    """A tensor whose elements lie outside its storage is damaged, and where is said."""
    ref = TensorRef("0", 24, DTYPES["float32"], (2, 3), (3, 1))
    fields = {name: getattr(ref, name) for name in TensorRef.__slots__} | changes
    with pytest.raises(DamagedError, match=why):
        decode_value(encode_value(TensorRef(**fields)))


def test_unknown_dtype_is_named() -> None:
    """A tensor of a dtype that we do not know stops with its name."""
    data = encode_value(TensorRef("0", 6, DTYPES["uint16"], (3,), (1,)))
    with pytest.raises(UnsupportedError, match="bits16"):
        decode_value(data.replace(b"torch\nuint16", b"torch\nbits16"))


def test_errors_travel_between_processes() -> None:
    """NotPlain keeps its class name through a pickle of the error itself."""
    error = pickle.loads(pickle.dumps(NotPlain.named("mypkg.Thing")))
    assert isinstance(error, CkptoolError)
    assert error.class_name == "mypkg.Thing"
