# SPDX-License-Identifier: Apache-2.0
"""Save and load DeepSpeed checkpoints through ioshape."""
