"""The ledger: pieces in any order prove a payload, and what nobody read is a gap."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.engine.ledger import Ledger, join_crcs
from ckptool.errors import DamagedError
from ckptool.formats.crc import crc32
from ckptool.model import Box, Extent
from ckptool.planning.plan import Check

DATA = bytes(range(256)) * 3


def _check(crc=None, **options):
    return Check(
        0,
        Extent("__0_0.distcp", 100, 100 + len(DATA)),
        crc,
        "model.w",
        Box((0,), (768,)),
        **options,
    )


def _piece(start, end):
    return (100 + start, 100 + end, crc32(DATA[start:end]))


@given(st.permutations([(0, 5), (5, 100), (100, 101), (101, 700), (700, 768)]))
def test_pieces_in_any_order_prove_a_payload(order):
    """Adjacent ranges combine to the payload's CRC whatever came first."""
    ledger = Ledger([_check(crc32(DATA))])
    for start, end in order:
        ledger.add(0, _piece(start, end))
    assert ledger.proved == 1
    assert list(ledger.gaps()) == []


def test_a_wrong_byte_names_entry_box_file_and_bytes():
    """A CRC that does not agree is an error that says where."""
    ledger = Ledger([_check(crc32(DATA) ^ 1)])
    with pytest.raises(DamagedError, match=r"model.w \[0:768\]: bytes 100..868 of __0_0.distcp"):
        ledger.add(0, _piece(0, 768))


def test_what_was_not_read_is_a_gap_until_it_is():
    """Ranges that no output needed are named, and prove the payload once they are read."""
    ledger = Ledger([_check(crc32(DATA))])
    ledger.add(0, _piece(10, 20))
    ledger.add(0, _piece(30, 768))
    assert [gaps for _, gaps in ledger.gaps()] == [[(100, 110), (120, 130)]]
    for start, end in ((20, 30), (0, 10)):
        ledger.add(0, _piece(start, end))
    assert ledger.proved == 1


def test_ranges_that_overlap_are_read_again():
    """CRCs of overlapping ranges say nothing about the whole: it is asked for once more."""
    ledger = Ledger([_check(crc32(DATA))])
    ledger.add(0, _piece(0, 400))
    ledger.add(0, _piece(300, 768))
    assert ledger.proved == 0
    assert [gaps for _, gaps in ledger.gaps()] == [[(100, 868)]]
    ledger.add(0, _piece(0, 768))
    assert ledger.proved == 1
    assert list(ledger.gaps()) == []


def test_a_payload_without_a_crc_is_unverifiable_not_proved():
    """CRC 0 of compute_crc32=False is neither ok nor damage."""
    ledger = Ledger([_check(None)])
    ledger.add(0, _piece(0, 768))
    assert (ledger.proved, [check.entry for check in ledger.unverifiable]) == (0, ["model.w"])


def test_empty_payloads_are_proved_by_their_crc_alone():
    """A zero-size chunk has CRC 0 and needs no read."""
    empty = Check(0, Extent("f", 9, 9), 0, "w", None)
    assert Ledger([empty]).proved == 1


def test_joined_ranges_must_tile():
    """A gap or a missing end gives no CRC."""
    assert join_crcs([_piece(0, 5), _piece(6, 9)], 100, 109) is None
    assert join_crcs([_piece(0, 9)], 100, 110) is None
    assert join_crcs([_piece(0, 4), _piece(4, 9)], 100, 109) == crc32(DATA[:9])
