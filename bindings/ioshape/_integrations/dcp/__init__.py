# SPDX-License-Identifier: Apache-2.0
"""Save and load checkpoints of torch.distributed.checkpoint (DCP) through ioshape."""
