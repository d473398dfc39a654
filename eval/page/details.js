// Everything of one benchmark at one temperature, in pictures and in one table.

// The benchmark and the temperature are chosen by two selects.
function detailSection(results) {
  const temperatures = temperaturesOf(results);
  const benchmarks = unique(results.summary.map((row) => row.benchmark));
  const names = results.averages.length && benchmarks.length > 1 ? [AVERAGE, ...benchmarks] : benchmarks;
  const state = { benchmark: names[0], temperature: temperatures[0] };
  const body = el("div", {});
  const redraw = (change) => {
    Object.assign(state, change);
    body.replaceChildren(...detail(results, state));
  };
  redraw({});
  const controls = el(
    "div",
    { class: "controls" },
    choice(
      "benchmark",
      "Benchmark",
      names.map((n) => [n, n]),
      state.benchmark,
      (benchmark) => redraw({ benchmark }),
    ),
    choice(
      "temperature",
      "Temperature",
      temperatures.map((t) => [String(t), String(t)]),
      String(state.temperature),
      (t) => redraw({ temperature: Number(t) }),
    ),
  );
  return section("details", "In detail", controls, body);
}

function detail(results, { benchmark, temperature }) {
  const own = (row) => row.temperature === temperature && row.benchmark === benchmark;
  const average = benchmark === AVERAGE;
  const rows = withDashes(
    average ? results.averages.filter((r) => r.temperature === temperature) : results.summary.filter(own),
  );
  const differences = results.differences.filter(own);
  return [
    el("div", { class: "pair" }, barFigures(rows)),
    acceptanceFigures(rows),
    histogramFigure(rows),
    timeFigure(rows),
    figuresTable("All figures", rows),
    differences.length ? differenceTable(results, differences) : null,
  ].filter(Boolean);
}

function barFigures(rows) {
  const bars = (key, interval, unit) =>
    rows.map((row) => ({
      name: row.label,
      method: row.method,
      value: row[key],
      interval: row[interval],
      tip: `${row.label}: ${fixed(row[key], 3)}${unit}, 95 % ${span(row[interval])}`,
    }));
  const one = (title, key, interval, unit, reference) =>
    figure(
      title,
      responsive((width) => intervalBars(width, bars(key, interval, unit), { title, unit, reference })),
      "with 95 % intervals",
    );
  return [
    one("tau", "tau_mean", "tau_interval", "", null),
    one("speed-up over AR", "speedup", "speedup_interval", "×", 1),
  ];
}

function acceptanceFigures(rows) {
  const drafted = rows.filter((row) => row.acceptance_by_position?.length);
  if (!drafted.length) return null;
  const series = (key) =>
    drafted.map((row) => ({
      name: row.label,
      method: row.method,
      dash: row.dash,
      points: row.acceptance_by_position.map((p) => ({
        x: p.depth,
        y: p[key],
        tip:
          `${row.label}, depth ${p.depth}: ${percent(p[key], 1)}` +
          (key === "conditional" ? ` of ${p.trials} rounds` : ""),
      })),
    }));
  const one = (title, key, note) =>
    figure(
      title,
      responsive((width) =>
        lines(width, series(key), { title, xLabel: "draft position", yLabel: "share", high: 1, ordinal: true }),
      ),
      note,
    );
  return el(
    "div",
    {},
    el("div", { class: "pair" }, [
      one("Acceptance by position", "conditional", "given that the position before was accepted"),
      one("Prefix survival", "survival", "share of all rounds that accepted this position"),
    ]),
    legend(
      drafted.map((row) => ({
        name: `${row.label}: ${percent(row.whole_block_share)} whole blocks`,
        method: row.method,
        dash: row.dash,
      })),
    ),
    el("details", {}, el("summary", {}, "Acceptance as a table"), acceptanceTable(drafted)),
  );
}

// Beyond the last position that a method reached no round accepts so many, and no trial says how many would.
function acceptanceTable(drafted) {
  const places = [...Array(Math.max(...drafted.map((row) => row.acceptance_by_position.length))).keys()];
  const columns = (group, key, beyond) =>
    places.map((place) => {
      const value = ({ acceptance_by_position: points }) => (place < points.length ? points[place][key] : beyond);
      return { label: String(place + 1), group, value, show: (row) => percent(value(row), 1) };
    });
  return sortableTable(
    "Acceptance by draft position",
    [
      METHOD,
      ...columns("accepted, given that the position before was", "conditional", null),
      ...columns("share of all rounds that accepted it", "survival", 0),
      percentColumn("whole blocks", "whole_block_share"),
    ],
    drafted,
  );
}

function histogramFigure(rows) {
  const drafted = rows.filter((row) => row.method !== "ar" && row.accepted_histogram?.length);
  if (!drafted.length) return null;
  const depth = Math.max(...drafted.map((row) => row.accepted_histogram.length)) - 1;
  const one = (row) =>
    responsive(
      (width) => histogram(width, row.accepted_histogram, { title: row.label, method: row.method, depth }),
      "plot small",
    );
  return figure(
    "Accepted tokens of a round",
    el("div", { class: "grid" }, drafted.map(one)),
    "share of rounds that accepted 0, 1, 2, … draft tokens",
  );
}

