"""Judges a sound callable while another profiler is attached, and prints the report: run in a process of its own."""

from __future__ import annotations

import torch

from graph_tests.checking import check
from graph_tests.tests import faulty, sound


def main() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        report = check(sound.masked_fill, faulty.make, isolate=False)
    print("\n" + report.to_json(indent=None))


if __name__ == "__main__":
    main()
