# SPDX-License-Identifier: Apache-2.0
"""The ways to save that a storm compares."""

from __future__ import annotations

TORCH = "torch"
SAVE = "save"
ASYNC = "async"
NODE = "node"
RANK0 = "rank0"
NODE_ASYNC = "node-async"
RANK0_ASYNC = "rank0-async"

WAYS = {
    TORCH: "torch.save + fsync",
    SAVE: "ioshape.save",
    ASYNC: "ioshape.save_async",
    NODE: "save_group, node",
    RANK0: "save_group, rank0",
    NODE_ASYNC: "save_group_async, node",
    RANK0_ASYNC: "save_group_async, rank0",
}
USUAL = (TORCH, SAVE, ASYNC, NODE, RANK0)

#: who makes one generation of all ranks, and in which mode
GROUPS = {NODE: "node", RANK0: "rank0", NODE_ASYNC: "node", RANK0_ASYNC: "rank0"}
IN_BACKGROUND = (ASYNC, NODE_ASYNC, RANK0_ASYNC)
