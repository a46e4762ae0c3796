# SPDX-License-Identifier: Apache-2.0
"""Commands that ask the coordinator: slots, top, exporter."""
