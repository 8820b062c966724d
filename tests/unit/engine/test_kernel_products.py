"""Products with weights of every form: on every unit of a CPU they are what plain torch says."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from ctypes import c_int64, c_void_p
from pathlib import Path

import pytest
import torch

from quadriga.engine.kernels.build import SOURCES, find_compiler, has_compiler
from quadriga.engine.weights.matrix import Form, Matrix

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")

UNITS = {
    "plain": ["-march=x86-64"],
    "avx2": ["-march=x86-64-v3"],
    "avx512bw": ["-march=x86-64-v4"],
    "avx512 without bw": ["-march=x86-64-v3", "-mavx512f"],
    # As the engine's: there compilers choose what to contract. It alone has forms that files have.
    "native": ["-march=native", "-O3", "-DSTORED"],
}
FORMS = (Form.INT8, Form.BFLOAT16_PAIRS)
STORED = (Form.FLOAT32, Form.BFLOAT16, Form.FLOAT16, Form.Q8_0, Form.Q4_0, Form.Q4_1)
COUNTS = [*range(1, 10), 12, 16, 17, 24, 32, 48]
"""Tokens: each number has other tiles."""
SOURCE = """
#include "matrix.h"
using namespace quadriga;
extern "C" void product(int64_t form, int64_t m, int64_t n, int64_t k, const float* x,
                        const uint8_t* w, float* out) {
  with_form(form, [&](auto f) {
    using Form = decltype(f);
    if constexpr (Form::kInterleaved) {
      std::vector<uint8_t> rounded(m * input_bytes<Form>(k));
      for (int64_t i = 0; i < m; ++i)
        round_row<Form>(x + i * k, k, rounded.data() + i * input_bytes<Form>(k));
      matmul(form, m, n, k, Input{rounded.data(), input_bytes<Form>(k)}, w, out, n);
    }
#ifdef STORED
    else {
      const auto bytes = reinterpret_cast<const uint8_t*>(x);
      matmul(form, m, n, k, Input{bytes, k * int64_t{4}}, w, out, n);
    }
#endif
  });
}
extern "C" void row(int64_t form, const uint8_t* w, int64_t id, int64_t k, float* out) {
  expand_row_of(form, w, id, k, out);
}
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    """The products as compiled for each unit that this CPU has; the others are left out."""
    folder = tmp_path_factory.mktemp("products")
    (folder / "products.cpp").write_text(SOURCE)
    found = {}
    for unit, flags in UNITS.items():
        if unit != "native" and not _runs(folder, flags):
            continue
        target = folder / f"{unit}.so"
        _compile([*flags, "-shared", "-o", str(target), str(folder / "products.cpp")])
        found[unit] = ctypes.CDLL(str(target))
    return found


def _compile(arguments: list[str]) -> None:
    command = [find_compiler(), "-O1", "-std=c++20", "-fPIC", f"-I{SOURCES}", *arguments]
    subprocess.run(command, check=True, timeout=120.0)


def _runs(folder: Path, flags: list[str]) -> bool:
    """Whether this CPU has what `flags` ask for: the compiler's macros are those of `native`."""
    macros = []
    for these in (flags, UNITS["native"]):
        command = [find_compiler(), *these, "-dM", "-E", "-x", "c++", "/dev/null"]
        try:
            said = subprocess.run(command, check=True, timeout=60.0, capture_output=True, text=True)
        except subprocess.CalledProcessError:  # another architecture
            return False
        macros.append({line.split()[1] for line in said.stdout.splitlines() if "__AVX" in line})
    return macros[0] <= macros[1]


def product(library: ctypes.CDLL, matrix: Matrix, x: torch.Tensor) -> torch.Tensor:
    num_rows, columns = matrix.shape
    out = torch.full((x.shape[0], num_rows), float("nan"))
    library.product(
        c_int64(matrix.form),
        c_int64(x.shape[0]),
        c_int64(num_rows),
        c_int64(columns),
        c_void_p(x.data_ptr()),
        c_void_p(matrix.rows.data_ptr()),
        c_void_p(out.data_ptr()),
    )
    return out


def matrix_of(form: Form, num_rows: int, columns: int) -> tuple[Matrix, torch.Tensor]:
    numbers = torch.randn(num_rows, columns) * torch.rand(num_rows, 1)
    width = form.width(columns)
    assert width is not None
    stored = form.stored_rows(num_rows)
    matrix = Matrix(form, torch.zeros(stored, width, dtype=form.dtype), stored - num_rows)
    if form.block is None:
        matrix.fill(numbers)
    else:  # bytes of any weights, behind scales that are numbers
        matrix.rows.random_(256)
        blocks = matrix.rows.view(num_rows, -1, form.block.num_bytes)
        scales = torch.rand(*blocks.shape[:2], form.block.num_scales).half().view(torch.uint8)
        blocks[..., : scales.shape[-1]] = scales
    return matrix, numbers


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
@pytest.mark.parametrize(("num_rows", "columns"), [(16, 4), (37, 100), (160, 64), (298, 164)])
def test_every_unit_multiplies_what_torch_does(
    libraries: dict[str, ctypes.CDLL], form: Form, num_rows: int, columns: int
) -> None:
    torch.manual_seed(num_rows)
    matrix, _ = matrix_of(form, num_rows, columns)
    for count in COUNTS:
        x = torch.randn(count, columns) * torch.rand(count, 1) * 30
        wanted = matrix.linear(x)
        size = wanted.abs().max()
        found = {unit: product(library, matrix, x) for unit, library in libraries.items()}
        for unit, one in found.items():
            assert (one - wanted).abs().max() < 2e-6 * size, (unit, count)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
