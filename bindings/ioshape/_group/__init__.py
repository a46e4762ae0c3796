# SPDX-License-Identifier: Apache-2.0
"""Save and load checkpoints of all ranks of a job together."""
