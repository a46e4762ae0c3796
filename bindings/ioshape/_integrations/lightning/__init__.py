# SPDX-License-Identifier: Apache-2.0
"""Save and load Lightning checkpoints through ioshape."""
