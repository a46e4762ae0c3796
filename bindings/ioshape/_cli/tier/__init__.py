# SPDX-License-Identifier: Apache-2.0
"""ioshape drain, and what "ioshape ls" says of a tier."""
