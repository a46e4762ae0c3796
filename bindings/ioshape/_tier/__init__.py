# SPDX-License-Identifier: Apache-2.0
"""Save to a fast disk of the node first, and drain checkpoints to their destinations later."""
