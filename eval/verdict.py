"""What the comparison shows, in sentences."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from eval.definitions import AGAINST_BEFORE, BY_NAME, Unit
from eval.report_format import evidence, number, signed_bounds

Outcome = Literal["rose", "fell", "not clear", "no change shown", "too few requests"]


@dataclass(frozen=True)
class Verdict:
    """One sentence; `topic` is what it is about."""

    topic: str
    outcome: Outcome
    sentence: str


def stricter(section: Mapping[str, Any]) -> set[str]:
    """The forms of `section`'s headline that flatter less than the other one; none where both are the same."""
    entries = section["figures"]
    return {
        chosen for name, chosen in section["headline"].items() if _after(entries, name) != _after(entries, name, True)
    }


def outcome(entry: Mapping[str, Any], confidence: float) -> Outcome:
    """A change counts as shown where its interval leaves out zero and the test's p is at most 1 - confidence.

    Where only one of the two says so it is "not clear": calling that unchanged would hide a loss. With n
    requests p is at least 2 / 2^n, the observed labelling and its mirror image among all: where that is above
    1 - confidence, there are too few requests for any change to show.
    """
    low, high, p = entry["change"]["low"], entry["change"]["high"], entry["p"]
    if low is None or high is None or p is None or 2.0 ** (1 - entry["n"]) > 1 - confidence:
        return "too few requests"
    by_interval, by_test = not low <= 0 <= high, p <= 1 - confidence
    if by_interval and by_test:
        return "rose" if low > 0 else "fell"
    return "not clear" if by_interval or by_test else "no change shown"


def sentence(subject: str, entry: Mapping[str, Any], unit: Unit, found: Outcome) -> str:
    """The outcome with its numbers."""
    before, after = number(entry["before"]["value"], unit), number(entry["after"]["value"], unit)
    if found == "too few requests" and entry["p"] is None:
        return f"{subject}: too few requests to say (n = {entry['n']})."
    if found == "too few requests":
        values = f"{before} before and {after} after"
        return f"{subject}: {values}; too few requests to say (n = {entry['n']}: no test could show a change)."
    if found == "no change shown":
        return f"{subject}: no change shown, {before} before and {after} after {evidence(entry, unit)}."
    if found == "not clear":
        return f"{subject}: {before} before and {after} after {evidence(entry, unit)}; interval and test disagree."
    return f"{subject} {found} from {before} to {after} {evidence(entry, unit)}."


def verdicts(change: Mapping[str, Any], scope: str | None) -> list[Verdict]:
    """The sentences of one benchmark, or of the macro figures where `scope` is None."""
    found = change["macro"] if scope is None else change["benchmarks"][scope]
    graded = change["quality"]["macro"] if scope is None else change["quality"]["benchmarks"].get(scope)
    confidence = change["confidence"]
    result = [
        plain(change, scope),
        _verdict("kept share", "Kept share (mean of shares)", found["figures"]["kept_share"], "share", confidence),
        _verdict(
            "kept share, answers that end by themselves",
            f"Kept share on the {found['ends_by_itself']['n']} requests whose answers end by themselves on both sides",
            found["ends_by_itself"]["figures"]["kept_share"],
            "share",
            confidence,
        ),
        _speed(found, "speedup_passes_median", confidence),
        _speed(found, "speedup_passes_mean", confidence),
        _speed(found, "speedup_seconds_median", confidence),
        _figure(found, "stream_passes_mean", "Residual passes (mean)", confidence),
        _figure(found, "answer_tokens_mean", "Answer length in tokens (mean)", confidence),
        _figure(found, "ends_by_itself_share", "Share of answers that end by themselves", confidence),
    ]
    if graded is not None and graded["n"]:
        result.append(_quality(change, graded["figures"]["quality_stream"], confidence))
    else:
        result.append(Verdict("quality", "too few requests", _no_quality(change)))
    return result + _cautions(found, confidence)


def plain(change: Mapping[str, Any], scope: str | None) -> Verdict:
    """What it comes to, in one sentence: "Faster, quality unchanged within ±2.1 points (...)".

    Speed is the median speedup in passes in its stricter form, quality that of the streamed answers. "Unchanged
    within" is as much as the interval of the change leaves open; where nothing differs between the arms the interval
    is a point, and the bound is the largest share of requests that could differ and still show none of it among n
    (confidence c: 1 - (1 - c)^(1/n), the rule of three).
    """
    found = change["macro"] if scope is None else change["benchmarks"][scope]
    graded = change["quality"]["macro"] if scope is None else change["quality"]["benchmarks"].get(scope)
    entry = found["figures"][found["headline"]["speedup_passes_median"]]
    fast, faster = _speed_in_words(entry, change["confidence"])
    in_seconds = found["figures"][found["headline"]["speedup_seconds_median"]]
    clock = _seconds_in_words(fast, _outcome_of_seconds(in_seconds, change["confidence"]))
    like = _like(change["quality"]) if scope is None else None
    quality = _quality_in_words(graded["figures"]["quality_stream"] if graded else None, change["confidence"], like)
    return Verdict("plain", fast, f"{faster}{clock}, {quality} ({_rests_on(change, found, graded)}).")


def _rests_on(change: Mapping[str, Any], found: Mapping[str, Any], graded: Mapping[str, Any] | None) -> str:
    """The numbers behind the plain sentence, and which arms each part of it compares."""
    chosen = found["headline"]["speedup_passes_median"]
    entry, form = found["figures"][chosen], "stricter median" if chosen in stricter(found) else "median"
    values = " to ".join(number(entry[side]["value"], "times") for side in ("before", "after"))
    speed = f"{form} in passes {values}, {change['before']} against {change['after']}, n = {entry['n']}"
    scored = graded["figures"]["quality_stream"]["n"] if graded else 0
    return f"{speed}; quality {change['quality_before']} against {change['after']}, n = {scored}"


