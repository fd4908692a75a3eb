"""Every case with the verdict that it must get: faulty ones, sound ones, and the tool's own failures."""

from __future__ import annotations

import dataclasses
import inspect
import re

from graph_tests.case import Case, Routing
from graph_tests.tests import faulty, faulty_kernels, faulty_ops, self_failure, sound
from graph_tests.tests.faulty import make
from graph_tests.verdict import Kind, Verdict, Where

REFUTED, STATIC_REFUTED, CLEAN = Verdict.REFUTED, Verdict.STATIC_REFUTED, Verdict.STATIC_CLEAN
PROVEN, UNSURE = Verdict.PROVEN, Verdict.INCONCLUSIVE
SIZES = (1, 2, 16, 64)


@dataclasses.dataclass(frozen=True)
class Expected:
    """A case, its verdict with and without a GPU, and the findings that must be among those reported.

    ``kinds`` are (kind, operation, count) with count 0 for any; ``static_kinds`` are those seen without a GPU
    (default: the same). ``line`` asks that the first one names the marked line of ``source``.
    """

    case: Case
    verdict: Verdict
    static: Verdict
    kinds: tuple[tuple[Kind, str, int], ...] = ()
    static_kinds: tuple[tuple[Kind, str, int], ...] | None = None
    source: object = None
    sizes: dict[int, Verdict] | None = None

    @property
    def line(self) -> int | None:
        """The line that ends in # in the source of the callable, or None."""
        if self.source is None:
            return None
        lines, first = inspect.getsourcelines(self.source)  # type: ignore[arg-type]
        marked = [first + i for i, text in enumerate(lines) if text.rstrip().endswith("#")]
        assert len(marked) == 1, f"{self.case.name}: {len(marked)} lines are marked, one must be"
        return marked[0]


def _bad(
    fn: object,
    static: Verdict,
    *kinds: tuple[Kind, str, int],
    inputs: object = make,
    marked: bool = True,
    static_kinds: tuple[tuple[Kind, str, int], ...] | None = None,
    at: dict[int, Verdict] | None = None,
    **options: object,
) -> Expected:
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", getattr(fn, "__name__", "")).lower().replace("_", "-")
    made = {"build": fn} if inspect.isclass(fn) else {"fn": fn}
    case = Case(name=name, make_inputs=inputs, **made, **options)  # type: ignore[arg-type]
    return Expected(case, REFUTED, static, kinds, static_kinds, fn if marked else None, at)


def _good(
    name: str, fn: object, inputs: object = make, static: Verdict = CLEAN, verdict: Verdict = PROVEN, **options: object
) -> Expected:
    made = {"build": fn} if inspect.isclass(fn) else {"fn": fn}
    return Expected(Case(name=name, make_inputs=inputs, **made, **options), verdict, static)  # type: ignore[arg-type]


def _make_pair(seed: int):
    x = make(seed)[0]
    return x, x.clone()


