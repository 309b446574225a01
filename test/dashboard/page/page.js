// Draws the panels of a Grafana dashboard from what Prometheus answers. What it does not
// know is an error, never left out.
import { format } from "./units.js";

const parameters = new URLSearchParams(location.search);
const prometheus = parameters.get("prometheus");
const from = Number(parameters.get("from")), to = Number(parameters.get("to"));
const step = Math.max(5, Math.round((to - from) / 200));

// The grid of Grafana: 24 columns, and rows of 30 pixels with gaps of 8.
const column = (document.documentElement.clientWidth - 16 + 8) / 24, line = 38, gap = 8;

const palette = ["#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#b877d9", "#ff7383", "#8ab8ff", "#fade2a", "#96d98d", "#ca95e5", "#ffb357", "#37872d"];
const colours = { green: "#73bf69", orange: "#ff9830", red: "#f2495c", text: "#ccccdc" };

const main = document.querySelector("main");
const outcome = { height: 0, empty: [], errors: [] };

async function ask(path, query) {
  const answer = await (await fetch(`${prometheus}/api/v1/${path}?` + new URLSearchParams(query))).json();
  if (answer.status !== "success") throw new Error(`${query.query}: ${answer.error}`);
  return answer.data.result;
}

// plain puts what Grafana would for its variables: all nodes, all pools, some scrapes.
const plain = (expr) => expr.replaceAll("$__rate_interval", "30s").replaceAll("$node", ".*").replaceAll("$pool", ".*");
const now = (target) => ask("query", { query: plain(target.expr), time: to });
const then = (target) => ask("query_range", { query: plain(target.expr), start: from, end: to, step });

const legend = (target, labels) => target.legendFormat.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, name) => labels[name] ?? "");

function add(parent, name, className, text) {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

// place makes the box of a panel.
function place(panel) {
  const { x, y, w, h } = panel.gridPos;
  const box = add(main, "div", panel.type === "row" ? "row" : "panel");
  Object.assign(box.style, {
    left: `${x * column}px`, top: `${y * line}px`, width: `${w * column - gap}px`, height: `${h * line - gap}px`,
  });
  outcome.height = Math.max(outcome.height, (y + h) * line + gap);
  return box;
}

// colour is that of the last step that a value reaches.
function colour(thresholds, value) {
  const reached = thresholds.steps.filter((s) => s.value === null || value >= s.value).at(-1);
  if (!(reached.color in colours)) throw new Error(`unknown colour ${reached.color}`);
  return colours[reached.color];
}

function empty(panel, box) {
  outcome.empty.push(panel.title);
  add(box, "div", "none", "No data");
}

async function stat(panel, box) {
  const { unit, decimals, thresholds } = panel.fieldConfig.defaults;
  const [answer] = await now(panel.targets[0]);
  if (!answer) return empty(panel, box);
  const value = Number(answer.value[1]);
  add(box, "div", "stat", format(unit, value, decimals)).style.color = colour(thresholds, value);
}

// table has a line for all answers with the same labels, and a column for each query.
async function table(panel, box) {
  const answers = await Promise.all(panel.targets.map(now));
  const { renameByName } = panel.transformations.find((t) => t.id === "organize").options;
  const names = panel.targets.map((t) => renameByName[panel.targets.length > 1 ? `Value #${t.refId}` : "Value"]);
  const lines = new Map();
  answers.forEach((answer, i) => {
    for (const { metric, value } of answer) {
      const key = JSON.stringify(metric);
      if (!lines.has(key)) lines.set(key, { metric, values: [] });
      lines.get(key).values[i] = Number(value[1]);
    }
  });
  if (lines.size === 0) return empty(panel, box);
  const labels = Object.keys(renameByName).filter((name) => !name.startsWith("Value"));
  const element = add(box, "table");
  const head = add(element, "tr");
  labels.forEach((name) => add(head, "th", "text", renameByName[name]));
  names.forEach((name) => add(head, "th", "", name));
  const order = (l) => labels.map((name) => l.metric[name]).join("\0");
  for (const l of [...lines.values()].sort((a, b) => (order(a) < order(b) ? -1 : 1))) {
    const row = add(element, "tr");
    labels.forEach((name) => add(row, "td", "text", l.metric[name]));
    names.forEach((name, i) => cell(panel, row, name, l.values[i]));
  }
}

function cell(panel, row, name, value) {
  if (value === undefined) return add(row, "td", "", "");
  const override = panel.fieldConfig.overrides.find((o) => o.matcher.options === name);
  const property = (id) => override?.properties.find((p) => p.id === id)?.value;
  const mapped = property("mappings")?.[0].options[String(value)];
  const shown = add(row, "td", "", mapped?.text ?? format(property("unit"), value, property("decimals")));
  if (mapped) shown.style.color = colours[mapped.color];
  else if (property("thresholds")) shown.style.color = colour(property("thresholds"), value);
}

const svgNS = "http://www.w3.org/2000/svg";
function draw(parent, name, attributes, text) {
  const element = document.createElementNS(svgNS, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

// ticks are round numbers that cover the values: round in the unit that they will have.
function ticks(low, high, unit) {
  const steps = { bytes: [1, 2 ** 10, 2 ** 20, 2 ** 30, 2 ** 40], s: [1, 60, 3600, 86400] }[unit] ?? [1];
  const base = steps.filter((s) => high >= 2 * s).at(-1) ?? 1;
  const rough = (high - low) / base / 4 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const width = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough) * base;
  const found = [];
  for (let at = Math.floor(low / width) * width; ; at += width) {
    found.push(at);
    if (at >= high && found.length > 1) return found;
  }
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); ; power++) {
    found.push(10 ** power);
    if (10 ** power >= high) return found;
  }
}

