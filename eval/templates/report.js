"use strict";
(function () {
  const root = document.getElementById("replay-view");
  const failed = document.getElementById("replay-error");
  window.addEventListener("error", function (event) {
    failed.hidden = false;
    failed.textContent = "The replay could not be drawn: " + event.message;
    document.documentElement.dataset.replay = "failed";
  });
  if (!root) { return; }

  const data = JSON.parse(document.getElementById("replay-data").textContent);
  const part = (name) => root.querySelector('[data-part="' + name + '"]');
  const at = { run: 0, benchmark: 0, request: 0, role: "after", step: 0 };

  const run = () => data.runs[at.run];
  const benchmark = () => run().benchmarks[at.benchmark];
  const requests = () => benchmark().requests;
  const request = () => requests()[at.request];
  const arm = () => request().arms.find((a) => a.role === at.role) || request().arms[0];

  // Everything that a model or a user wrote goes in as text, never as markup.
  function node(name, className, text) {
    const made = document.createElement(name);
    if (className) { made.className = className; }
    made.textContent = text;
    return made;
  }
  function fill(pane, nodes) { pane.replaceChildren(...nodes.filter((n) => n.textContent !== "")); }
  function orNothing(pane, text) {
    if (!pane.childNodes.length) { pane.append(node("span", "awaited", text)); }
  }
  function options(select, names, chosen) {
    select.replaceChildren(...names.map(function (name, i) {
      const made = node("option", "", name);
      made.value = String(i);
      made.selected = i === chosen;
      return made;
    }));
  }
  function count(n, one, many) { return n + " " + (n === 1 ? one : many); }
  function score(value) {
    if (value === null) { return "not scored"; }
    return benchmark().metric === "pass@1" ? (value === 1 ? "passed" : "failed") : "F1 " + (100 * value).toFixed(1) + "%";
  }

  function caption(step, last, total) {
    const what = last ? "The last sentence is there: the request is submitted. " : "Sentence " + step.seen + " of " + total + " arrives. ";
    const kept = step.heldTokens ? "Of the draft's " + count(step.heldTokens, "token", "tokens") + ", " + step.keptTokens + " kept" : "There was no draft to keep";
    return what + kept + (step.passes === null ? "." : "; " + count(step.passes, "forward pass", "forward passes") + ".");
  }
  function facts(final) {
    const found = [
      ["Passes after the last sentence", final.stream_passes + " (paper's count " + final.stream_passes_paper + ")"],
      ["Passes from nothing", String(final.base_passes)],
      ["Speedup", final.speedup === null ? "n/a" : final.speedup.toFixed(2) + "\u00d7"],
      ["Kept of the last draft", final.kept_tokens + " of " + count(final.draft_tokens, "token", "tokens")],
      ["Streamed answer", score(final.stream_score) + ", " + (final.stop === "end" ? "ended by itself" : "cut at the limit")],
      ["Base answer", score(final.base_score) + (final.same ? ", the same tokens" : ", other tokens")],
    ];
    if (final.total_passes !== null) { found.push(["Passes of all updates", String(final.total_passes)]); }
    if (final.score_note) { found.push(["Note", final.score_note]); }
    return found.map(function (pair) {
      const item = node("li", "", pair[0] + ": ");
      item.append(node("b", "", pair[1]));
      return item;
    });
  }

  function draw() {
    const chosen = arm();
    const steps = chosen.steps;
    at.role = chosen.role;
    at.step = Math.max(0, Math.min(at.step, steps.length - 1));
    const step = steps[at.step];
    const last = at.step === steps.length - 1;
    const sentences = request().sentences;

    fill(part("request"), sentences.map(function (text, i) {
      const seen = i + 1;
      return node(seen === step.seen ? "mark" : "span", seen === step.seen ? "arriving" : seen > step.seen ? "awaited" : "", text);
    }));
    fill(part("held"), [node("span", "kept", step.kept), node("del", "dropped", step.dropped)]);
    orNothing(part("held"), "no draft yet");
    fill(part("answer"), [node("span", "kept", step.kept), node("ins", "written", step.written)]);
    orNothing(part("answer"), "nothing written");
    part("answer-title").textContent = last ? "The submitted answer" : "The draft after it";
    part("caption").textContent = caption(step, last, sentences.length);
    part("facts").replaceChildren(...(last ? facts(chosen.final) : []));
    part("base").hidden = !last || chosen.final.same;
    part("base-text").textContent = chosen.final.base;

    const slider = part("slider");
    slider.max = String(steps.length - 1);
    slider.value = String(at.step);
    slider.disabled = steps.length < 2;
    slider.setAttribute("aria-valuetext", "step " + (at.step + 1) + " of " + steps.length);
    // aria-disabled and not disabled: a button that has the focus keeps it, and so the keys.
    for (const name of ["first", "back"]) { part(name).setAttribute("aria-disabled", String(at.step === 0)); }
    for (const name of ["next", "last"]) { part(name).setAttribute("aria-disabled", String(last)); }
    part("place").textContent = "step " + (at.step + 1) + " of " + steps.length;
    for (const choice of root.querySelectorAll('input[name="arm"]')) {
      const there = request().arms.find((a) => a.role === choice.value);
      choice.checked = choice.value === at.role;
      choice.disabled = !there;
    }
    document.documentElement.dataset.replay = "drawn";
  }
  function lists() {
    options(part("run"), data.runs.map((r) => r.name), at.run);
    options(part("benchmark"), run().benchmarks.map((b) => b.name), at.benchmark);
    options(part("choice"), requests().map((r) => r.id), at.request);
    for (const role of ["before", "after"]) { part(role + "-label").textContent = "(" + run().arms[role] + ")"; }
    part("shown").textContent = "The first " + requests().length + " of " + benchmark().total + " requests, in the benchmark's order.";
  }
  function go(step) { at.step = step; draw(); }

  function fromAddress() {
    const wanted = new URLSearchParams(location.hash.slice(1));
    const named = (key, name) => !wanted.has(key) || wanted.get(key) === name;
    data.runs.forEach(function (one, r) {
      one.benchmarks.forEach(function (benchmark, b) {
        const i = benchmark.requests.findIndex((found) => found.id === wanted.get("request"));
        if (i >= 0 && named("run", one.name) && named("benchmark", benchmark.name)) { at.run = r; at.benchmark = b; at.request = i; }
      });
    });
    if (wanted.has("arm")) { at.role = wanted.get("arm"); }
    if (wanted.has("step")) { at.step = Number.parseInt(wanted.get("step"), 10) - 1 || 0; }
  }

  part("run").addEventListener("change", function (event) { at.run = Number(event.target.value); at.benchmark = 0; at.request = 0; lists(); go(0); });
  part("benchmark").addEventListener("change", function (event) { at.benchmark = Number(event.target.value); at.request = 0; lists(); go(0); });
  part("choice").addEventListener("change", function (event) { at.request = Number(event.target.value); go(0); });
  for (const choice of root.querySelectorAll('input[name="arm"]')) {
    choice.addEventListener("change", function () { at.role = choice.value; draw(); });
  }
  part("slider").addEventListener("input", function (event) { go(Number(event.target.value)); });
  part("first").addEventListener("click", () => go(0));
  part("back").addEventListener("click", () => go(at.step - 1));
  part("next").addEventListener("click", () => go(at.step + 1));
  part("last").addEventListener("click", () => go(Infinity));
  root.addEventListener("keydown", function (event) {
    if (event.target.matches("select, input") || event.altKey || event.ctrlKey || event.metaKey) { return; }
    const moves = { ArrowLeft: at.step - 1, ArrowRight: at.step + 1, Home: 0, End: Infinity };
    if (event.key in moves) { event.preventDefault(); go(moves[event.key]); }
  });

  fromAddress();
  lists();
  draw();
})();
