// Tables that sort by a click, or by Enter or Space, on a column's header.
//
// A column: label, value(row) -> number, string or null (what sorts), show(row) -> text or node (default: the value),
// hint (tooltip of the header), words (aligned left, as the first column is), best ("max" or "min": the best cell is
// marked), group (a header above several columns).

function sortableTable(caption, columns, rows, rowClass = () => null) {
  const body = el("tbody");
  const heads = columns.map((column, place) => headCell(column, () => sort(place)));
  let sorted = { place: -1, up: false };

  function sort(place) {
    const numeric = isNumeric(columns[place], rows);
    const up = sorted.place === place ? !sorted.up : !numeric;
    sorted = { place, up };
    heads.forEach((head, i) => head.setAttribute("aria-sort", i !== place ? "none" : up ? "ascending" : "descending"));
    draw([...rows].sort(comparing(columns[place].value, up)));
  }

  function draw(ordered) {
    const best = columns.map((column) => bestValue(column, rows));
    body.replaceChildren(...ordered.map((row) => tableRow(columns, row, best, rowClass(row))));
  }

  draw(rows);
  const groups = groupRow(columns);
  const table = el(
    "table",
    {},
    el("caption", {}, el("span", {}, caption)),
    el("thead", {}, groups, el("tr", {}, heads)),
    body,
  );
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption + ", scrollable" }, table);
}

function headCell(column, sort) {
  const button = el("button", { type: "button", "data-tip": column.hint, click: sort }, column.label);
  return el("th", { scope: "col", "aria-sort": "none", class: column.words ? "words" : null }, button);
}

function groupRow(columns) {
  if (!columns.some((column) => column.group)) return null;
  const runs = [];
  for (const { group = "" } of columns) {
    if (runs.length && last(runs).group === group) last(runs).count += 1;
    else runs.push({ group, count: 1 });
  }
  const cell = (run) =>
    run.group ? el("th", { scope: "colgroup", colspan: run.count }, run.group) : el("td", { colspan: run.count });
  return el("tr", { class: "groups" }, runs.map(cell));
}

function tableRow(columns, row, best, className) {
  const cells = columns.map((column, place) => {
    const value = column.value(row);
    const shown = column.show ? column.show(row) : (value ?? NONE);
    const marked = best[place] !== null && value === best[place];
    const kind = [column.words ? "words" : null, marked ? "best" : null].filter(Boolean).join(" ") || null;
    return place === 0 ? el("th", { scope: "row" }, shown) : el("td", { class: kind }, shown);
  });
  return el("tr", { class: className }, cells);
}

function isNumeric(column, rows) {
  return rows.some((row) => typeof column.value(row) === "number");
}

function bestValue(column, rows) {
  const values = rows.map(column.value).filter((value) => typeof value === "number");
  if (!column.best || unique(values).length < 2) return null;
  return column.best === "max" ? Math.max(...values) : Math.min(...values);
}

// Missing values stand last in either direction; equal ones keep their order.
function comparing(value, up) {
  return (a, b) => {
    const [x, y] = [value(a) ?? null, value(b) ?? null];
    if (x === null || y === null) return (x === null) - (y === null);
    const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en");
    return up ? order : -order;
  };
}

// Columns of plain fields.
function numberColumn(label, key, digits = 2, more = {}) {
  return { label, value: (row) => row[key], show: (row) => fixed(row[key], digits), ...more };
}

function percentColumn(label, key, more = {}) {
  return { label, value: (row) => row[key], show: (row) => percent(row[key]), ...more };
}

function intervalColumn(label, key, more = {}) {
  return { label, value: (row) => row[key]?.[0] ?? null, show: (row) => span(row[key]), ...more };
}

function textColumn(label, key, more = {}) {
  return {
    label,
    words: true,
    value: (row) => row[key],
    show: (row) => (row[key] === "" ? NONE : String(row[key] ?? NONE)),
    ...more,
  };
}
