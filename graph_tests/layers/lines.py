"""Which user line was running when: a line tracer for one thread."""

from __future__ import annotations

import bisect
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from graph_tests.source import Place, is_user_file, user_places, where_of_stack
from graph_tests.verdict import Where


class LineClock:
    """Context: notes the time at which each user line begins, and calls ``on_line`` there if given."""

    def __init__(self, on_line: Callable[[], int] | None = None) -> None:
        self._on_line = on_line
        self._times: list[int] = []
        self._places: list[list[Place]] = []

    def __enter__(self) -> LineClock:
        self._before = sys.gettrace()
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *args: object) -> None:
        sys.settrace(self._before)

    def at(self, mark: int) -> Where | None:
        """The line that was running at ``mark``: nanoseconds since the epoch, or what ``on_line`` counts."""
        index = bisect.bisect_right(self._times, mark) - 1
        if index < 0:
            return None
        return where_of_stack(self._places[index])

    def _stamp(self, frame: FrameType) -> None:
        self._times.append(self._on_line() if self._on_line is not None else time.time_ns())
        self._places.append(user_places(frame))

    def _enter_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._in_frame if is_user_file(frame.f_code.co_filename) else None

    def _in_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self._stamp(frame)
        elif event == "return":
            caller = frame.f_back
            while caller is not None and not is_user_file(caller.f_code.co_filename):
                caller = caller.f_back
            if caller is not None:
                self._stamp(caller)
        return self._in_frame
