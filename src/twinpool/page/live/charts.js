// The last quarter of an hour, drawn by Chart.js. Each canvas also says in words what it shows last.

import { element } from "./dom.js";
import { NONE, count, percent, seconds, tokens } from "./figures.js";

const RANGES = [1, 2, 5, 10, 15]; // minutes: a gateway that has just been started has little to show
const drawn = [];

const last = (values) => values.findLast((value) => value != null) ?? null;
const rate = (values, history) => values.slice(0, -1).map((value) => value / history.window_s).concat(null);

/** What is drawn: lines of the history, the limits beside them, and how to read a value aloud. */
const CHARTS = [
  {
    title: "Workers in each pool",
    lines: (history) =>
      Object.entries(history.workers)
        .filter(([role, values]) => role !== "colocated" || values.some(Boolean))
        .map(([role, values]) => ({ label: role, values, color: role, look: { fill: "stack", stepped: "after", borderWidth: 1 } })),
    axis: { stacked: true, ticks: { precision: 0 } },
    format: count,
  },
  {
    title: "Traffic, tokens a second",
    lines: (history) => [
      { label: "prompts read", values: rate(history.prompt_tokens, history), color: "prefill", look: { fill: "origin" } },
      { label: "answers written", values: rate(history.output_tokens, history), color: "decode", look: { yAxisID: "right" } },
    ],
    right: true,
    format: tokens,
  },
  {
    title: "Time to the first token, mean",
    lines: (history) => [
      { label: "long prompts", values: history.ttft_long_s, color: "first" },
      { label: "short prompts", values: history.ttft_short_s, color: "second" },
    ],
    limit: (limits) => ["limit", limits.ttft_long_s],
    format: seconds,
  },
  {
    title: "Worst gap between two tokens",
    lines: (history) => [{ label: "worst gap", values: history.worst_gap_s, color: "first" }],
    limit: (limits) => ["objective", limits.itl_s],
    axis: { type: "logarithmic", beginAtZero: false, suggestedMin: 0.01, suggestedMax: 1, afterBuildTicks: keepPowers },
    format: seconds,
  },
  {
    title: "Use of the workers, beside the load",
    lines: (history) => [
      { label: "use", values: history.utilization_ratio, color: "first" },
      {
        label: "load, tokens",
        values: history.offered_tokens.slice(0, -1).concat(null),
        color: "muted",
        look: { yAxisID: "right", fill: "origin", borderWidth: 1 },
      },
    ],
    limit: (limits) => ["floor", limits.utilization_floor_ratio],
    axis: { max: 1 },
    right: true,
    format: percent,
    rightFormat: tokens,
  },
  {
    title: "Waiting, and lost",
    lines: (history) => [
      { label: "most that waited", values: history.waiting_most, color: "first", look: { fill: "origin" } },
      {
        label: "failed or refused",
        values: history.ended.failed.map((failed, at) => failed + history.ended.refused[at]),
        color: "bad",
      },
    ],
    axis: { ticks: { precision: 0 }, suggestedMax: 4 },
    format: count,
  },
];

/** On a logarithmic axis the powers of ten, and what lies halfway. */
function keepPowers(axis) {
  axis.ticks = axis.ticks.filter(({ value }) => /^[13](\.0*)?e/.test(value.toExponential(1)));
}

/** Draw, or draw anew. */
export function showCharts(parent, history, limits) {
  if (!drawn.length) begin(parent);
  const length = history.waiting_most.length;
  const at = (place) => -Math.max(0, (length - 2 - place) * history.window_s + history.passed_s) / 60;
  const minutes = Array.from({ length }, (_, place) => (place === length - 1 ? 0 : at(place)));
  const range = RANGES.find((most) => most >= -minutes[0]) ?? RANGES.at(-1);
  for (const { chart, what } of drawn) {
    const lines = what.lines(history);
    chart.data.datasets = [...lines.map((line) => dataset(line, minutes)), ...limitLine(what, limits, range)];
    chart.options.scales.x.min = -range;
    chart.options.scales.x.ticks.stepSize = range === 15 || range === 10 ? 5 : 1;
    chart.update("none");
    const told = lines.map(({ label, values, look }) => `${label} ${formatOf(what, look)(last(values)) ?? NONE}`);
    chart.canvas.setAttribute("aria-label", `${what.title}. Now: ${told.join(", ")}`);
  }
}

const formatOf = (what, look) => (look?.yAxisID === "right" && what.rightFormat) || what.format;

function begin(parent) {
  for (const what of CHARTS) {
    const canvas = element("canvas");
    canvas.setAttribute("role", "img");
    parent.append(element("figure", "card", element("h2", "", what.title), element("div", "chart", canvas)));
    drawn.push({ what, chart: new Chart(canvas, configuration(what)) });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolor);
  recolor();
}

function configuration(what) {
  const ticks = (format) => ({ maxTicksLimit: 6, callback: (value) => format(value) });
  const scales = {
    x: {
      type: "linear",
      max: 0,
      grid: { display: false },
      ticks: { maxRotation: 0, callback: (value) => (value === 0 ? "now" : `${-value} min ago`) },
    },
    y: { beginAtZero: true, border: { display: false }, ...what.axis, ticks: { ...ticks(what.format), ...what.axis?.ticks } },
  };
  if (what.right) {
    const format = what.rightFormat ?? what.format;
    scales.right = { position: "right", beginAtZero: true, border: { display: false }, grid: { display: false }, ticks: ticks(format) };
  }
  return {
    type: "line",
    data: { datasets: [] },
    options: {
      animation: false,
      maintainAspectRatio: false,
      interaction: { mode: "nearest", axis: "x", intersect: false },
      plugins: {
        legend: { position: "bottom", labels: { boxWidth: 14, boxHeight: 2 } },
        tooltip: {
          callbacks: {
            title: ([point]) => (point.parsed.x === 0 ? "now" : `${(-point.parsed.x).toFixed(1)} min ago`),
            label: ({ dataset, parsed }) => `${dataset.label}: ${formatOf(what, dataset)(parsed.y)}`,
          },
        },
      },
      scales,
    },
  };
}

function dataset({ label, values, color, look }, minutes) {
  const tone = colorOf(color);
  return {
    label,
    data: values.map((y, place) => ({ x: minutes[place], y })),
    borderColor: tone,
    backgroundColor: `${tone}2e`,
    borderWidth: 2,
    pointRadius: values.map((y, place) => (y != null && values[place - 1] == null && values[place + 1] == null ? 2 : 0)),
    pointBackgroundColor: tone,
    pointHitRadius: 8,
    spanGaps: false,
    ...look,
  };
}

function limitLine(what, limits, range) {
  if (!what.limit) return [];
  const [label, value] = what.limit(limits);
  const data = [{ x: -range, y: value }, { x: 0, y: value }];
  const look = { borderColor: colorOf("muted"), borderDash: [5, 4], borderWidth: 1.5, pointRadius: 0, fill: false };
  return [{ label: `${label} ${what.format(value)}`, data, ...look }];
}

const colorOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function recolor() {
  Chart.defaults.color = colorOf("muted");
  Chart.defaults.borderColor = colorOf("line");
  Chart.defaults.font.family = getComputedStyle(document.body).fontFamily;
  for (const { chart } of drawn) {
    for (const scale of Object.values(chart.options.scales)) {
      scale.ticks.color = colorOf("muted");
      scale.grid.color = colorOf("line");
    }
    chart.options.plugins.legend.labels.color = colorOf("text");
    chart.update("none");
  }
}
