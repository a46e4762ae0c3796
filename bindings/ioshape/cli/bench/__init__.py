# SPDX-License-Identifier: Apache-2.0
"""ioshape bench and ioshape bench storm."""
