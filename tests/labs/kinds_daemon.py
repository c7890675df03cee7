"""A daemon that has C answer some kinds of requests alone: ``kinds_daemon.py KIND,... VOLUME POINT [-o WORD]...``.

Kinds are those of `KernelAnswers`; none: an empty word.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

from kvfuse.cli import main
from kvfuse.volume.blocks.kernel_answers import KernelAnswers


def answering(kinds: Collection[str]) -> tuple[str, ...]:
    """Command of a `KvfuseMount` of this daemon."""
    return sys.executable, __file__, ",".join(sorted(kinds))


def leave_others(kinds: Collection[str]) -> None:
    begin = KernelAnswers.begin

    def answer_only(answers: KernelAnswers, *words: Any) -> object:
        answers.answer_only(kinds)
        return begin(answers, *words)

    KernelAnswers.begin = answer_only  # type: ignore[method-assign]


if __name__ == "__main__":
    leave_others(sys.argv.pop(1).split(","))
    sys.argv[1:1] = ["mount", "--foreground"]
    main()
