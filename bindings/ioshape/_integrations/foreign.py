# SPDX-License-Identifier: Apache-2.0
"""The base that type checkers see for classes that derive from a class of another package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


class Foreign:
    """A base whose objects fit every parameter, because a type checker may lack the package.

    At run time the class of the package takes its place.
    """

    if TYPE_CHECKING:

        def __new__(cls, *arguments: Any, **named: Any) -> Any: ...
        def __init__(self, *arguments: Any, **named: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...
