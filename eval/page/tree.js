// A draft tree as a picture: the anchor on the left, a column for each depth, best path on top.
//
// Trees come as docs/results.md's neighbour traces.json stores them: parallel lists tokens, parents (0: the anchor,
// i + 1: node i), scores (log of the path's probability), ranks (place in the method's best-first order).

const COLUMN = 120;
const ROW = 28;
const NODE = { width: 102, height: 22 };
const MARGIN = 10;

// p: probability given the parent; reach: probability of the whole path.
function nodesOf(tree) {
  const nodes = [];
  tree.tokens.forEach((token, index) => {
    const parent = tree.parents[index] - 1;
    const above = parent < 0 ? { depth: 0, score: 0 } : nodes[parent];
    const score = tree.scores[index];
    const p = Math.min(1, Math.exp(score - above.score));
    nodes.push({
      index,
      token,
      parent,
      depth: above.depth + 1,
      score,
      p,
      reach: Math.exp(score),
      rank: tree.ranks[index],
    });
  });
  return nodes;
}

// The nodes of rank < budget that spell `following`, and the token that the target says next (null at the text's end).
function walk(nodes, following, budget) {
  const path = [];
  for (const token of following) {
    const tip = last(path)?.index ?? -1;
    const next = nodes.find((n) => n.parent === tip && n.token === token && n.rank < budget);
    if (!next) return { path, bonus: token };
    path.push(next);
  }
  return { path, bonus: null };
}

// Everything that a picture or a row of a round needs to know of one tree.
function readTree(tree, following, budget) {
  const nodes = nodesOf(tree);
  const { path, bonus } = walk(nodes, following, budget);
  const end = last(path)?.index ?? -1;
  const kept = nodes.filter((n) => n.rank < budget);
  const open = bonus === null && kept.some((n) => n.parent === end);
  return { nodes, kept, path, bonus, end, open, budget };
}

function stateOf(node, view) {
  if (view.path.includes(node)) return "accepted";
  return node.rank < view.budget ? "kept" : "pruned";
}

// Boxes {node, state, column, row}; a child starts no higher than its parent, siblings stand by probability.
// The target's own token is one more box unless a pruned node had it.
function layout(view, withPruned) {
  const shown = view.nodes.filter((n) => withPruned || n.rank < view.budget);
  const boxes = new Map([[-1, { column: 0, row: 0, state: "root" }]]);
  let above = [-1];
  for (let column = 1; above.length; column += 1) {
    const level = above.flatMap((parent) => childrenOf(shown, parent, view));
    let row = 0;
    level.forEach((node) => {
      row = Math.max(row, boxes.get(node.parent).row);
      boxes.set(node.index, { node, column, row, state: node.state ?? stateOf(node, view) });
      row += 1;
    });
    above = level.filter((node) => node.index !== "bonus").map((node) => node.index);
  }
  return boxes;
}

function childrenOf(shown, parent, view) {
  const children = shown.filter((n) => n.parent === parent).sort((a, b) => b.score - a.score || a.index - b.index);
  if (parent !== view.end || view.bonus === null || children.some((n) => n.token === view.bonus)) return children;
  return [{ index: "bonus", token: view.bonus, parent, state: "bonus" }, ...children];
}

function drawTree(view, { text, anchor, method, withPruned, summary }) {
  const boxes = layout(view, withPruned);
  const all = [...boxes.values()];
  const width = MARGIN * 2 + Math.max(...all.map((b) => b.column)) * COLUMN + NODE.width;
  const height = MARGIN * 2 + (Math.max(...all.map((b) => b.row)) + 1) * ROW;
  const children = all.filter((box) => box.node);
  return svg(
    "svg",
    { class: `tree m-${method}`, width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": summary },
    children.map((box) => edge(boxes.get(box.node.parent), box)),
    rootBox(boxes.get(-1), text(anchor)),
    children.map((box) => nodeBox(box, view, text)),
  );
}

function corner(box) {
  return [MARGIN + box.column * COLUMN, MARGIN + box.row * ROW];
}

function edge(from, to) {
  const [x0, y0] = corner(from);
  const [x1, y1] = corner(to);
  const [left, top, bottom] = [x0 + NODE.width, y0 + NODE.height / 2, y1 + NODE.height / 2];
  const middle = (left + x1) / 2;
  const thickness = to.node.p === undefined ? 1.5 : 0.75 + 3.25 * to.node.p;
  const path = `M${left} ${top}C${middle} ${top} ${middle} ${bottom} ${x1} ${bottom}`;
  return svg("path", { class: `edge ${to.state}`, d: path, "stroke-width": thickness.toFixed(2) });
}

function rootBox(box, token) {
  const [x, y] = corner(box);
  return svg(
    "g",
    { class: "node root", "data-tip": `anchor ${visible(token)}\nthe last verified token` },
    svg("rect", { x, y, ...NODE, rx: 5 }),
    label(x + 8, y + 15, shorten(visible(token), 12)),
  );
}

function nodeBox(box, view, text) {
  const [x, y] = corner(box);
  const { node, state } = box;
  const own = state === "bonus";
  const chosen = own || (state === "pruned" && node.parent === view.end && node.token === view.bonus);
  const name = shorten(visible(text(node.token)), own ? 11 : 8);
  const mark = state === "accepted" ? "✓" : chosen ? "→" : "";
  return svg(
    "g",
    {
      class: `node ${state}${chosen ? " chosen" : ""}`,
      "data-node": node.index,
      "data-tip": nodeTip(node, state, chosen, text),
    },
    svg("rect", { class: "back", x, y, ...NODE, rx: 5 }),
    own
      ? null
      : svg("rect", {
          class: "reach",
          x,
          y,
          ...NODE,
          rx: 5,
          "fill-opacity": (0.04 + 0.36 * Math.sqrt(node.reach)).toFixed(3),
        }),
    own
      ? null
      : svg("rect", {
          class: "p",
          x: x + 2,
          y: y + NODE.height - 3.5,
          width: Math.max(0.5, (NODE.width - 4) * node.p),
          height: 2.5,
        }),
    svg("rect", { class: "rim", x, y, ...NODE, rx: 5 }),
    label(x + 6, y + 14.5, mark + name),
    own ? null : label(x + NODE.width - 5, y + 14.5, chance(node.p).replace(" ", ""), "end", "small"),
  );
}

const STATES = {
  accepted: "accepted by the target",
  kept: "verified, not accepted",
  pruned: "pruned: never shown to the target",
  bonus: "the target's own token, proposed by no verified node",
};

function nodeTip(node, state, chosen, text) {
  const first = `${visible(text(node.token))}  (id ${node.token})`;
  if (state === "bonus") return `${first}\n${STATES.bonus}`;
  return [
    first,
    `p ${chance(node.p)} after its parent, ${chance(node.reach)} for the path`,
    `score ${fixed(node.score, 3)}, depth ${node.depth}, rank ${node.rank + 1}`,
    STATES[state] + (chosen ? ", though the target said just this" : ""),
  ].join("\n");
}
