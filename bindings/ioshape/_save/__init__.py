# SPDX-License-Identifier: Apache-2.0
"""Saving: from an object to the records that C writes, and handles of saves in progress."""