def test_a_result_depends_on_its_own_row_alone(
    libraries: dict[str, ctypes.CDLL], form: Form
) -> None:
    torch.manual_seed(3)
    matrix, _ = matrix_of(form, 221, 96)
    x = torch.randn(max(COUNTS), 96)
    for unit, library in libraries.items():
        alone = torch.cat([product(library, matrix, x[i : i + 1]) for i in range(len(x))])
        for count in COUNTS:
            assert torch.equal(product(library, matrix, x[:count]), alone[:count]), (unit, count)
        half = product(library, matrix[96:192], x[:5])
        assert torch.equal(half, alone[:5, 96:192]), unit


@pytest.mark.parametrize("form", STORED, ids=lambda f: f.name)
def test_products_with_stored_weights_are_those_of_torch_and_depend_on_their_row_alone(
    libraries: dict[str, ctypes.CDLL], form: Form
) -> None:
    torch.manual_seed(form)
    stored = libraries["native"]
    matrix, _ = matrix_of(form, 37, 160)
    x = torch.randn(max(COUNTS), 160)
    wanted = matrix.linear(x)
    alone = torch.cat([product(stored, matrix, x[i : i + 1]) for i in range(len(x))])
    assert (alone - wanted).abs().max() < 2e-6 * wanted.abs().max()
    for count in COUNTS:
        assert torch.equal(product(stored, matrix, x[:count]), alone[:count]), count
        part = product(stored, matrix[5:18], x[:count])
        assert torch.equal(part, alone[:count, 5:18]), count


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
def test_rows_are_read_back(libraries: dict[str, ctypes.CDLL], form: Form) -> None:
    torch.manual_seed(4)
    matrix, numbers = matrix_of(form, 96, 20)
    values = matrix.values(torch.float32)
    steps = numbers.abs().amax(1, keepdim=True) / 127 if form is Form.INT8 else numbers.abs() / 128
    assert ((values - numbers).abs() <= 0.5001 * steps).all()
    ids = torch.tensor([95, 0, 17, 17, 48])
    assert torch.equal(matrix.take(ids, torch.float32), values[ids])
    assert torch.equal(matrix[32:64].values(torch.float32), values[32:64])
    out = torch.empty(20)
    for library, row in itertools.product(libraries.values(), range(96)):
        library.row(
            c_int64(form),
            c_void_p(matrix.rows.data_ptr()),
            c_int64(row),
            c_int64(20),
            c_void_p(out.data_ptr()),
        )
        assert torch.equal(out, values[row]), row


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(
    libraries: dict[str, ctypes.CDLL], form: Form, strange: float
) -> None:
    torch.manual_seed(5)
    matrix, _ = matrix_of(form, 32, 64)
    x = torch.randn(3, 64)
    x[1, 7] = strange
    for unit, library in libraries.items():
        finite = product(library, matrix, x).isfinite().all(dim=1).tolist()
        assert finite == [True, False, True], unit


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
def test_rows_of_zeros_and_of_tiny_numbers_are_zero(
    libraries: dict[str, ctypes.CDLL], form: Form
) -> None:
    torch.manual_seed(6)
    matrix, _ = matrix_of(form, 32, 64)
    x = torch.stack([torch.zeros(64), torch.full((64,), 1e-38)])
    for unit, library in libraries.items():
        assert product(library, matrix, x).abs().max() < 1e-35, unit
    empty = Matrix(form, torch.zeros_like(matrix.rows))
    empty.fill(torch.zeros(32, 64))
    assert not empty.values(torch.float32).any()


def test_only_whole_groups_are_taken() -> None:
    assert Form.INT8.takes(37, 4)
    assert not Form.INT8.takes(37, 4, parts=1)
    assert Form.INT8.takes(48, 4, parts=1)
    assert not Form.INT8.takes(48, 4, parts=2)
    assert not Form.INT8.takes(32, 6)
    assert Form.BFLOAT16_PAIRS.takes(32, 6)
    assert not Form.BFLOAT16_PAIRS.takes(32, 5)
    matrix, _ = matrix_of(Form.INT8, 64, 8)
    with pytest.raises(ValueError, match="no whole groups"):
        matrix[8:24]
