// The parts of the page that come from results.json (docs/results.md). Each returns an element, or null where the run
// measured nothing of the kind.

const PARTS = ["draft", "tree", "verify", "commit"];
const AVERAGE = "average";

// The plan that the headline speaks of: DARTree pruned as configured, else the last one.
function mainPlan(results) {
  const plans = results.plans.filter((plan) => plan.method !== "ar");
  return (
    plans.find((p) => p.method === "dartree_pruned" && !p.note && p.policy === "fixed") ??
    last(plans) ??
    results.plans[0]
  );
}

// A row a plan, with the dash that tells plans of one method apart.
function withDashes(rows) {
  const seen = {};
  return rows.map((row) => ({ ...row, dash: (seen[row.method] = (seen[row.method] ?? -1) + 1) }));
}

function overall(results, temperature) {
  const averages = results.averages.filter((row) => row.temperature === temperature);
  const benchmarks = unique(results.summary.filter((r) => r.temperature === temperature).map((r) => r.benchmark));
  if (averages.length && benchmarks.length > 1)
    return { rows: averages, name: `the average of ${benchmarks.length} benchmarks` };
  const rows = results.summary.filter((row) => row.temperature === temperature && row.benchmark === benchmarks[0]);
  return { rows, name: benchmarks[0] };
}

function temperaturesOf(results) {
  return unique(results.summary.map((row) => row.temperature));
}

function headline(results) {
  const { settings } = results;
  const plan = mainPlan(results);
  const figures = temperaturesOf(results).flatMap((temperature) => headlineFigures(results, plan, temperature));
  return [
    el("p", { class: "kicker" }, "Evaluation of tree speculative decoding"),
    el("h1", {}, shortName(String(settings.target_name ?? settings.target ?? "Evaluation"))),
    el("p", { class: "sub" }, `${plan.label}, drafter ${settings.drafter ?? NONE}`),
    el(
      "dl",
      { class: "cards" },
      figures.map(([term, value, note]) =>
        el("div", {}, el("dt", {}, term), el("dd", {}, el("b", {}, value), el("span", {}, note))),
      ),
    ),
    el("p", { class: "sub" }, machineLine(settings)),
  ];
}

// The last part of a path; a Hub id stays whole.
function shortName(name) {
  return /^[/.~]/.test(name) ? (last(name.split("/").filter(Boolean)) ?? name) : name;
}

function headlineFigures(results, plan, temperature) {
  const { rows, name } = overall(results, temperature);
  const row = rows.find((r) => r.plan === plan.plan);
  if (!row) return [];
  const fastest = rows.filter((r) => r.method !== "ar" && r.speedup !== null).sort((a, b) => b.speedup - a.speedup)[0];
  const other =
    fastest && fastest.plan !== plan.plan ? `; fastest here: ${fastest.label}, ${fixed(fastest.speedup)}×` : "";
  return [
    [`tau, T=${temperature}`, fixed(row.tau_mean), `tokens a target forward; 95 %: ${span(row.tau_interval)}; ${name}`],
    [
      `speed-up, T=${temperature}`,
      `${fixed(row.speedup)}×`,
      `over AR in the same loop; 95 %: ${span(row.speedup_interval)}; ${name}${other}`,
    ],
  ];
}

function machineLine(settings) {
  const { cpu, cores, threads, memory_gb: memory, gpus = [] } = settings.hardware ?? {};
  const machine = gpus.length
    ? gpus.join(", ")
    : [cpu ?? NONE, plural(cores, "core"), plural(threads, "thread")].join(", ");
  const words = [machine, `${fixed(memory, 0)} GiB`, settings.dtype, `${settings.attention} attention`];
  const commit = String(settings.git_commit ?? NONE).slice(0, 10);
  return words.concat(`${settings.max_new_tokens} new tokens`, `commit ${commit}`).join(" · ");
}

function plural(count, word) {
  return `${count ?? NONE} ${word}${count === 1 ? "" : "s"}`;
}

// Methods as rows, tau and speed-up of every benchmark as columns.
function mainTable(results, temperature) {
  const rows = results.summary.filter((row) => row.temperature === temperature);
  const averages = results.averages.filter((row) => row.temperature === temperature);
  const benchmarks = unique(rows.map((row) => row.benchmark));
  const cell = (plan, benchmark) =>
    benchmark === AVERAGE
      ? averages.find((r) => r.plan === plan)
      : rows.find((r) => r.plan === plan && r.benchmark === benchmark);
  const pair = (benchmark) => [
    figureColumn("tau", benchmark, (plan) => cell(plan.plan, benchmark), "tau_mean", ""),
    figureColumn("speed-up", benchmark, (plan) => cell(plan.plan, benchmark), "speedup", "×"),
  ];
  const columns = [{ label: "method", value: (plan) => plan.label }];
  const names = averages.length && benchmarks.length > 1 ? [AVERAGE, ...benchmarks] : benchmarks;
  const plans = results.plans.filter((plan) => rows.some((row) => row.plan === plan.plan));
  return sortableTable(`Temperature ${temperature}`, columns.concat(names.flatMap(pair)), plans);
}

function figureColumn(label, group, find, key, unit) {
  const show = (plan) => {
    const row = find(plan);
    if (typeof row?.[key] !== "number") return NONE;
    const interval = row[key === "tau_mean" ? "tau_interval" : "speedup_interval"];
    const tip = `${row.label}, ${group}: ${label} ${fixed(row[key], 3)}${unit}, 95 % ${span(interval)}`;
    return el("span", { "data-tip": tip }, fixed(row[key]) + unit);
  };
  return { label, group, value: (plan) => find(plan)?.[key] ?? null, show, best: "max" };
}

function resultsSection(results) {
  const text =
    "tau: tokens emitted for each forward of the target, the bonus token included. Speed-up: AR's time for a token " +
    "over the method's, in the same loop on the same prompts. The best of a column is bold.";
  return section(
    "results",
    "Results",
    el("p", {}, text),
    temperaturesOf(results).map((t) => mainTable(results, t)),
  );
}
