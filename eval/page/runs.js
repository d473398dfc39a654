// Sweeps, throughput under load, quality and divergences.

const SWEEPS = { budget: "budget B", width: "width W", candidates: "candidates K", beta: "beta" };

function sweepsSection(results) {
  const rows = results.sweeps.filter((row) => typeof row.value === "number" && row.method !== "ar");
  if (!rows.length) return null;
  const places = unique(rows.map((row) => `${row.sweep}\n${row.benchmark}\n${row.temperature}`));
  const figures = places.map((place) => {
    const [sweep, benchmark, temperature] = place.split("\n");
    return sweepFigures(
      rows.filter((r) => r.sweep === sweep && r.benchmark === benchmark && String(r.temperature) === temperature),
    );
  });
  const before = [
    textColumn("sweep", "sweep"),
    numberColumn("value", "value"),
    textColumn("benchmark", "benchmark"),
    numberColumn("T", "temperature", 1),
  ];
  const table = figuresTable("All sweeps", results.sweeps, before);
  const text =
    "One option changed at a time, over the same prompts; AR was decoded again among them. dartree_pruned keeps at " +
    "most W nodes at each position of the draft: a B above W × positions adds nothing to it, while ddtree fills any B.";
  return section(
    "sweeps",
    "Sweeps",
    el("p", {}, text),
    figures,
    el("details", {}, el("summary", {}, "All figures of the sweeps"), table),
  );
}

function sweepFigures(rows) {
  const { sweep, benchmark, temperature } = rows[0];
  const methods = unique(rows.map((row) => row.method));
  const series = (key, unit) =>
    methods.map((method) => ({
      name: method,
      method,
      dash: 0,
      points: rows
        .filter((row) => row.method === method)
        .sort((a, b) => a.value - b.value)
        .map((row) => ({
          x: row.value,
          y: row[key],
          interval: row[key === "tau_mean" ? "tau_interval" : "speedup_interval"],
          tip: `${method}, ${SWEEPS[sweep] ?? sweep} ${row.value}: ${fixed(row[key], 3)}${unit}`,
        })),
    }));
  const xLabel = SWEEPS[sweep] ?? sweep;
  const one = (title, key, unit) =>
    figure(
      title,
      responsive((width) => lines(width, series(key, unit), { title, xLabel, yLabel: title, ordinal: true })),
      `against ${xLabel}`,
    );
  return el(
    "div",
    {},
    el("h3", {}, `${xLabel}: ${benchmark}, T=${temperature}`),
    el("div", { class: "pair" }, [one("tau", "tau_mean", ""), one("speed-up", "speedup", "×")]),
    legend(methods.map((method) => ({ name: method, method }))),
  );
}

function concurrencySection(results) {
  const rows = results.concurrency;
  if (!rows.length) return null;
  const places = unique(rows.map((row) => `${row.benchmark}\n${row.temperature}`));
  const figures = places.map((place) => {
    const [benchmark, temperature] = place.split("\n");
    return loadFigures(rows.filter((r) => r.benchmark === benchmark && String(r.temperature) === temperature));
  });
  const text = "Requests join and leave one loop; the speed-up is against AR with as many requests at once.";
  return section("concurrency", "Several requests at once", el("p", {}, text), figures, loadTable(rows));
}

function loadFigures(rows) {
  const plans = withDashes(unique(rows.map((row) => row.plan)).map((plan) => rows.find((row) => row.plan === plan)));
  const series = (key, interval, unit) =>
    plans.map(({ plan, label: name, method, dash }) => ({
      name,
      method,
      dash,
      points: rows
        .filter((row) => row.plan === plan)
        .sort((a, b) => a.concurrency - b.concurrency)
        .map((row) => ({
          x: row.concurrency,
          y: row[key],
          interval: row[interval],
          tip: `${name}, ${row.concurrency} at once: ${fixed(row[key], 2)}${unit}`,
        })),
    }));
  const one = (title, key, interval, unit) =>
    figure(
      title,
      responsive((width) =>
        lines(width, series(key, interval, unit), { title, xLabel: "requests at once", yLabel: title, ordinal: true }),
      ),
    );
  return el(
    "div",
    {},
    el("h3", {}, `${rows[0].benchmark}, T=${rows[0].temperature}`),
    el("div", { class: "pair" }, [
      one("tokens/s", "tokens_per_second", "tokens_per_second_interval", " tokens/s"),
      one("speed-up over AR", "speedup", "speedup_interval", "×"),
    ]),
    legend(plans.map(({ label: name, method, dash }) => ({ name, method, dash }))),
  );
}

const OVER_RUNS = "over the runs; none for a single run";

