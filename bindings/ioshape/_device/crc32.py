# SPDX-License-Identifier: Apache-2.0
"""CRC-32 of bytes in a device's memory, computed by matrix products, which all devices have.

A CRC is linear over bits: the CRC of a message is the sum, modulo 2, of the CRCs of its bits. So
the bits of 128 bytes, multiplied by a matrix, give the 32 bits of one sum. 32 consecutive sums are
128 bytes again, and a second matrix combines them in the same way, and so on. All products are
integers up to 1,024, which even half precision represents exactly.
"""

from __future__ import annotations

import functools
import zlib

import torch

from ioshape._native import lib

_ROW_BYTES = 128
_SUM_BYTES = 4
_SUMS = _ROW_BYTES // _SUM_BYTES
# The most bytes whose bits are expanded at a time. The expanded bits take 24 times the memory.
_SPREAD_BYTES = 4 << 20


def _moved(crc32: int, n_bytes: int) -> int:
    """Return a sum, without the usual inversions, after `n_bytes` zeros were appended."""
    return int(lib.base_crc32_combine(crc32, 0, n_bytes))


@functools.cache
def _matrix(level: int, device: torch.device) -> torch.Tensor:
    """Return the contribution of each bit of 128 bytes to their sum, one row for each bit.

    The rows of the lowest bits of all bytes come first. On level 0 the bytes are those of the
    message. On higher levels they are sums, each of 128 * 32 ** (level - 1) bytes.
    """
    if level == 0:
        none = zlib.crc32(b"\0")
        bits = [zlib.crc32(bytes([1 << bit])) ^ none for bit in range(8)]
        rows = [_moved(one, _ROW_BYTES - 1 - at) for at in range(_ROW_BYTES) for one in bits]
    else:
        each = _ROW_BYTES * _SUMS ** (level - 1)
        rows = [
            _moved(1 << bit, (_SUMS - 1 - at) * each) for at in range(_SUMS) for bit in range(32)
        ]
    as_bits = torch.tensor([[row >> bit & 1 for bit in range(32)] for row in rows])
    by_bit = as_bits.view(_ROW_BYTES, 8, 32).transpose(0, 1)
    # The input has each bit at its place in the byte, as 0 or 2 ** bit. So divide by 2 ** bit.
    each_one = by_bit * 0.5 ** torch.arange(8).view(8, 1, 1)
    return each_one.reshape(8 * _ROW_BYTES, 32).to(device, _dtype(device))


def _dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.float16


@functools.cache
def _masks(device: torch.device) -> torch.Tensor:
    """Return a mask for each bit of a byte."""
    return torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device).view(8, 1)


def _sums(rows: torch.Tensor, level: int) -> torch.Tensor:
    """Return the sum of each row of 128 bytes, as four bytes."""
    matrix = _matrix(level, rows.device)
    bits = rows.unsqueeze(1).bitwise_and(_masks(rows.device)).to(matrix.dtype)
    ones = (bits.view(-1, 8 * _ROW_BYTES) @ matrix).to(torch.int32)
    odd = ones.bitwise_and_(1).view(-1, _SUM_BYTES, 8)
    return odd.mul_(_masks(rows.device).view(8)).sum(-1, dtype=torch.uint8)


@functools.cache
def _inversions(block_bytes: int, device: torch.device) -> torch.Tensor:
    """Return the value that the usual inversions before and after a block add to its sum."""
    added = zlib.crc32(bytes(block_bytes)).to_bytes(_SUM_BYTES, "little")
    return torch.tensor(list(added), dtype=torch.uint8, device=device)


def crc32_of_blocks(memory: torch.Tensor, block_bytes: int) -> torch.Tensor:
    """Return the CRC-32 of each block on the device of the memory, as four bytes, lowest first.

    `memory` is a tensor of bytes and holds whole blocks. The size of a block is a multiple of 128.
    """
    rows, most = memory.view(-1, _ROW_BYTES), _SPREAD_BYTES // _ROW_BYTES
    sums = torch.cat([_sums(rows[at : at + most], 0) for at in range(0, len(rows), most)])
    per_block, level = block_bytes // _ROW_BYTES, 1
    while per_block > 1:
        # Zeros before a message do not change its sum.
        missing = -per_block % _SUMS
        sums = sums.view(-1, per_block * _SUM_BYTES)
        padded = torch.nn.functional.pad(sums, (missing * _SUM_BYTES, 0))
        sums = _sums(padded.view(-1, _ROW_BYTES), level)
        per_block, level = (per_block + missing) // _SUMS, level + 1
    return sums.bitwise_xor_(_inversions(block_bytes, sums.device))
