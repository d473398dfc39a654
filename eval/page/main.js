// Puts the page together from the data that the report wrote into it: {results, traces (or null)}.

const SECTIONS = [
  ["results", "Results", ({ results }) => resultsSection(results)],
  ["details", "In detail", ({ results }) => detailSection(results)],
  ["isolation", "Mechanism", ({ results }) => isolationSection(results)],
  [
    "trees",
    "Trees",
    ({ traces }) => (traces?.prompts.some((p) => p.rounds.length) ? viewerOf(traces).section() : null),
  ],
  ["sweeps", "Sweeps", ({ results }) => sweepsSection(results)],
  ["concurrency", "Concurrency", ({ results }) => concurrencySection(results)],
  ["quality", "Answers", ({ results }) => qualitySection(results)],
  ["settings", "Settings", ({ results }) => settingsSection(results)],
];

// Answers that ended with their first token have no round to show.
function viewerOf(traces) {
  return new Viewer({ ...traces, prompts: traces.prompts.filter((prompt) => prompt.rounds.length) });
}

function main() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const built = SECTIONS.map(([id, name, build]) => [id, name, build(data)]).filter(([, , element]) => element);
  const links = built.map(([id, name]) => el("li", {}, el("a", { href: `#${id}` }, name)));
  document.getElementById("top").append(...headline(data.results));
  document
    .getElementById("main")
    .append(el("nav", { "aria-label": "Sections" }, el("ul", {}, links)), ...built.map(([, , element]) => element));
  document.getElementById("foot").append(footer(data.results));
  installTips();
  openPlace();
}

function footer(results) {
  const { git_commit: commit, fingerprint } = results.settings;
  const run = String(fingerprint ?? NONE).slice(0, 12);
  return el("p", {}, `results.json schema ${results.schema_version}, commit ${commit ?? NONE}, run ${run}.`);
}

// The address names a section, or a round of the viewer; both exist only now.
function openPlace() {
  const id = location.hash.includes("=") ? "trees" : location.hash.slice(1);
  if (id) document.getElementById(id)?.scrollIntoView();
}

main();