function timeFigure(rows) {
  const sum = (row) => PARTS.reduce((before, part) => before + row.ms_per_round[part], 0);
  const timed = rows
    .filter((row) => row.ms_per_round)
    .map((row) => ({ name: row.label, parts: { ...row.ms_per_round, rest: row.ms_per_round_total - sum(row) } }));
  if (!timed.length) return null;
  const title = "Time of a round";
  const parts = [...PARTS, "rest"];
  const picture = responsive((width) => stackedBars(width, timed, parts, { title }));
  return figure(
    title,
    el("div", {}, picture, legend(parts.map((name, part) => ({ name, part })))),
    "milliseconds of each stage, and what is left of the decoding time",
  );
}

const KNOBS = [
  { ...numberColumn("B", "budget", 0), hint: "tree nodes, the root not counted; the chain's length for chains" },
  numberColumn("W", "width", 0),
  numberColumn("K", "candidates", 0),
  numberColumn("beta", "beta", 2),
  textColumn("acceptance", "acceptance"),
  textColumn("policy", "policy"),
  textColumn("note", "note"),
];

const METHOD = { label: "method", value: (row) => row.label };

// A column for each stage of a round.
function partColumns(group, key) {
  return PARTS.map((part) => ({
    label: part,
    group,
    value: (row) => row[key]?.[part] ?? null,
    show: (row) => fixed(row[key]?.[part], 1),
  }));
}

const SUMMARY = [
  numberColumn("tau", "tau_mean", 2, { best: "max", hint: "mean over answers of the mean over rounds" }),
  intervalColumn("95 %", "tau_interval"),
  numberColumn("trimmed", "tau_trimmed", 2, { hint: "tau, counting only tokens really emitted" }),
  numberColumn("by rounds", "tau_rounds", 2, { hint: "mean over all rounds" }),
  numberColumn("speed-up", "speedup", 2, { best: "max", hint: "ratio of sums" }),
  intervalColumn("95 %", "speedup_interval"),
  numberColumn("mean of ratios", "speedup_mean_of_ratios"),
  numberColumn("after first draft", "speedup_after_first_draft", 2, {
    hint: "with the clock that published tables use",
  }),
  numberColumn("tokens/s", "tokens_per_second", 1, { best: "max" }),
  numberColumn("end to end", "tokens_per_second_end_to_end", 1, { hint: "tokens/s with the prefill" }),
  numberColumn("nodes a round", "nodes_per_round", 1),
  ...partColumns("ms a round", "ms_per_round"),
  numberColumn("all", "ms_per_round_total", 1, { group: "ms a round" }),
  ...partColumns("busy ms a round", "busy_ms_per_round"),
  percentColumn("tree share", "tree_share"),
  percentColumn("whole blocks", "whole_block_share"),
  numberColumn("benchmarks", "benchmarks", 0),
  numberColumn("prompts", "prompts", 0),
  numberColumn("answers", "answers", 0),
  numberColumn("without rounds", "answers_without_rounds", 0),
  numberColumn("rounds", "rounds", 0),
  numberColumn("tokens", "tokens", 0),
  numberColumn("forwards", "target_forwards", 0),
  percentColumn("end in eos", "eos_share"),
  numberColumn("distinct 4-grams", "distinct_4gram", 3),
  numberColumn("diverged", "diverged", 0),
  numberColumn("near ties", "near_ties", 0),
  numberColumn("peak GB", "peak_memory_gb", 2),
  ...KNOBS,
];

// Whether any of the rows has a value for a column.
function hasValues(rows) {
  return (column) => rows.some((row) => (column.value(row) ?? "") !== "");
}

function figuresTable(caption, rows, before = []) {
  return sortableTable(caption, [METHOD, ...[...before, ...SUMMARY].filter(hasValues(rows))], rows);
}

function differenceTable(results, rows) {
  const names = Object.fromEntries(results.plans.map((plan) => [plan.plan, plan.label]));
  const name = (plan) => names[plan] ?? plan;
  const sure = (key) => (row) =>
    el("span", { class: (row[`${key}_p_holm`] ?? 1) <= 0.05 ? "sure" : null }, signed(row[`${key}_difference`]));
  const probability = (label, key, more) => {
    const show = (row) => (typeof row[key] === "number" && row[key] < 0.001 ? "<0.001" : fixed(row[key], 3));
    return { ...numberColumn(label, key, 3, more), show };
  };
  const part = (title, key) => [
    { label: "a − b", group: title, value: (row) => row[`${key}_difference`], show: sure(key) },
    intervalColumn("95 %", `${key}_interval`, { group: title }),
    probability("p", `${key}_p`, { group: title, hint: "two-sided bootstrap p of no difference" }),
    probability("p, Holm", `${key}_p_holm`, { group: title, hint: "corrected for all pairs of this table" }),
  ];
  const columns = [
    { label: "a", value: (row) => name(row.a) },
    { label: "b", words: true, value: (row) => name(row.b) },
    ...part("tau", "tau"),
    ...part("speed-up", "speedup"),
    numberColumn("pairs", "prompts", 0),
  ];
  return sortableTable("Paired differences between methods; bold: p ≤ 0.05 among all these pairs", columns, rows);
}
