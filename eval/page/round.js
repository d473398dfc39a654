// What the viewer shows of one round: its place among the others, its text, and every method's proposal.

// Accepted tokens of every round as bars; a click goes there.
function timeline(counts, current, method, pick) {
  const high = Math.max(...counts, 1);
  const bars = counts.map((count, i) => {
    const height = 4 + (36 * count) / high;
    return svg(
      "g",
      { class: i === current ? "now" : null, "data-tip": `round ${i + 1}: ${count} accepted`, click: () => pick(i) },
      svg("rect", { class: "hit", x: i * 18, y: 0, width: 18, height: 46 }),
      svg("rect", { class: `bar m-${method}`, x: i * 18 + 3, y: 42 - height, width: 12, height, rx: 2 }),
      i === current ? svg("rect", { class: "cursor", x: i * 18 + 3, y: 44, width: 12, height: 2.5 }) : null,
    );
  });
  const name = `Accepted tokens by round: ${counts.join(", ")}`;
  const picture = svg("svg", { width: counts.length * 18, height: 48, role: "img", "aria-label": name }, bars);
  return el("div", {}, el("span", { class: "hint" }, "accepted in each round"), picture);
}

// Text with line ends shown, and other control characters spelled out.
function printable(text) {
  return text.replace(/\n/g, "↵\n").replace(/(?![\n\t])\p{C}/gu, (c) => "\\u{" + c.codePointAt(0).toString(16) + "}");
}

// The answer, with the anchor and the tokens of this round marked.
function answerText(record, round, method, text) {
  const end = round.position + round.emitted;
  const accepted = round.trees[method].path.length;
  const kind = (i) => {
    if (i < round.position) return ["before", null];
    if (i === round.position) return ["anchor", "the anchor: the last verified token"];
    if (i > end) return ["after", null];
    return i <= round.position + accepted ? ["accepted", "accepted draft token"] : ["bonus", "the target's own token"];
  };
  const tokens = record.answer.map((token, i) => {
    const [name, tip] = kind(i);
    return el(tip ? "mark" : "span", { class: name, "data-tip": tip }, printable(text(token)));
  });
  return el("div", { class: "text", role: "group", "aria-label": "The answer, this round's tokens marked" }, tokens);
}

function swatches(items) {
  const item = ([state, words]) => el("li", {}, el("span", { class: `swatch ${state}` }), words);
  return el("ul", { class: "legend" }, items.map(item));
}

function treeLegend() {
  return swatches([
    ["accepted", "accepted"],
    ["bonus", "the target's own next token"],
    ["kept", "verified, not accepted"],
    ["pruned", "pruned before verification"],
  ]);
}

function chipLegend() {
  return swatches([
    ["accepted", "accepted"],
    ["bonus", "what the target said instead"],
    ["refused", "the method's best guess there (+n: further ones)"],
    ["pruned", "rest of a chain"],
  ]);
}

// A row for each method: what it proposes from this draft, and how far the target goes along.
function compareTable(viewer) {
  const rows = viewer.traces.methods.map((method) => ({ method, view: viewer.view(method) }));
  const draw = (row) => {
    const pressed = String(row.method === viewer.state.method);
    return el(
      "button",
      { type: "button", class: "plain", "aria-pressed": pressed, click: () => viewer.go({ method: row.method }) },
      row.method,
    );
  };
  const columns = [
    { label: "method", value: (row) => row.method, show: draw, hint: "a click draws the method's tree" },
    { label: "proposed", value: (row) => row.view.kept.length, hint: "tokens that the target verifies" },
    { label: "deepest", value: (row) => Math.max(0, ...row.view.kept.map((n) => n.depth)) },
    {
      label: "accepted",
      value: (row) => row.view.path.length,
      show: (row) => (row.view.open ? "≥ " : "") + row.view.path.length,
      best: "max",
    },
    {
      label: "probability of the path",
      value: (row) => last(row.view.path)?.reach ?? null,
      show: (row) => (row.view.path.length ? chance(last(row.view.path).reach) : NONE),
    },
    {
      label: "tokens",
      words: true,
      value: (row) => row.view.kept.map((n) => n.token).join(" "),
      show: (row) => chips(row.view, viewer.text),
    },
  ];
  return sortableTable("What each method would have proposed", columns, rows, (row) =>
    row.method === viewer.state.method ? "current" : null,
  );
}

// The accepted tokens, the best proposal that the target refused, and what the target said instead.
function chips(view, text) {
  const chip = (state, token, more = "") => el("span", { class: `chip ${state}` }, visible(text(token)) + more);
  const refused = view.kept.filter((n) => n.parent === view.end).sort((a, b) => b.score - a.score);
  const rest = refused.length === 1 ? below(view.kept, refused[0]) : [];
  return el(
    "span",
    { class: "chips" },
    view.path.map((node) => chip("accepted", node.token)),
    view.bonus === null ? [] : [chip("bonus", view.bonus)],
    refused.slice(0, 1).map((node) => chip("refused", node.token, refused.length > 1 ? ` +${refused.length - 1}` : "")),
    rest.map((node) => chip("pruned", node.token)),
  );
}

// The rest of a chain.
function below(nodes, node) {
  const children = nodes.filter((n) => n.parent === node.index);
  return children.length === 1 ? [children[0], ...below(nodes, children[0])] : [];
}

function nodeTable(view, text) {
  const columns = [
    { label: "rank", value: (n) => n.rank + 1 },
    { label: "token", words: true, value: (n) => visible(text(n.token)) },
    { label: "id", value: (n) => n.token },
    { label: "depth", value: (n) => n.depth },
    {
      label: "parent",
      words: true,
      value: (n) => (n.parent < 0 ? "anchor" : `${visible(text(view.nodes[n.parent].token))}`),
    },
    { label: "p", value: (n) => n.p, show: (n) => chance(n.p) },
    { label: "p of the path", value: (n) => n.reach, show: (n) => chance(n.reach) },
    { label: "score", value: (n) => n.score, show: (n) => fixed(n.score, 3) },
    { label: "state", words: true, value: (n) => stateOf(n, view) },
  ];
  return sortableTable(
    "Nodes of the drawn tree",
    columns,
    [...view.nodes].sort((a, b) => a.rank - b.rank),
  );
}
