# SPDX-License-Identifier: Apache-2.0
"""A cluster of 100,000 nodes that saves checkpoints, in discrete events. docs/scale.md says what is
modelled, and what came out.

    python -m tests.simulate --help

The events are in a heap of our own: a library such as simpy makes a process of each request, which
costs ten times as much, and there are millions of requests.
"""
