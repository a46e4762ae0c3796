# SPDX-License-Identifier: Apache-2.0
"""Simulate a cluster of 100,000 nodes that saves checkpoints, in discrete events.

docs/scale.md describes the model and the results. Events are in our own heap. A library such as
simpy makes a process of each request, which takes ten times as long, and there are millions of
requests.
"""