def faulty_cases() -> list[Expected]:
    """Every faulty callable."""
    f, k, o = faulty, faulty_kernels, faulty_ops
    late = (Kind.DEVICE_TO_HOST, "copy_", 0)
    return [
        _bad(f.item, STATIC_REFUTED, (Kind.HOST_READ, "item", 0)),
        _bad(f.tolist, STATIC_REFUTED, (Kind.HOST_READ, "bincount", 0), (Kind.HOST_READ, "tolist", 0)),
        _bad(f.loop, STATIC_REFUTED, (Kind.DATA_SHAPE, "nonzero", 8)),
        _bad(f.mask_put, STATIC_REFUTED, (Kind.DATA_SHAPE, "index_put_", 0)),
        _bad(f.literal, STATIC_REFUTED, (Kind.HOST_TO_DEVICE, "tensor", 0)),
        _bad(f.one_hot, STATIC_REFUTED, (Kind.HOST_READ, "one_hot", 0)),
        _bad(f.equal, STATIC_REFUTED, (Kind.HOST_READ, "equal", 0), inputs=_make_pair),
        _bad(f.inverse, STATIC_REFUTED, (Kind.HOST_CHECK, "inv", 0), inputs=f.make_square),
        _bad(f.sync, STATIC_REFUTED, (Kind.EXPLICIT_SYNC, "torch.cuda.synchronize", 0)),
        _bad(o.opaque, CLEAN, (Kind.HOST_READ, "graph_tests_faulty::opaque", 0), marked=False),
        _bad(f.LateRead, STATIC_REFUTED, late, (Kind.BAKED_SCALAR, "mul", 0), static_kinds=(late,)),
        _bad(f.unjoined, CLEAN, (Kind.STREAM_FORK, "sin", 0)),
        _bad(k.first_call, CLEAN, (Kind.COMPILE_IN_CAPTURE, "double_kernel", 0)),
        _bad(
            k.autotune,
            CLEAN,
            (Kind.AUTOTUNE_IN_CAPTURE, "tuned_kernel", 0),
            at={64: PROVEN, 128: REFUTED},
            sizes=(64, 128),
            warm_sizes=(64,),
        ),
        _bad(k.default_stream, UNSURE, (Kind.ESCAPED, "graph_tests_scale", 0)),
        _bad(k.host_node, UNSURE, (Kind.HOST_NODE, "host function", 0)),
        _bad(f.Counter, STATIC_REFUTED, (Kind.BAKED_STATE, "mul", 0)),
        _bad(f.cpu_scalar, STATIC_REFUTED, (Kind.BAKED_SCALAR, "mul", 0), inputs=f.make_scaled),
        _bad(k.host_grid, STATIC_REFUTED, (Kind.TOPOLOGY, "per_block_kernel", 0), inputs=k.make_counts),
        _bad(f.Freed, CLEAN, (Kind.DEAD_INPUT, "", 0), marked=False),
        _bad(f.tail, CLEAN, (Kind.UNINITIALISED, "", 0), marked=False),
        _bad(f.Accumulate, CLEAN, (Kind.NOT_IDEMPOTENT, "index_add_", 0)),
        _bad(f.Workspace, CLEAN, (Kind.OUTPUT_ALIAS, "mul", 0)),
        _bad(o.hidden_write, CLEAN, (Kind.MUTATION, "graph_tests_faulty::hidden_write", 0)),
        _bad(o.fake_width, CLEAN, (Kind.FAKE_MISMATCH, "graph_tests_faulty::fake_width", 0)),
        _bad(o.fake_int, STATIC_REFUTED, (Kind.SPECIALISATION, "graph_tests_faulty::fake_int", 0)),
        _bad(o.vanishes, STATIC_REFUTED, (Kind.ELIMINATED, "graph_tests_faulty::vanishes", 0), mode="compiled"),
        _bad(o.no_graphs, CLEAN, (Kind.CUDAGRAPH_SKIPPED, "torch.compile", 0), mode="compiled", marked=False),
        _bad(f.mutated, CLEAN, (Kind.CUDAGRAPH_SKIPPED, "torch.compile", 0), mode="compiled", marked=False),
        _bad(
            k.empty,
            UNSURE,
            (Kind.EMPTY_BATCH, "CudaError", 0),
            at={0: REFUTED, 1: PROVEN, 64: PROVEN},
            sizes=(0, 1, 64),
        ),
    ]


def sound_cases() -> list[Expected]:
    """Every sound callable, eager at one size and compiled at several."""
    s = sound
    routed = Routing(ids=1, num_experts=faulty.E, padded=True)
    scale = faulty.SCALE
    eager = [
        _good("moe", s.moe, s.make_moe),
        _good("masked-fill", s.masked_fill),
        _good("repeat", s.repeat),
        _good("counting", s.counting),
        _good("dropout", s.dropout),
        _good("multinomial", s.multinomial),
        _good("forked", s.forked),
        _good("refilled", s.Refilled),
        _good("persistent", s.persistent, routing=routed),
        _good("constant-scalar", faulty.cpu_scalar, faulty.make_scaled, constants=(scale,)),
    ]
    compiled = [
        _good(f"{name}-compiled", fn, inputs, sizes=SIZES, mode="compiled", timeout_s=300.0)
        for name, fn, inputs in (
            ("moe", s.moe, s.make_moe),
            ("masked-fill", s.masked_fill, make),
            ("repeat", s.repeat, make),
            ("counting", s.counting, make),
            ("dropout", s.dropout, make),
            ("multinomial", s.multinomial, make),
            ("persistent", s.persistent, make),
        )
    ]
    return eager + compiled


