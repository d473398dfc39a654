// Tables 2 and 3 of the report: one head call a depth against one a node, and what trees gain from a head that was
// trained for chains. eval/tables.py chooses the same rows.

function isolationSection(results) {
  const tables = [mechanismTable(results), headSwapTable(results)].filter(Boolean);
  return tables.length ? section("isolation", "Mechanism and head swap", tables) : null;
}

// What `pick` takes from the rows of each benchmark at each temperature.
function perPlace(results, pick) {
  const place = (row) => `${row.benchmark}\n${row.temperature}`;
  return unique(results.summary.map(place)).flatMap((p) => pick(results.summary.filter((row) => place(row) === p)));
}

const WHERE = [textColumn("benchmark", "benchmark"), numberColumn("T", "temperature", 1)];
const TAU = [numberColumn("tau", "tau_mean"), intervalColumn("95 %", "tau_interval")];
const SPEED = [numberColumn("speed-up", "speedup"), intervalColumn("95 %", "speedup_interval")];

function mechanismTable(results) {
  const rows = perPlace(results, (own) => {
    const trees = own.filter((row) => row.policy === "fixed");
    const serial = trees.filter((row) => row.method === "per_node_serial");
    const budgets = serial.map((row) => row.budget);
    const pruned = trees.filter((row) => row.method === "dartree_pruned" && budgets.includes(row.budget));
    return pruned.length ? [...serial, ...pruned] : [];
  });
  const columns = [
    METHOD,
    ...WHERE,
    ...TAU,
    numberColumn("ms a round", "ms_per_round_total", 1),
    { label: "of it tree", value: (row) => row.ms_per_round?.tree, show: (row) => fixed(row.ms_per_round?.tree, 1) },
    { ...percentColumn("share of tree", "tree_share"), show: (row) => percent(row.tree_share, 1) },
    ...SPEED,
  ];
  return rows.length ? sortableTable("One head call a depth, or one a node, at equal B", columns, rows) : null;
}

const SWAPPED = ["dflash_chain", "markov_chain"];

function headSwapTable(results) {
  if (!String(results.settings.head ?? "").startsWith("markov")) return null;
  const rows = perPlace(results, (own) => {
    const base = (chain) => own.find((row) => row.method === chain && row.acceptance === "sample-match")?.tau_mean;
    const gain = (row, chain) =>
      row.method === chain || !base(chain) || !row.tau_mean ? null : row.tau_mean / base(chain) - 1;
    return own
      .filter((row) => [...SWAPPED, "dartree_fixed", "dartree_pruned"].includes(row.method))
      .map((row) => ({ ...row, gains: SWAPPED.map((chain) => gain(row, chain)) }));
  });
  const gains = SWAPPED.map((chain, place) => ({
    label: `over ${chain}`,
    group: "gain in tau",
    value: (row) => row.gains[place],
    show: (row) => (row.gains[place] === null ? NONE : `${signed(100 * row.gains[place], 1)} %`),
  }));
  const columns = [METHOD, ...WHERE, ...TAU, ...gains, ...SPEED];
  return sortableTable("DARTree on a Markov head that was trained for chains", columns, rows);
}
