# SPDX-License-Identifier: Apache-2.0
"""ioshape trace: what a run's saves did."""
