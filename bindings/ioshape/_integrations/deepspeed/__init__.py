# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's checkpoints, written and read by us."""
