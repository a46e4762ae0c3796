# SPDX-License-Identifier: Apache-2.0
"""ioshape advise: how often to save."""
