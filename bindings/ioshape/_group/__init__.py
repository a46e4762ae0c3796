# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a job save and load together."""
