"""The process that judges one case: reads a spec, writes one event a line, and may hang or die at any of them."""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import sys
import traceback
from typing import Any


def main(folder: str) -> int:
    """Judge the spec in ``folder``; 0 when a report was written."""
    with open(os.path.join(folder, "spec")) as file:
        spec = json.load(file)
    stack = open(os.path.join(folder, "stack"), "w")  # noqa: SIM115
    faulthandler.enable()
    faulthandler.dump_traceback_later(spec["timeout_s"], file=stack)
    with open(os.path.join(folder, "events"), "a", buffering=1) as events:

        def emit(event: dict[str, Any]) -> None:
            events.write(json.dumps(event) + "\n")

        emit({"begin": "import"})
        import graph_tests.checking as entry

        entry.inside_worker = True
        try:
            case = _case(spec)
        except Exception as error:
            emit({"failed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()})
            traceback.print_exc()
            return 1
        import torch

        from graph_tests.engine import environment, run_case

        emit({"gpu": torch.cuda.is_available(), "environment": environment()})
        report = run_case(case, emit)
        emit({"report": report.to_dict()})
    faulthandler.cancel_dump_traceback_later()
    # Interpreter shutdown after a failed capture may itself crash; the report is safe, so leave at once.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _case(spec: dict[str, Any]) -> Any:
    from graph_tests import discover
    from graph_tests.case import Case, Routing

    options = dict(spec["options"])
    if spec["case"]:
        case = discover.find(spec["place"], spec["case"])
        if options.get("layers"):
            options["layers"] = tuple(options["layers"])
        return dataclasses.replace(case, **options)
    module = discover.load(spec["place"])
    inputs = discover.lookup(discover.load(spec["inputs"][0]), spec["inputs"][1])
    routing = options.pop("routing", None)
    by_name = [discover.lookup(discover.load(p), n) for p, n in options.pop("constant_tensors", [])]
    options["constants"] = (*options.get("constants", ()), *by_name)
    for name in ("sizes", "warm_sizes", "layers", "tags"):
        if options.get(name) is not None:
            options[name] = tuple(options[name])
    return Case(
        name=spec["name"],
        make_inputs=inputs,
        fn=discover.lookup(module, spec["function"]),
        routing=Routing(**routing) if routing else None,
        **options,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