def planted_cases() -> list[Expected]:
    """Regressions planted in an operator; without a GPU they cannot be seen, because an operator is opaque."""
    from graph_tests.cases import planted

    moe = "nvfp4::moe"
    sought = {
        "planted-host-read": (Kind.HOST_READ, moe, planted.HostRead.fault),
        # The grid never changes: what it leaves out shows as memory that nobody wrote.
        "planted-host-grid": (Kind.UNINITIALISED, "", None),
        "planted-default-stream": (Kind.ESCAPED, "sum_slots", None),
        "planted-workspace": (Kind.OUTPUT_ALIAS, "", None),
        "planted-not-reset": (Kind.NOT_IDEMPOTENT, "", None),
    }
    made = {case.name: case for case in planted.cases()}
    return [
        Expected(made[name], REFUTED, CLEAN, ((kind, operation, 0),), None, source)
        for name, (kind, operation, source) in sought.items()
    ]


def self_failure_cases() -> list[Expected]:
    """Callables that attack the tool."""
    a = self_failure
    raises = Case(name="raises-at-16", make_inputs=make, fn=a.raises_at_16, sizes=(1, 16, 64))
    return [
        Expected(Case(name="hang", make_inputs=make, fn=a.hang, timeout_s=25.0), Verdict.HANG, Verdict.HANG),
        Expected(Case(name="out-of-bounds", make_inputs=make, fn=a.out_of_bounds), Verdict.CRASH, CLEAN),
        Expected(
            raises,
            REFUTED,
            UNSURE,
            ((Kind.EXCEPTION, "ValueError", 0),),
            (),
            None,
            {1: PROVEN, 16: REFUTED, 64: PROVEN},
        ),
        Expected(
            Case(name="retried-captures", make_inputs=make, fn=a.retried_captures),
            REFUTED,
            CLEAN,
            ((Kind.HOST_READ, "item", 0),),
        ),
        Expected(Case(name="many-launches", make_inputs=make, fn=a.many_launches), UNSURE, CLEAN),
    ]


def expected() -> dict[str, Expected]:
    """All of them by name."""
    every = faulty_cases() + sound_cases() + self_failure_cases() + planted_cases()
    names = [e.case.name for e in every]
    assert len(set(names)) == len(names), "two cases share a name"
    return {e.case.name: e for e in every}


def cases() -> list[Case]:
    """For ``graph-tests run graph_tests.tests.table``."""
    return [e.case for e in expected().values()]


def _lines(where: Where | None) -> list[int]:
    """The innermost line, and the one in the callable under test when a helper of the user's stands between."""
    if where is None:
        return []
    return [where.line, *(int(text.rsplit(":", 1)[1]) for text in where.called_from[-1:])]


def mismatches(wanted: Expected, report: object, gpu: bool) -> list[str]:
    """What a report gets wrong, as sentences; empty when it is right."""
    said = []
    verdict = wanted.verdict if gpu else wanted.static
    if report.verdict != verdict:  # type: ignore[attr-defined]
        said.append(f"verdict is {report.verdict}, it must be {verdict}")  # type: ignore[attr-defined]
    kinds = wanted.kinds if gpu or wanted.static_kinds is None else wanted.static_kinds
    if not gpu and wanted.static is not STATIC_REFUTED:
        kinds = ()
    findings = report.findings  # type: ignore[attr-defined]
    for index, (kind, operation, count) in enumerate(kinds):
        alike = [f for f in findings if f.kind == kind and operation in f.operation]
        if not alike:
            said.append(f"no finding {kind}: {operation}")
            continue
        if count and alike[0].count != count:
            said.append(f"{kind}: {operation} was counted {alike[0].count} times, it must be {count}")
        line = wanted.line if index == 0 else None
        if line is not None and not any(line in _lines(f.where) for f in alike):
            said.append(f"{kind}: {operation} is at {alike[0].where}, line {line} must be named")
    if gpu and wanted.sizes is not None:
        got = report.sizes  # type: ignore[attr-defined]
        said += [f"size {s} is {got.get(s)}, it must be {v}" for s, v in wanted.sizes.items() if got.get(s) != v]
    if not kinds and verdict in (PROVEN, CLEAN) and findings:
        said.append(f"a sound callable was flagged: {findings[0].kind}: {findings[0].operation}")
    return said
