// Pictures as inline SVG, drawn at the width of their box. A series or bar takes the colour of its method through the
// class "m-METHOD"; plans of one method differ by dash.

const DASHES = [null, "6 4", "2 3", "10 3 2 3"];

function scale([low, high], [from, to]) {
  const factor = high > low ? (to - from) / (high - low) : 0;
  return (value) => from + (value - low) * factor;
}

// About `count` round numbers from low to high.
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) found.push(i * step);
  return found;
}

function tickText(value) {
  return String(Number(value.toPrecision(6)));
}

function picture(width, height, label, ...children) {
  return svg(
    "svg",
    { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    ...children,
  );
}

function label(x, y, text, anchor = "start", className = null) {
  return svg("text", { x, y, "text-anchor": anchor, class: className }, text);
}

// Room for the names left of horizontal bars: at most half the picture.
function nameWidth(width, rows) {
  return Math.min(width / 2, 14 + 7.2 * Math.max(...rows.map((row) => row.name.length)));
}

// Horizontal bars with 95 % intervals. rows: {name, method, value, interval, tip}.
function intervalBars(width, rows, { title, reference = null, unit = "" }) {
  const above = width < 520;
  const left = above ? 4 : nameWidth(width, rows);
  const pitch = above ? 44 : 28;
  const bottom = rows.length * pitch + 4;
  const high = Math.max(...rows.map((row) => Math.max(row.value ?? 0, row.interval?.[1] ?? 0)), reference ?? 0, 1e-9);
  const x = scale([0, high], [left, width - 58]);
  const marks = ticks(0, high, Math.max(2, (width - left) / 90));
  return picture(
    width,
    bottom + 22,
    `${title}: ` + rows.map((row) => `${row.name} ${fixed(row.value)}${unit}`).join(", "),
    marks.map((m) => svg("line", { class: "grid", x1: x(m), x2: x(m), y1: 0, y2: bottom })),
    marks.map((m) => label(x(m), bottom + 16, tickText(m), "middle", "axis")),
    rows.map((row, place) => intervalBar(row, place * pitch, x, { left, above, unit })),
    reference === null
      ? null
      : svg("line", { class: "reference", x1: x(reference), x2: x(reference), y1: 0, y2: bottom }),
  );
}

function intervalBar(row, top, x, { left, above, unit }) {
  const middle = top + (above ? 32 : 14);
  const name = above ? label(left, top + 16, row.name) : label(left - 10, middle + 4, row.name, "end");
  if (typeof row.value !== "number") return svg("g", {}, name, label(x(0) + 4, middle + 4, NONE, "start", "axis"));
  const [low, high] = row.interval ?? [row.value, row.value];
  return svg(
    "g",
    { "data-tip": row.tip },
    name,
    svg("rect", {
      class: `bar m-${row.method}`,
      x: x(0),
      y: middle - 9,
      width: Math.max(1, x(row.value) - x(0)),
      height: 18,
      rx: 3,
    }),
    row.interval ? whisker(x(low), x(high), middle) : null,
    label(Math.max(x(row.value), x(high)) + 7, middle + 4, fixed(row.value) + unit, "start", "strong"),
  );
}

function whisker(from, to, y) {
  const path = `M${from} ${y - 4}v8M${from} ${y}H${to}M${to} ${y - 4}v8`;
  return svg("g", {}, svg("path", { class: "whisker halo", d: path }), svg("path", { class: "whisker", d: path }));
}

// Stacked horizontal bars. rows: {name, parts: {part: number}}.
function stackedBars(width, rows, parts, { title, unit = " ms" }) {
  const above = width < 520;
  const left = above ? 4 : nameWidth(width, rows);
  const pitch = above ? 44 : 28;
  const bottom = rows.length * pitch + 4;
  const total = (row) => parts.reduce((sum, part) => sum + (row.parts[part] ?? 0), 0);
  const high = Math.max(...rows.map(total), 1e-9);
  const x = scale([0, high], [left, width - 64]);
  const marks = ticks(0, high, Math.max(2, (width - left) / 90));
  return picture(
    width,
    bottom + 22,
    `${title}: ` + rows.map((row) => `${row.name} ${fixed(total(row), 1)}${unit}`).join(", "),
    marks.map((m) => svg("line", { class: "grid", x1: x(m), x2: x(m), y1: 0, y2: bottom })),
    marks.map((m) => label(x(m), bottom + 16, tickText(m), "middle", "axis")),
    rows.map((row, place) => {
      const middle = place * pitch + (above ? 32 : 14);
      const name = above ? label(left, middle - 16, row.name) : label(left - 10, middle + 4, row.name, "end");
      const sum = label(x(total(row)) + 7, middle + 4, fixed(total(row), 1), "start", "strong");
      return svg("g", {}, name, stackedParts(row, parts, x, middle, unit), sum);
    }),
  );
}

function stackedParts(row, parts, x, middle, unit) {
  let before = 0;
  return parts.map((part, place) => {
    const value = row.parts[part] ?? 0;
    const from = x(before);
    before += value;
    const box = { x: from, y: middle - 9, width: Math.max(0, x(before) - from), height: 18 };
    return svg("rect", {
      class: `part part-${place}`,
      ...box,
      "data-tip": `${row.name}, ${part}: ${fixed(value, 2)}${unit}`,
    });
  });
}

// Lines over numbers (or, with `ordinal`, over the distinct values of x at equal steps).
// series: {name, method, dash, points: [{x, y, interval, tip}]}.
function lines(width, series, { title, xLabel, yLabel, ordinal = false, zero = true, high = null }) {
  const height = Math.min(300, Math.max(210, width * 0.55));
  const area = { left: 46, right: width - 14, top: 24, bottom: height - 40 };
  const xs = unique(series.flatMap((s) => s.points.map((p) => p.x))).sort((a, b) => a - b);
  const place = ordinal ? scale([0, Math.max(1, xs.length - 1)], [area.left + 12, area.right - 12]) : null;
  const x = ordinal ? (v) => place(xs.indexOf(v)) : scale([xs[0], last(xs)], [area.left + 8, area.right - 8]);
  const values = series.flatMap((s) => s.points.map((p) => p.y));
  const ys = [...values, ...series.flatMap((s) => s.points.flatMap((p) => p.interval ?? []))];
  // An interval of two runs can be so wide that it would flatten the lines: it may leave the picture.
  const top = high ?? Math.min(Math.max(...ys) * 1.05, Math.max(...values) * 1.5);
  const rise = scale([zero ? 0 : Math.min(...ys) * 0.95, top], [area.bottom, area.top]);
  const y = (value) => rise(Math.min(value, top));
  return picture(
    width,
    height,
    `${title}: ${yLabel} against ${xLabel}, ${series.map((s) => s.name).join(", ")}`,
    yAxis(area, y, zero ? 0 : Math.min(...ys) * 0.95, top, yLabel),
    xAxis(area, x, ordinal ? xs : ticks(xs[0], last(xs), width / 60), xLabel),
    series.map((s) => line(s, x, y)),
  );
}

function yAxis(area, y, low, high, text) {
  const marks = ticks(low, high, 5).map((m) => [
    svg("line", { class: "grid", x1: area.left, x2: area.right, y1: y(m), y2: y(m) }),
    label(area.left - 7, y(m) + 4, tickText(m), "end", "axis"),
  ]);
  return svg("g", {}, marks.flat(), label(4, 13, text, "start", "axis"));
}

function xAxis(area, x, marks, text) {
  const shown = marks.map((m) => label(x(m), area.bottom + 17, tickText(m), "middle", "axis"));
  return svg("g", {}, shown, label((area.left + area.right) / 2, area.bottom + 35, text, "middle", "axis"));
}

function line(series, x, y) {
  const points = series.points.filter((p) => typeof p.y === "number");
  const path = points.map((p, i) => `${i ? "L" : "M"}${x(p.x)} ${y(p.y)}`).join("");
  const bars = points.filter((p) => p.interval).map((p) => `M${x(p.x)} ${y(p.interval[0])}V${y(p.interval[1])}`);
  return svg(
    "g",
    { class: `series m-${series.method}` },
    svg("path", { class: "error", d: bars.join("") }),
    svg("path", { class: "line", d: path, "stroke-dasharray": DASHES[series.dash % DASHES.length] }),
    points.map((p) => svg("circle", { cx: x(p.x), cy: y(p.y), r: 3.5, "data-tip": p.tip })),
  );
}

// Small histogram of counts, as shares of their sum.
function histogram(width, counts, { title, method, depth }) {
  const height = 116;
  const sum = counts.reduce((a, b) => a + b, 0) || 1;
  const x = scale([0, depth + 1], [4, width - 4]);
  const y = scale([0, Math.max(...counts) / sum], [height - 20, 26]);
  const each = x(1) - x(0);
  const step = Math.max(1, Math.ceil(18 / each));
  return picture(
    width,
    height,
    `${title}: ` + counts.map((c, i) => `${i}: ${percent(c / sum)}`).join(", "),
    label(4, 13, title, "start", "strong"),
    counts.map((count, i) => {
      const box = {
        x: x(i) + 1,
        y: y(count / sum),
        width: Math.max(1, each - 2),
        height: height - 20 - y(count / sum),
      };
      return svg("rect", {
        class: `bar m-${method}`,
        ...box,
        "data-tip": `${i} accepted: ${count} rounds, ${percent(count / sum)}`,
      });
    }),
    svg("line", { class: "base", x1: 4, x2: width - 4, y1: height - 20, y2: height - 20 }),
    [...Array(depth + 1).keys()]
      .filter((i) => i % step === 0)
      .map((i) => label(x(i) + each / 2, height - 5, i, "middle", "axis")),
  );
}

function legend(entries) {
  const item = ({ name, method, dash = 0, part = null }) => {
    const mark = part === null ? { class: `series m-${method}` } : { class: `part part-${part}` };
    const sample =
      part === null
        ? svg("g", mark, svg("path", { class: "line", d: "M1 7H25", "stroke-dasharray": DASHES[dash % DASHES.length] }))
        : svg("rect", { ...mark, x: 4, y: 1, width: 16, height: 12 });
    return el("li", {}, svg("svg", { width: 26, height: 14, "aria-hidden": "true" }, sample), name);
  };
  return el("ul", { class: "legend" }, entries.map(item));
}
