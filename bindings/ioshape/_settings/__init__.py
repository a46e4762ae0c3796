# SPDX-License-Identifier: Apache-2.0
"""Settings, the library's context, and which rank this is."""
