// The tree viewer: a prompt, a round, a tree. Its place is kept in the address: #prompt=1&round=2&method=ddtree.

const CHAINS = ["dflash_chain", "domino_chain", "markov_chain"];

class Viewer {
  constructor(traces) {
    this.traces = traces;
    this.text = (token) => traces.texts[token] ?? `#${token}`;
    this.state = { prompt: 0, round: 0, method: traces.method, withPruned: true, budget: null };
    this.parts = Object.fromEntries(
      ["controls", "timeline", "answer", "knobs", "tree", "compare", "list"].map((name) => [
        name,
        el("div", { class: name }),
      ]),
    );
    this.status = el("p", { class: "status", "aria-live": "polite" });
    this.prompt = el("details", { class: "prompt" });
    this.readHash();
  }

  get record() {
    return this.traces.prompts[this.state.prompt];
  }

  get round() {
    return this.record.rounds[this.state.round];
  }

  get following() {
    return this.record.answer.slice(this.round.position + 1);
  }

  // The budget under which a method's tree was verified: for DARTree pruned that of the run, else the whole tree.
  ownBudget(method) {
    return method === this.traces.method ? this.traces.options.budget : Infinity;
  }

  view(method, budget = null) {
    return readTree(this.round.trees[method], this.following, budget ?? this.ownBudget(method));
  }

  section() {
    const { controls, timeline, answer, knobs, tree, compare, list } = this.parts;
    this.draw();
    document.addEventListener("keydown", (event) => this.key(event));
    window.addEventListener("hashchange", () => this.readHash() && this.draw());
    return (this.root = section(
      "trees",
      "Trees",
      el("p", {}, VIEWER_TEXT),
      controls,
      timeline,
      this.prompt,
      answer,
      this.status,
      knobs,
      el("div", { class: "scroll canvas", tabindex: 0, role: "region", "aria-label": "Tree, scrollable" }, tree),
      treeLegend(),
      el("h3", {}, "From the same draft, every method"),
      compare,
      chipLegend(),
      el("details", {}, el("summary", {}, "The nodes of the drawn tree as a table"), list),
    ));
  }

  // Takes a change, keeps the place in the address, and draws.
  go(change) {
    const before = this.state;
    this.state = { ...before, ...change };
    if (this.state.prompt !== before.prompt) this.state.round = 0;
    if (this.state.method !== before.method) this.state.budget = null;
    const rounds = this.record.rounds.length;
    this.state.round = Math.max(0, Math.min(rounds - 1, this.state.round));
    const { prompt, round, method } = this.state;
    history.replaceState(null, "", `#prompt=${prompt + 1}&round=${round + 1}&method=${method}`);
    this.draw();
  }

  // True when the address names a place here.
  readHash() {
    const given = new URLSearchParams(location.hash.slice(1));
    if (!given.has("prompt") && !given.has("round")) return false;
    const within = (key, count) => Math.max(0, Math.min(count - 1, (parseInt(given.get(key), 10) || 1) - 1));
    const prompt = within("prompt", this.traces.prompts.length);
    const round = within("round", this.traces.prompts[prompt].rounds.length);
    const method = this.traces.methods.includes(given.get("method")) ? given.get("method") : this.traces.method;
    this.state = { ...this.state, prompt, round, method, budget: null };
    return true;
  }

