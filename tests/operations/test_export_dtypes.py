"""export and dtypes: casts that are counted, bits that pass untouched, dtypes that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import stock_ranks
from dcp_writer import save_plain
from exports import files, loaded, tensors_of
from plain_checkpoint import Saved, read_safetensors, rows_of, write_checkpoint

from ckptool.dtypes import dtype_named
from ckptool.errors import UnsupportedError
from ckptool.model import Box
from ckptool.operations.export import export

torch = pytest.importorskip("torch")


def test_casts_are_for_floats_only(tmp_path):
    """--dtype takes every floating tensor, no int and no bool, and says how many."""
    state = {
        "a": torch.randn(5).bfloat16(),
        "b": torch.arange(3),
        "c": torch.tensor([True, False]),
        "d": torch.randn(2, 2).double(),
        "e": torch.randn(3, dtype=torch.complex64),
    }
    save_plain(state, tmp_path / "a")
    for name in ("float32", "bfloat16", "float16", "float64"):
        target = getattr(torch, name)
        out = tmp_path / f"{name}.safetensors"
        result = export(str(tmp_path / "a"), str(out), everything=True, dtype=name)
        found = tensors_of(out)
        for key, tensor in state.items():
            wanted = tensor.to(target) if tensor.is_floating_point() else tensor
            assert stock_ranks.same(found[key], wanted), (name, key)
        assert result.to_json()["num_tensors_cast"] == (1 if name in ("bfloat16", "float64") else 2)


def test_each_tensor_keeps_its_own_dtype(tmp_path):
    """Norms in f32, linears in bf16, a scale in f16, a mask: all kept, and no key skipped."""
    state = {
        "norm": torch.randn(3),
        "linear": torch.randn(2, 3).bfloat16(),
        "scale": torch.randn(1).half(),
        "mask": torch.ones(4, dtype=torch.bool),
        "embed_tokens.weight": torch.randn(5, 2).bfloat16(),
    }
    save_plain(state, tmp_path / "a")
    export(str(tmp_path / "a"), str(tmp_path / "x.safetensors"))
    found = tensors_of(tmp_path / "x.safetensors")
    assert found.keys() == state.keys()
    assert all(stock_ranks.same(found[key], state[key]) for key in state)


def hard_doubles() -> Any:
    """float64 values whose rounding goes wrong when it is done twice, and the extremes."""
    ties = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11]
    around = [t + sign * eps for t in ties for sign in (1, -1) for eps in (2**-40, 2**-52, 2**-30)]
    tiny = [2.0**-149, 2.0**-150, 1.5 * 2.0**-150, 2.0**-24, 2.0**-25, 1.0001 * 2.0**-25, 5e-324]
    large = [65504.0, 65519.999, 65520.0, 3.4028235e38, 3.3961775e38, 1e39, 1.7e308]
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan")]
    values = np.array([*ties, *around, *tiny, *large], np.float64)
    return np.concatenate([values, -values, np.array(special)])


def nearest_even(value: float, bits: int, exponent_min: int, largest: float) -> float:
    """A float64 rounded to ``bits`` of significand, by exact integer arithmetic."""
    from fractions import Fraction

    if value != value or value in (float("inf"), float("-inf"), 0.0):
        return value
    exact = Fraction(value)
    exponent = max(np.frexp(value)[1] - 1, exponent_min)
    unit = Fraction(2) ** (int(exponent) - bits + 1)
    steps = exact / unit
    whole = steps.numerator // steps.denominator
    rest = steps - whole
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2):
        whole += 1
    rounded = whole * unit
    if abs(rounded) > Fraction(largest):
        return float("inf") if value > 0 else float("-inf")
    return float(rounded) if rounded else (0.0 if value > 0 else -0.0)


@pytest.mark.parametrize(
    ("name", "bits", "exponent_min", "largest"),
    [
        ("float16", 11, -14, 65504.0),
        ("bfloat16", 8, -126, 3.3895313892515355e38),
        ("float32", 24, -126, 3.4028234663852886e38),
    ],
)
def test_rounding_is_to_nearest_even(tmp_path, name, bits, exponent_min, largest):
    """From float64 too, where going through float32 would round twice; losses are counted."""
    array = hard_doubles()
    write_checkpoint(tmp_path / "a", {"w": rows_of(array, "float64", len(array))})
    out = tmp_path / "x.safetensors"
    result = export(str(tmp_path / "a"), str(out), everything=True, dtype=name)
    found = tensors_of(out)["w"].double().numpy()
    wanted = np.array([nearest_even(float(v), bits, exponent_min, largest) for v in array])
    np.testing.assert_array_equal(found, wanted)
    assert np.array_equal(np.signbit(found), np.signbit(wanted)) or np.isnan(array).any()
    assert result.report is not None
    count = result.report.casts["w"]
    assert count.overflows == np.count_nonzero(np.isinf(wanted) & np.isfinite(array))
    assert count.underflows == np.count_nonzero((wanted == 0) & (array != 0))
    assert count.overflows > 0 and count.underflows > 0


def test_overflow_is_counted_per_tensor(tmp_path):
    """f32 up to 1e5 to f16: stock gives inf without a word; here they are counted and named."""
    state = {"big": torch.tensor([1.0, 1e5, -1e5, 3e38]), "fine": torch.tensor([1.0, 2.0])}
    save_plain(state, tmp_path / "a")
    result = export(str(tmp_path / "a"), str(tmp_path / "x.pt"), everything=True, dtype="float16")
    assert result.to_json()["casts"] == {"big": {"overflows": 3, "underflows": 0}}


def test_float8_bytes_pass_untouched(tmp_path):
    """bf16, float8_e4m3fn and e5m2, every bit pattern: bytes in are bytes out."""
    patterns = np.arange(65536, dtype=np.uint16)
    saved = {
        "bf16": Saved(patterns, [Box((0,), (65536,))], "bfloat16"),
        "e4m3": Saved(patterns.view(np.uint8), [Box((0,), (131072,))], "float8_e4m3fn"),
        "e5m2": Saved(patterns.view(np.uint8), [Box((0,), (131072,))], "float8_e5m2"),
    }
    write_checkpoint(tmp_path / "a", saved)
    export(str(tmp_path / "a"), str(tmp_path / "x.safetensors"), everything=True)
    found = read_safetensors(tmp_path / "x.safetensors")
    for key, want in saved.items():
        assert found[key][0] == dtype_named(want.dtype).safetensors
        assert found[key][2] == patterns.tobytes()


@pytest.mark.parametrize("name", ["int8", "complex64", "float4_e2m1fn_x2", "float99"])
def test_only_floats_can_be_cast_to(stock, tmp_path, name):
    """Exit 11, and the dtype is named."""
    with pytest.raises(UnsupportedError, match=name):
        export(str(stock), str(tmp_path / "x.pt"), dtype=name)
    assert files(tmp_path) == []


def test_a_dtype_that_safetensors_has_not(tmp_path):
    """complex128: refused with the key before a byte is written; .pt takes it."""
    save_plain({"z": torch.randn(2, dtype=torch.complex128), "w": torch.ones(2)}, tmp_path / "a")
    with pytest.raises(UnsupportedError, match="z: safetensors has no dtype complex128") as caught:
        export(str(tmp_path / "a"), str(tmp_path / "x.safetensors"), everything=True)
    assert "--exclude 'z'" in str(caught.value.hint)
    assert not (tmp_path / "x.safetensors").exists()
    export(str(tmp_path / "a"), str(tmp_path / "x.pt"), everything=True)
    assert loaded(tmp_path / "x.pt")["z"].dtype == torch.complex128
