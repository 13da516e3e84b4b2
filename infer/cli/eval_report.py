"""What `infer eval` prints for people: tables of its reports."""

from typing import Any


def perplexity_lines(report: dict[str, Any]) -> list[str]:
    """Return the text of a perplexity's report."""
    rows = [["text", "windows", "tokens", "perplexity [95%]", "top-1", "bits/byte"]]
    for x in _texts(report):
        bits = x["bits_per_byte"]
        shown = "-" if bits is None else f"{bits:.4f}"
        rows.append([*_who(x), _interval(x["perplexity"], 3), f"{x['top1']:.2%}", shown])
    return [_how(report), *_table(rows), *_notes(report)]


def divergence_lines(report: dict[str, Any]) -> list[str]:
    """Return the text of a divergence's report."""
    rows = [["text", "windows", "tokens", "base PPL", "PPL", "ratio [95%]", "verdict"]]
    more = [["text", "KL mean [95%]", "median", "99%", "max", "same top-1 [95%]", "RMS dp"]]
    by_position = []
    for x in _texts(report):
        ppl = [_number(x[name]["value"], 3) for name in ("base_perplexity", "perplexity")]
        rows.append([*_who(x), *ppl, _interval(x["ratio"], 4), x["verdict"]])
        kl = x["kl"]
        tail = [_number(kl[name], 5) for name in ("median", "p99", "max")]
        same = _interval({k: 100 * v for k, v in x["same_top"].items()}, 2)
        row = [x["name"], _interval(kl["mean"], 5), *tail, same + " %"]
        more.append([*row, f"{100 * x['rms_delta_p']:.2f} %"])
        spans = [f"{b['first']}-{b['last']}: {_number(b['kl'], 5)}" for b in x["kl_by_position"]]
        by_position.append(f"KL by position, {x['name']}: {', '.join(spans)}")
    how = [_how(report), f"{report['model']} against {report['base']}; KL(base || model) in nats"]
    return [*how, *_table(rows), "", *_table(more), "", *by_position, *_notes(report)]


def compare_lines(report: dict[str, Any]) -> list[str]:
    """Return the text of a comparison's report."""
    rows = [["text", "windows", "tokens", "PPL of A", "PPL of B", "B / A [95%]", "B is"]]
    against = [["text", "KL of A", "KL of B", "B - A [95%]", "B is, to the base"]]
    for x in _texts(report):
        ppl = [_number(x[name]["value"], 3) for name in ("perplexity_a", "perplexity_b")]
        rows.append([*_who(x), *ppl, _interval(x["ratio"], 4), x["verdict"]])
        if x["kl_difference"] is not None:
            kl = [_number(x[name], 5) for name in ("kl_a", "kl_b")]
            against.append([x["name"], *kl, _interval(x["kl_difference"], 5), x["kl_verdict"]])
    lines = [_how(report), f"A: {report['a']}", f"B: {report['b']}", *_table(rows)]
    if len(against) > 1:
        lines += ["", f"KL(base || model) in nats, base {report['base']}", *_table(against)]
    return lines + _notes(report)


def task_lines(report: dict[str, Any]) -> list[str]:
    """Return the text of a task's report."""
    models = [report[name] for name in ("model", "other") if name in report]
    names = ["A", "B"] if len(models) == 2 else models
    rows = [["", *names]]
    shown = lambda x: f"{x['right']}/{x['count']}  {_percents(x['accuracy'])}"
    rows += [[group, *map(shown, each)] for group, each in report["groups"].items()]
    rows.append(["all", *map(shown, report["models"])])
    lines = [f"{report['task']}: right answers [95%]"]
    if len(models) == 2:
        lines += [f"A: {models[0]}", f"B: {models[1]}"]
    lines += _table(rows)
    if report["p_value"] is not None:
        lines.append(
            f"only A right: {report['only_first']}, only B right: {report['only_second']}; McNemar "
            f"p = {report['p_value']:.4g}; B is: {report['verdict']}"
        )
    return lines + _notes(report)


def _texts(report: dict[str, Any]) -> list[dict[str, Any]]:
    texts = report["texts"]
    return texts if len(texts) == 1 else [*texts, report["overall"]]


def _who(x: dict[str, Any]) -> list[str]:
    return [x["name"], str(x["num_windows"]), str(x["num_scored"])]


def _how(report: dict[str, Any]) -> str:
    how = report["how"]
    which = "the second half" if how["scored"] == "second_half" else "all"
    return (
        f"windows of {how['context']} tokens, {which} scored ({how['scored_tokens_per_window']}); "
        f"intervals by bootstrap over windows; {how['elapsed_s']:.0f} s"
    )


def _notes(report: dict[str, Any]) -> list[str]:
    lines = [f"note: {warning}" for warning in report["warnings"]]
    for x in report.get("controls", ()):
        state = "exact" if x["exact"] else "NOT exact: the measure is broken here"
        lines.append(
            f"control, {x['num_windows']} windows: ratio {x['ratio']}, largest KL {x['kl_max']}: "
            f"{state}"
        )
    return ["", *lines] if lines else []


def _number(x: float | None, places: int) -> str:
    return "inf" if x is None else f"{x:.{places}f}"


def _interval(x: dict[str, float | None], places: int) -> str:
    value, low, high = (_number(x[name], places) for name in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def _percents(x: dict[str, float]) -> str:
    return f"{x['value']:.1%} [{x['low']:.1%}, {x['high']:.1%}]"


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = lambda row: "  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip()
    return [padded(row) for row in rows]
