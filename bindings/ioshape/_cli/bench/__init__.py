# SPDX-License-Identifier: Apache-2.0
"""ioshape bench: processes that save together, beside neighbours at work."""