  // Left and right arrows change the round while the viewer is in sight and nothing else wants the key.
  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const wanted = event.target.closest?.("input, select, textarea, .scroll");
    if (!step || wanted || event.altKey || event.ctrlKey || event.metaKey) return;
    const box = this.root.getBoundingClientRect();
    if (box.bottom < 0 || box.top > window.innerHeight) return;
    event.preventDefault();
    this.go({ round: this.state.round + step });
  }

  draw() {
    const view = this.view(this.state.method, this.state.budget);
    const summary = this.summary(view);
    this.status.textContent = summary;
    this.drawControls();
    this.drawTimeline();
    this.drawPrompt();
    this.parts.answer.replaceChildren(answerText(this.record, this.round, this.traces.method, this.text));
    this.drawKnobs(view);
    this.parts.tree.replaceChildren(
      drawTree(view, {
        text: this.text,
        anchor: this.record.answer[this.round.position],
        method: this.state.method,
        withPruned: this.state.withPruned,
        summary,
      }),
    );
    this.drawCompare();
    this.parts.list.replaceChildren(nodeTable(view, this.text));
  }

  summary(view) {
    const { method, round } = this.state;
    const pruned = view.nodes.length - view.kept.length;
    const said = view.bonus === null ? "" : ` and goes on with “${visible(this.text(view.bonus))}”`;
    return (
      `Round ${round + 1} of ${this.record.rounds.length}: ${method} proposes ${view.kept.length} tokens` +
      (pruned ? ` (${pruned} pruned)` : "") +
      `; the target accepts ${view.open ? "at least " : ""}${view.path.length}${said}.`
    );
  }

  drawControls() {
    const { prompt, round } = this.state;
    const end = this.record.rounds.length - 1;
    if (!this.controls) this.controls = viewerControls(this);
    const { select, slider, output, previous, next } = this.controls;
    select.value = String(prompt);
    slider.max = String(end + 1);
    slider.value = String(round + 1);
    slider.setAttribute("aria-valuetext", `round ${round + 1} of ${end + 1}`);
    output.textContent = `${round + 1} / ${end + 1}`;
    previous.disabled = round === 0;
    next.disabled = round === end;
  }

  drawTimeline() {
    const { method } = this.state;
    const counts = this.record.rounds.map((round) => {
      const following = this.record.answer.slice(round.position + 1);
      return readTree(round.trees[method], following, this.ownBudget(method)).path.length;
    });
    const pick = (round) => this.go({ round });
    this.parts.timeline.replaceChildren(timeline(counts, this.state.round, method, pick));
  }

  drawPrompt() {
    const { text, prompt_tokens: count } = this.record;
    this.prompt.replaceChildren(
      el("summary", {}, `The prompt (${count} tokens)`),
      el("pre", { class: "text" }, printable(text)),
    );
  }

  // The focus stays on the method that was chosen here.
  drawCompare() {
    const inside = this.parts.compare.contains(document.activeElement);
    this.parts.compare.replaceChildren(compareTable(this));
    if (inside) this.parts.compare.querySelector("[aria-pressed=true]").focus();
  }

  drawKnobs(view) {
    const { method, withPruned } = this.state;
    const methods = choice(
      "method",
      "Tree of",
      this.traces.methods.map((m) => [m, m]),
      method,
      (m) => this.go({ method: m }),
    );
    const box = el("input", {
      type: "checkbox",
      id: "pruned",
      checked: withPruned,
      change: (e) => this.go({ withPruned: e.target.checked }),
    });
    const pruned = el("label", { class: "choice", for: "pruned" }, box, el("span", {}, "show pruned nodes"));
    // A chain has no smaller budgets, and the fixed tree of a smaller one is another tree.
    const nested = !CHAINS.includes(method) && method !== "dartree_fixed";
    if (this.knobs?.method === method) return this.knobs.show(view);
    const budget = nested ? budgetSlider(this, view) : null;
    this.knobs = { method, show: budget ? budget.show : () => {} };
    this.parts.knobs.replaceChildren(methods, nested ? pruned : "", budget ? budget.box : "");
  }
}

const VIEWER_TEXT =
  "Greedy decoding with DARTree pruned. Columns are depths; a node's fill is the probability of its whole path, the " +
  "line under it and the edge to it its probability after its parent. Every method built its tree from the same " +
  "draft; how far the target follows is read off the text that it emitted. Arrow keys change the round.";

function viewerControls(viewer) {
  const titles = viewer.traces.prompts.map((p, i) => [
    String(i),
    `${p.benchmark}: ${shorten(visible(p.text).replace(/␣/g, " "), 70)}`,
  ]);
  const prompt = choice("prompt", "Prompt", titles, String(viewer.state.prompt), (value) =>
    viewer.go({ prompt: Number(value) }),
  );
  const step = (by) => () => viewer.go({ round: viewer.state.round + by });
  const previous = el("button", { type: "button", "aria-label": "Previous round", click: step(-1) }, "‹");
  const next = el("button", { type: "button", "aria-label": "Next round", click: step(1) }, "›");
  const move = (event) => viewer.go({ round: Number(event.target.value) - 1 });
  const slider = el("input", { type: "range", min: 1, step: 1, id: "round", input: move });
  const output = el("output", { for: "round" });
  const round = el("div", { class: "choice" }, el("label", { for: "round" }, "Round"), previous, slider, next, output);
  viewer.parts.controls.replaceChildren(prompt, round);
  return { select: prompt.querySelector("select"), slider, output, previous, next };
}

function budgetSlider(viewer, first) {
  const name = el("label", { for: "budget" }, "Budget");
  const move = (event) => viewer.go({ budget: Number(event.target.value) });
  const slider = el("input", { type: "range", min: 1, step: 1, id: "budget", input: move });
  const output = el("output", { for: "budget" });
  const show = (view) => {
    slider.max = String(view.nodes.length);
    slider.value = String(view.kept.length);
    output.textContent = `B = ${view.kept.length} of ${view.nodes.length}`;
  };
  show(first);
  return { box: el("div", { class: "choice" }, name, slider, output), show };
}
