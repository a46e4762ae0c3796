# SPDX-License-Identifier: Apache-2.0
"""ioshape doctor: look, from what was seen to findings by rules, and what to do about each."""
