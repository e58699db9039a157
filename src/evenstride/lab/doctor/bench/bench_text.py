"""A bench's figures as a block that can be posted."""

from __future__ import annotations

from typing import Any

HOW_TO_GROUP = (
    "one process alone: run torchrun --nproc-per-node N -m evenstride doctor --bench, with N the "
    "number of GPUs, for timing and balance as well"
)


def tell_bench(findings: dict[str, Any]) -> str:
    """Return a heading and a fixed-width block.

    Args:
        findings: of `examine_machine`, with those of `run_bench` as ``bench``.
    """
    bench = findings["bench"]
    ranks = bench["ranks"]
    backend = f" over {bench['backend']}" if bench["backend"] else ""
    names = ", ".join(dict.fromkeys(name for mine in ranks for name in mine["devices"]))
    lines = [
        f"### evenstride {findings['evenstride']} bench: {len(ranks)} rank(s){backend} on {names}",
        "",
        "```",
        f"versions    python {findings['python']}, torch {findings['torch']} "
        f"({findings['wheel']}), numpy {findings['numpy']}, {findings['system']}",
        *(_rank(mine) for mine in ranks),
        *(_exactness(name, one) for name, one in bench["exactness"].items()),
        *(_timing(rank, one) for rank, one in enumerate(bench["timing"] or ())),
        *(_balance(bench["balance"]) if bench["balance"] else ()),
        *_overhead(bench["overhead"], bench["global_batch"]),
        f"wrong       {'; '.join(bench['wrong']) or 'nothing'}",
        "```",
    ]
    return "\n".join(lines + ([] if len(ranks) > 1 else [HOW_TO_GROUP]))


def _rank(mine: dict[str, Any]) -> str:
    architecture = f" ({', '.join(mine['capability'])})" if mine["capability"] else ""
    memory = ", ".join(f"{size / 2**30:.1f} GiB" for size in mine["memory_bytes"])
    return (
        f"rank {mine['rank']:<6} {', '.join(mine['devices'])}{architecture}, {memory}, "
        f"bf16 {', '.join(mine['bf16'])}, compile {', '.join(mine['compile'])}; "
        f"{mine['worker']}, {mine['architecture']}, torch {mine['torch']}"
    )


def _exactness(name: str, one: dict[str, Any]) -> str:
    verdict = "exact" if one["error"] <= one["limit"] else "NOT EXACT"
    return (
        f"exactness   {name} off by {one['error']:.1e}: {verdict} (limit {one['limit']:.0e}; "
        f"{one['control']:.1e} without weights)"
    )


def _timing(rank: int, one: dict[str, Any]) -> str:
    if one["read_s"] is None:
        read = "nothing was reported in time"
    else:
        read = f"our clock read {_ms(one['read_s'])}, {one['ratio']:.3f} times that, step by step"
    return (
        f"timing      rank {rank}, share {one['share']}: own work {_ms(one['true_s'])}, {read}; "
        f"with the others a step takes {_ms(one['step_s'])}"
    )


def _balance(one: dict[str, Any]) -> list[str]:
    low, high = one["speedup_interval"]
    unclear = "; unresolved: they may be equally fast" if low <= 1.0 <= high else ""
    bound = f"{one['bound_model']:.3f}" if one["bound_model"] else "not known"
    shares = "/".join(map(str, one["shares"]))
    return [
        f"balance     equal {_ms(one['equal_s'])}, adaptive {_ms(one['adaptive_s'])} a step: "
        f"{one['speedup']:.3f} times as fast (median of pairs, 95 % {low:.3f} to {high:.3f}; bound "
        f"{bound}, from fitted curves){unclear}",
        f"            shares {shares}, changed {one['changes']} time(s), {one['blocks']} pairs of "
        "blocks",
    ]


def _overhead(one: dict[str, Any], batch: int) -> list[str]:
    low, high = one["ratio_interval"]
    least, most = one["control_interval"]
    return [
        f"overhead    plain {_ms(one['plain_s'])}, evenstride {_ms(one['evenstride_s'])} a step of "
        f"{batch} samples: {one['ratio']:.4f} times as long (median of pairs, 95 % {low:.4f} to "
        f"{high:.4f})",
        f"            plain against itself {one['control']:.4f} (95 % {least:.4f} to {most:.4f}), "
        f"{one['pairs']} pairs; under 1 %: {one['verdict']}; own time {_ms(one['own_s'])} a step",
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