def _speed_in_words(entry: Mapping[str, Any], confidence: float) -> tuple[Outcome, str]:
    found = outcome(entry, confidence)
    words = {
        "rose": "Faster",
        "fell": "Slower",
        "not clear": "Speed not clear",
        "too few requests": "Too few requests to say whether it is faster",
    }
    return found, words.get(found) or f"No change of speed shown ({signed_bounds(entry['change'], 'times')})"


def _outcome_of_seconds(entry: Mapping[str, Any], confidence: float) -> Outcome:
    """A loss that the interval shows is said, whatever the test says: a permuted median seldom has a small p."""
    found = outcome(entry, confidence)
    return "fell" if found == "not clear" and entry["change"]["high"] < 0 else found


def _seconds_in_words(passes: Outcome, seconds: Outcome) -> str:
    """Nothing where seconds say what passes say; they are the only ones that a user feels."""
    if passes == "rose" and seconds != "rose":
        words = {"fell": "but slower in seconds", "too few requests": "seconds not judged"}
        return f" in passes ({words.get(seconds, 'in seconds not shown')})"
    return " in passes, but slower in seconds" if seconds == "fell" and passes != "fell" else ""


def _like(quality: Mapping[str, Any]) -> int | None:
    """How many requests bound a mean over benchmarks as so many in one would: what is missed in the smallest weighs as
    much as any (by the inequality of the means, a bound)."""
    sizes = [part["figures"]["quality_stream"]["n"] for part in quality["benchmarks"].values()]
    there = [n for n in sizes if n]
    return len(there) * min(there) if there else None


def _quality_in_words(entry: Mapping[str, Any] | None, confidence: float, like: int | None = None) -> str:
    """`like`: how many requests bound it, where that is not its own n."""
    if entry is None or not entry["n"]:
        return "quality not judged: no request was scored in both arms"
    found, before, after = outcome(entry, confidence), entry["before"]["value"], entry["after"]["value"]
    if before == after == 0:
        return f"quality cannot be judged: no answer is right on either side, n = {entry['n']}"
    points = f"{100 * abs(after - before):.1f} points"
    if found in ("rose", "fell"):
        return f"quality {found} by {points}"
    if found == "no change shown":
        bound = max(_widest(entry), 1 - (1 - confidence) ** (1 / (like or entry["n"])))
        return f"quality unchanged within ±{100 * bound:.1f} points"
    return "quality not clear" if found == "not clear" else "too few requests to say about quality"


def _after(entries: Mapping[str, Any], name: str, crossed: bool = False) -> float | None:
    return entries[f"{name}{AGAINST_BEFORE}" if crossed else name]["after"]["value"]


def _widest(entry: Mapping[str, Any]) -> float:
    return max(abs(entry["change"]["low"]), abs(entry["change"]["high"]))


def _verdict(topic: str, subject: str, entry: Mapping[str, Any], unit: Unit, confidence: float) -> Verdict:
    found = outcome(entry, confidence)
    return Verdict(topic, found, sentence(subject, entry, unit, found))


def _figure(found: Mapping[str, Any], name: str, subject: str, confidence: float) -> Verdict:
    return _verdict(BY_NAME[name].label.lower(), subject, found["figures"][name], BY_NAME[name].unit, confidence)


def _speed(found: Mapping[str, Any], name: str, confidence: float) -> Verdict:
    """The stricter of the two forms, and which it is; where both are the same, either model's base."""
    chosen = found["headline"][name]
    form = "the before model's base" if chosen.endswith(AGAINST_BEFORE) else "the after model's own base"
    against = f"{form} (the stricter form)" if chosen in stricter(found) else "either model's base"
    subject = f"{BY_NAME[name].label}, against {against},"
    verdict = _verdict(BY_NAME[name].label.lower(), subject, found["figures"][chosen], "times", confidence)
    return Verdict(verdict.topic, verdict.outcome, verdict.sentence.replace(",:", ":"))


def _quality(change: Mapping[str, Any], entry: Mapping[str, Any], confidence: float) -> Verdict:
    subject = f"Quality of the streamed answers ({change['quality_before']} against {change['after']})"
    verdict = _verdict("quality", subject, entry, "share", confidence)
    low = entry["change"]["low"]
    if verdict.outcome not in ("no change shown", "not clear") or low is None or low >= 0:
        return verdict
    loss = f"{-100 * low:.1f} points"
    return Verdict(verdict.topic, verdict.outcome, f"{verdict.sentence} A loss of {loss} is not excluded.")


def _no_quality(change: Mapping[str, Any]) -> str:
    arms = f"{change['quality_before']} and {change['after']}"
    return f"Quality is left out: {arms} share no included request here; evaluate the same benchmarks with both."


def _cautions(found: Mapping[str, Any], confidence: float) -> list[Verdict]:
    """A speedup that grew with the answers and not with what was kept."""
    own = found["figures"]["speedup_passes_mean"]
    rose = outcome(own, confidence) == "rose"
    if not rose or outcome(found["figures"]["stream_passes_mean"], confidence) == "fell":
        return []
    text = (
        "The mean speedup against the after model's own base rose while no fall of the residual passes is shown: "
        "read the stricter form."
    )
    return [Verdict("caution", "rose", text)]
