# SPDX-License-Identifier: Apache-2.0
"""Tensors of all dtypes and layouts, views, and storages."""

import functools
import re
from typing import Any

import torch
from torch import nn

from zoo.cases import CASES, Case, case, filled, untyped

# ---- dtypes -------------------------------------------------------------------------------------

_ALL_DTYPES = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
# Tensors of these dtypes are made by separate functions.
_QUANTIZED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted(_ALL_DTYPES - _QUANTIZED, key=str)


def _of_dtype(dtype: torch.dtype) -> Any:
    matrix = filled(dtype, 6, 5)
    return {
        "matrix": matrix,
        "transposed": matrix.t(),
        "rows": matrix[2:4],
        "scalar": filled(dtype),
        "empty": filled(dtype, 0),
        "none of three": filled(dtype, 3, 0),
    }


for _dtype in DTYPES:
    _short_name = str(_dtype).removeprefix("torch.")
    _refused = re.fullmatch(r"u?int[1-7]", _short_name) is not None
    CASES[f"dtype_{_short_name}"] = Case(
        functools.partial(_of_dtype, _dtype), exact=not _refused, refused=_refused
    )


@case()
def special_floats() -> Any:
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    values = [float("nan"), -float("nan"), float("inf"), -0.0, 5e-324, 1e-40]
    payloads = torch.tensor([0x7FC12345, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    return [*(torch.tensor(values, dtype=kind) for kind in kinds), payloads]


# ---- Layouts ------------------------------------------------------------------------------------


@case(any_data=False)
def quantized() -> Any:
    values = torch.linspace(-3, 4, 24).reshape(4, 6)
    scales, zeros = torch.linspace(0.1, 0.4, 4), torch.arange(4)
    return {
        "quint8": torch.quantize_per_tensor(values, 0.1, 10, torch.quint8),
        "qint8": torch.quantize_per_tensor(values, 0.1, 0, torch.qint8),
        "qint32": torch.quantize_per_tensor(values, 0.01, 3, torch.qint32),
        "channels": torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8),
        "transposed": torch.quantize_per_tensor(values, 0.1, 10, torch.quint8).t(),
        "empty": torch.quantize_per_tensor(values[:0], 0.1, 10, torch.quint8),
    }


@case()
def quantized_in_halves_of_bytes() -> Any:
    values = torch.linspace(-3, 4, 24).reshape(4, 6)
    scales, zeros = torch.linspace(0.1, 0.4, 4), torch.linspace(0, 1, 4)
    return torch.quantize_per_channel(values, scales, zeros, 0, torch.quint4x2)


@case(exact=False)
def quantized_without_quantizer() -> Any:
    return filled(torch.uint8, 6).view(torch.quint8)


@case(any_data=False)
def sparse_coo() -> Any:
    indices = torch.tensor([[0, 2, 2, 0], [1, 0, 3, 1]])
    values = torch.tensor([1.5, 2.5, 3.5, 4.5])
    plain = torch.sparse_coo_tensor(indices, values, (3, 5))
    return {
        "not coalesced": plain,
        # A clone, because coalescing leaves some of its memory uninitialized.
        "coalesced": plain.coalesce().clone(),
        "hybrid": torch.sparse_coo_tensor(indices, torch.arange(12.0).reshape(4, 3), (3, 5, 3)),
        "empty": untyped.sparse_coo_tensor(size=(4, 0, 2)),
        "none": untyped.sparse_coo_tensor(size=(4, 4)),
        "complex": torch.sparse_coo_tensor(indices, values.to(torch.complex64), (3, 5)),
        "bool": torch.sparse_coo_tensor(indices, values > 2, (3, 5)),
    }


@case(exact=False, any_data=False)
def sparse_with_gradient() -> Any:
    indices = torch.tensor([[0, 2], [1, 0]])
    return torch.sparse_coo_tensor(indices, torch.tensor([1.5, 2.5]), (3, 5)).requires_grad_()


@case(any_data=False)
def sparse_compressed() -> Any:
    dense = torch.zeros(6, 8)
    dense[0, 1], dense[3, 5], dense[5, 0] = 1.5, 2.5, 3.5
    batched = torch.stack([dense, dense * 2])
    return {
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((2, 4)),
        "bsc": dense.to_sparse_bsc((3, 2)),
        "batched": batched.to_sparse_csr(),
        "int32": torch.sparse_csr_tensor(
            torch.tensor([0, 1, 2], dtype=torch.int32),
            torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([1, 2], dtype=torch.float64),
        ),
        "empty": torch.zeros(0, 4).to_sparse_csr(),
    }


@case(any_data=False)
def nested_strided() -> Any:
    parts = [torch.arange(6.0).reshape(2, 3), torch.arange(12.0).reshape(4, 3)]
    nested = torch.nested.nested_tensor(parts)
    return {"plain": nested, "transposed": nested.transpose(1, 2)}


@case(any_data=False)
def nested_jagged() -> Any:
    parts = [torch.arange(6.0).reshape(2, 3), torch.arange(12.0).reshape(4, 3)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


@case(refused=True)
def mkldnn() -> Any:
    return torch.arange(24.0).reshape(1, 2, 3, 4).to_mkldnn()


@case(exact=False)
def meta() -> Any:
    base = torch.empty(6, 4, device="meta")
    return {
        "base": base,
        "view": base[2:].t(),
        "parameter": nn.Parameter(torch.empty(3, device="meta")),
        "module": nn.Linear(3, 4, device="meta"),
    }


@case(refused=True)
def meta_storage() -> Any:
    return torch.empty(6, device="meta").untyped_storage()


@case()
def empties() -> Any:
    return [torch.zeros(shape) for shape in [(0,), (3, 0), (0, 0, 2), (1, 0, 1)]]


@case()
def scalars() -> Any:
    return [torch.tensor(value) for value in (1, 2.5, True, 3 + 4j)]


@case()
def empty_view_of_much() -> Any:
    return torch.arange(1000.0)[7:7]


# ---- Views and storages -------------------------------------------------------------------------


@case()
def views_of_one_storage() -> Any:
    base = torch.arange(120.0)
    square = base[:100].reshape(10, 10)
    return {
        "base": base,
        "slice": base[3:90:4],
        "transposed": square.t(),
        "block": square[2:5, 4:9],
        "diagonal": square.diagonal(),
        "windows": base.unfold(0, 7, 2),
        "overlapping": base.as_strided((5, 6), (1, 2), 3),
        "expanded": base[4:5].expand(6, 1),
        "of no dimension": base[17],
        "again": base,
    }


@case()
def tied_weights() -> Any:
    weight = nn.Parameter(torch.randn(4, 3))
    return {"embedding": weight, "head": weight, "view": weight.detach(), "data": weight.data}


@case()
def expanded_alone() -> Any:
    return torch.tensor([1.5]).expand(1000)


@case()
def memory_formats() -> Any:
    return [
        filled(torch.float32, 2, 3, 4, 5).to(memory_format=torch.channels_last),
        filled(torch.float32, 2, 3, 2, 4, 5).to(memory_format=torch.channels_last_3d),
        filled(torch.int16, 2, 3, 4).permute(2, 0, 1),
    ]


@case()
def conjugated_and_negated() -> Any:
    def numbers() -> torch.Tensor:
        return torch.complex(torch.arange(6.0), torch.arange(6.0) + 10)

    shared = numbers()
    return {
        "conj": shared.conj(),
        "plain": shared,
        "both": torch._neg_view(shared.conj()),
        "neg": numbers().conj().imag,
        "real": torch._neg_view(torch.arange(4.0)),
    }


@case(exact=False)
def untyped_storages() -> Any:
    return [torch.arange(10).untyped_storage(), untyped.UntypedStorage(0)]  # they come back typed


@case()
def storages() -> Any:
    shared = untyped.arange(12.0)
    return {
        "typed": untyped.arange(5.0).storage(),
        "of long": untyped.arange(5).storage(),
        "tensor": shared,
        "its storage": shared.storage(),
        "class": untyped.FloatStorage([1.0, 2.0]),
    }


@case(refused=True)
def storage_of_two_dtypes() -> Any:
    base = torch.arange(8, dtype=torch.int32)
    return [base, base.view(torch.float32)]


@case(refused=True)
def storage_beside_its_tensor() -> Any:
    base = torch.arange(8.0)
    return [base, base.untyped_storage()]


@case()
def larger_storages() -> Any:
    return {
        "two pages": filled(torch.uint8, 8193),
        "large": filled(torch.float32, 300, 1001),
        "small": filled(torch.uint8, 3),
        "block": filled(torch.int64, (4 << 20) // 8),
        "block and one": filled(torch.uint8, (4 << 20) + 1),
    }


@case()
def lazily_copied() -> Any:
    base = torch.arange(2000.0)
    return [base, torch._lazy_clone(base)]


@case()
def in_shared_memory() -> Any:
    return untyped.arange(100.0).share_memory_()
