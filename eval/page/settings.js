// Everything that the figures depend on.

// Settings: a list for each group, and every key somewhere.
function settingsSection(results) {
  const { hardware, versions, provenance, engine, command, ...rest } = results.settings;
  const { budget_choice: choices, budget_calibration: measured, ...options } = rest;
  const groups = [
    ["Options and drafter", { ...options, schema_version: results.schema_version }],
    ["Hardware", hardware],
    ["Versions", versions],
    ["Training engine", engine],
  ];
  const folded = [
    ...(choices ?? []).map((choice) => [choiceTitle(choice), choice]),
    ["Measurements for the cost-aware budget", measured],
    ["Provenance of the drafter, as its training wrote it", provenance],
  ];
  const present = ([, values]) => values;
  return section(
    "settings",
    "Settings",
    command ? el("pre", { class: "command" }, command) : null,
    el("div", { class: "pair" }, (choices ?? []).map(budgetFigure), costFigure(measured)),
    groups.filter(present).map(([title, values]) => el("div", {}, el("h3", {}, title), settingsList(values))),
    folded.filter(present).map(([title, values]) => el("details", {}, el("summary", {}, title), settingsList(values))),
  );
}

function settingsList(values) {
  const rows = flatten(values).map(([key, value]) => el("div", {}, el("dt", {}, key), el("dd", {}, value)));
  return el("dl", { class: "settings" }, rows);
}

// [["a.b", "text"], ...] of a nested object; lists of plain values in one line.
function flatten(value, key = "") {
  const plain = value === null || typeof value !== "object";
  if (plain) return [[key, value === null ? NONE : value === "" ? "(empty)" : String(value)]];
  if (Array.isArray(value) && value.every((item) => item === null || typeof item !== "object"))
    return [[key, value.length ? value.join(", ") : "(none)"]];
  return Object.entries(value).flatMap(([name, inner]) => flatten(inner, key ? `${key}.${name}` : name));
}

function choiceTitle(choice) {
  return `Choice of the budget, temperature ${choice.temperature}`;
}

function budgetFigure(chosen) {
  const series = [
    {
      name: "expected tokens/s",
      method: "dartree_pruned",
      dash: 0,
      points: chosen.curve.map((row) => ({
        x: row.budget,
        y: row.tokens_per_second,
        tip:
          `B=${row.budget}: ${fixed(row.tokens_per_second, 1)} tokens/s, tau ${fixed(row.tau)}, ` +
          `verify ${fixed(row.verify_ms, 1)} ms, round ${fixed(row.round_ms, 1)} ms`,
      })),
    },
  ];
  const draw = (width) =>
    lines(width, series, {
      title: "Budget",
      xLabel: "budget B",
      yLabel: "expected tokens/s",
      ordinal: true,
    });
  return figure(
    choiceTitle(chosen),
    responsive(draw),
    `B=${chosen.budget}, from acceptance and measured cost on training prompts; no evaluated prompt took part`,
  );
}

// Cost of a verification as it was measured for the cost-aware budget.
function costFigure(measured) {
  if (!measured) return null;
  const points = measured.cost.verify;
  const places = unique(points.map((p) => `${p.requests} at once, ${p.context} tokens of context`));
  const colours = ["dartree_pruned", "ddtree", "dflash_chain", "domino_chain", "per_node_serial", "dartree_fixed"];
  const series = places.map((name, i) => ({
    name,
    method: colours[i % colours.length],
    dash: Math.floor(i / colours.length),
    points: points
      .filter((p) => `${p.requests} at once, ${p.context} tokens of context` === name)
      .map((p) => ({ x: p.nodes, y: p.ms, tip: `${name}, ${p.nodes} nodes: ${fixed(p.ms, 1)} ms` })),
  }));
  const draw = (width) =>
    lines(width, series, { title: "Cost", xLabel: "nodes", yLabel: "ms a verification", ordinal: true });
  return figure("Measured cost of a verification", el("div", {}, responsive(draw), legend(series)));
}
