# SPDX-License-Identifier: Apache-2.0
"""Every sentence of the product is in messages.txt, where its words are reviewed."""

import messages


def test_the_messages_are_those_that_were_reviewed() -> None:
    assert messages.listed() == messages.GOLDEN.read_text(encoding="utf-8"), (
        "the product says something else; run python tests/tools/messages.py and review the change"
    )


def test_sentences_of_c_are_found() -> None:
    text = (
        'f("cannot open \\"%s\\": %" PRIu64\n  " bytes%%", /* "a b c d" */ a);\n#error "a b c d"\n'
    )
    assert [one for one in messages.of_c(text) if messages.is_sentence(one)] == [
        'cannot open "…": … bytes%'
    ]


def test_sentences_of_python_are_found() -> None:
    text = '"""A module of this name."""\nraise A(f"cannot open {path!r} for " "this", "a b")\n'
    assert [one for one in messages.of_python(text) if messages.is_sentence(one)] == [
        "cannot open … for this"
    ]