function loadTable(rows) {
  const columns = [
    METHOD,
    numberColumn("at once", "concurrency", 0),
    textColumn("benchmark", "benchmark"),
    numberColumn("T", "temperature", 1),
    numberColumn("tokens/s", "tokens_per_second", 1, { best: "max", hint: "prefills inside" }),
    intervalColumn("95 %", "tokens_per_second_interval", { hint: OVER_RUNS }),
    numberColumn("after prefill", "tokens_per_second_after_prefill", 1, { hint: "tokens/s without the prefills" }),
    numberColumn("speed-up", "speedup", 2, { hint: "against AR with as many requests at once" }),
    intervalColumn("95 %", "speedup_interval", { hint: OVER_RUNS }),
    numberColumn("tau", "tau_mean"),
    intervalColumn("95 %", "tau_interval"),
    numberColumn("nodes", "nodes_per_round", 1, { hint: "of one request in a mean round" }),
    numberColumn("diverged", "diverged", 0, { hint: "answers of all runs that differ from AR's at the lowest level" }),
    numberColumn("near ties", "near_ties", 0),
    numberColumn("live", "live_requests", 1, { hint: "requests decoded in a mean round" }),
    ...partColumns("ms a round", "ms_per_round"),
    numberColumn("requests", "requests", 0),
    numberColumn("tokens", "tokens", 0),
    numberColumn("seconds", "seconds", 1),
    numberColumn("prefill s", "prefill_seconds", 1),
    numberColumn("runs", "runs", 0),
    numberColumn("KV cache GB", "kv_cache_gb", 3),
    numberColumn("peak GB", "peak_memory_gb", 2),
    ...KNOBS,
  ];
  return sortableTable("Throughput", columns.filter(hasValues(rows)), rows);
}

function qualitySection(results) {
  const quality = sortableTable(
    "The target's own answers",
    [
      textColumn("benchmark", "benchmark"),
      numberColumn("T", "temperature", 1),
      numberColumn("answers", "answers", 0),
      percentColumn("end in eos", "eos_share"),
      numberColumn("distinct 4-grams", "distinct_4gram", 3, { hint: "a repetitive model flatters tau" }),
      numberColumn("AR tokens/s", "ar_tokens_per_second", 1),
      numberColumn("generate tokens/s", "generate_tokens_per_second", 1, {
        hint: "target.generate of transformers on the same prompts",
      }),
      numberColumn("AR over generate", "ar_over_generate"),
    ],
    results.quality,
  );
  return section("quality", "Answers and divergences", quality, benchmarkTable(results), divergences(results));
}

function benchmarkTable(results) {
  const columns = [
    textColumn("benchmark", "benchmark"),
    textColumn("source", "source"),
    numberColumn("prompts", "prompts", 0),
    numberColumn("answers", "answers", 0),
    numberColumn("skipped", "skipped", 0, { hint: "prompts that are too long, or that the chat template refuses" }),
    numberColumn("turns dropped", "turns_dropped", 0, { hint: "turns of these prompts that were too long by then" }),
    numberColumn("left out", "left_out", 0, { hint: "turns answered by some plans only" }),
  ];
  return results.benchmarks.length ? sortableTable("Benchmarks", columns, results.benchmarks) : null;
}

function divergences(results) {
  const rows = results.divergences;
  // A point that two sweeps share stands in both of them.
  const points = unique(results.sweeps.map((row) => row.plan)).map((p) => results.sweeps.find((r) => r.plan === p));
  // AR itself can answer otherwise with more requests at once.
  const load = results.concurrency.map((row) => ({ ...row, answers: row.runs * row.requests }));
  const texts = [
    differing(
      "greedy answers",
      results.summary.filter((row) => row.method !== "ar"),
    ),
    differing("greedy answers of the sweeps", points),
    differing("greedy answers of several requests at once", load),
  ];
  const table = () =>
    sortableTable(
      "Answers that differ from AR's",
      [
        textColumn("prompt", "prompt_id"),
        numberColumn("turn", "turn", 0),
        textColumn("benchmark", "benchmark"),
        textColumn("plan", "plan"),
        textColumn("phase", "phase"),
        numberColumn("position", "position", 0),
        numberColumn("AR's token", "ar_token", 0),
        numberColumn("token", "token", 0),
        { ...numberColumn("gap", "gap"), show: (row) => (row.gap === null ? NONE : row.gap.toPrecision(3)) },
        {
          ...numberColumn("threshold", "threshold"),
          show: (row) => (row.threshold === null ? NONE : row.threshold.toPrecision(3)),
        },
        {
          label: "near tie",
          words: true,
          value: (row) => (row.pieces ? `in pieces of ${row.pieces}` : row.near_tie ? "yes" : "no"),
        },
      ],
      rows,
    );
  return el(
    "div",
    {},
    texts.filter(Boolean).map((text) => el("p", {}, text)),
    rows.length ? el("details", {}, el("summary", {}, "The divergences"), table()) : null,
  );
}

// Null where nothing was compared with AR: no greedy answers.
function differing(what, rows) {
  const compared = rows.filter((row) => typeof row.diverged === "number");
  const sum = (key) => compared.reduce((before, row) => before + row[key], 0);
  const [answers, diverged] = [sum("answers"), sum("diverged")];
  if (!answers) return null;
  return diverged
    ? `${diverged} of ${answers} ${what} differ from AR's; a near tie explains ${sum("near_ties")} of them.`
    : `None of ${answers} ${what} differs from AR's.`;
}