async function timeseries(panel, box) {
  const { unit, custom, min, max, decimals } = panel.fieldConfig.defaults;
  const log = custom.scaleDistribution?.type === "log";
  const answers = await Promise.all(panel.targets.map(then));
  const lines = answers.flatMap((answer, i) => answer.map(({ metric, values }) => ({
    name: legend(panel.targets[i], metric),
    values: values.map(([t, v]) => [t, Number(v)]).filter(([, v]) => Number.isFinite(v) && (!log || v > 0)),
  }))).filter((l) => l.values.length > 0).sort((a, b) => (a.name < b.name ? -1 : 1));
  if (lines.length === 0) return empty(panel, box);

  const all = lines.flatMap((l) => l.values.map(([, v]) => v));
  const lowest = min ?? Math.min(...all), highest = max ?? Math.max(...all, decimals === 0 ? 4 : 0);
  const marks = log ? logTicks(Math.min(...all), Math.max(...all)) : ticks(lowest, highest, unit);
  const scale = log ? Math.log10 : (v) => v;
  const w = box.clientWidth - 16, h = box.clientHeight - 24 - 38, left = 62, bottom = 18;
  const x = (t) => left + ((t - from) / (to - from)) * (w - left - 6);
  const y = (v) => 6 + (1 - (scale(v) - scale(marks[0])) / (scale(marks.at(-1)) - scale(marks[0]))) * (h - bottom - 6);

  const svg = draw(box, "svg", { width: w, height: h });
  for (const mark of marks) {
    draw(svg, "line", { class: "grid", x1: left, x2: w, y1: y(mark), y2: y(mark) });
    draw(svg, "text", { x: left - 6, y: y(mark) + 3, "text-anchor": "end" }, format(unit, mark, decimals));
  }
  const spacing = [60, 120, 300, 600, 1800, 3600].find((s) => (to - from) / s <= w / 75) ?? 3600;
  for (let t = Math.ceil(from / spacing) * spacing; t <= to; t += spacing) {
    draw(svg, "line", { class: "grid", x1: x(t), x2: x(t), y1: 6, y2: h - bottom });
    draw(svg, "text", { x: x(t), y: h - 4, "text-anchor": "middle" }, new Date(t * 1000).toTimeString().slice(0, 5));
  }
  const below = add(box, "div", "legend");
  lines.forEach((l, i) => {
    const stroke = palette[i % palette.length];
    let path = "", last = -Infinity;
    for (const [t, v] of l.values) {
      path += `${t - last > step ? "M" : "L"}${x(t).toFixed(1)} ${y(v).toFixed(1)}`;
      last = t;
    }
    draw(svg, "path", { d: path, fill: "none", stroke, "stroke-width": 1.4, "stroke-linecap": "round" });
    const name = add(below, "span");
    add(name, "i").style.background = stroke;
    name.append(l.name);
  });
}

const kinds = { stat, table, timeseries };

try {
  const { panels } = await (await fetch("dashboard.json")).json();
  await Promise.all(panels.map(async (panel) => {
    const box = place(panel);
    if (panel.type === "row") return void (box.textContent = panel.title);
    add(box, "h2", "", panel.title);
    try {
      if (!(panel.type in kinds)) throw new Error(`cannot draw a ${panel.type}`);
      await kinds[panel.type](panel, box);
    } catch (error) {
      outcome.errors.push(`${panel.title}: ${error.stack}`);
    }
  }));
} catch (error) {
  outcome.errors.push(error.stack);
}
outcome.height += 16;
await fetch("outcome", { method: "POST", body: JSON.stringify(outcome) });
