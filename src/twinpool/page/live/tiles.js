// The figures that everybody looks at first. An indicator has a scale below it, with a mark where its limit is.

import { element, keep, say } from "./dom.js";
import { count, percent, plural, seconds } from "./figures.js";

const TONES = { pass: "good", fail: "bad", unknown: "unknown" };
const VERDICTS = { pass: "fits", fail: "does not fit", unknown: "not known yet" };

export function showTiles(parent, state, history) {
  keep(parent, tilesOf(state, history), (tile) => tile.name, make, fill);
}

function tilesOf(state, history) {
  const { indicators, requests } = state;
  const limits = indicators.limits;
  const gap = worstLately(history);
  return [
    {
      name: "Both indicators",
      value: VERDICTS[indicators.verdict],
      isWords: true,
      note: "the last hour against its limits",
      tone: TONES[indicators.verdict],
    },
    {
      name: "TTFT of long prompts",
      value: seconds(indicators.ttft_long_s),
      note: `limit ${seconds(limits.ttft_long_s)}, mean of ${count(indicators.long_requests)}`,
      tone: TONES[indicators.verdicts[0]],
      scale: [indicators.ttft_long_s, limits.ttft_long_s, 2 * limits.ttft_long_s],
    },
    {
      name: "Use at the peak",
      value: percent(indicators.utilization_at_peak_ratio),
      note: `floor ${percent(limits.utilization_floor_ratio)}, mean ${percent(indicators.utilization_mean_ratio)}`,
      tone: TONES[indicators.verdicts[1]],
      scale: [indicators.utilization_at_peak_ratio, limits.utilization_floor_ratio, 1],
    },
    {
      name: "Worst gap",
      value: seconds(gap),
      note: `between two tokens, last minute; objective ${seconds(limits.itl_s)}`,
      tone: gap == null ? "unknown" : gap > 10 * limits.itl_s ? "bad" : "",
    },
    {
      name: "Requests",
      value: count(requests.live),
      note: requests.waiting ? `under way, ${count(requests.waiting)} of them waiting` : "under way, none waits",
      tone: "",
    },
    {
      name: "Lost",
      value: count((state.ended_lately.failed ?? 0) + (state.ended_lately.refused ?? 0)),
      note: `failed or refused, of ${plural(answered(state.ended_lately), "request")} in five minutes`,
      tone: "",
    },
  ];
}

const answered = (ended) => (ended.ok ?? 0) + (ended.failed ?? 0) + (ended.refused ?? 0);

function worstLately(history) {
  const windows = 1 + 60 / history.window_s;
  const seen = history.worst_gap_s.slice(-windows).filter((gap) => gap != null);
  return seen.length ? Math.max(...seen) : null;
}

function make() {
  const scale = element("div", "scale", element("i"), element("b"));
  scale.setAttribute("aria-hidden", "true");
  return element("div", "tile card", element("h2"), element("strong"), element("span"), scale);
}

function fill(node, tile) {
  const [name, value, note, scale] = node.children;
  node.dataset.tone = tile.tone;
  say(name, tile.name);
  say(value, tile.value);
  value.className = tile.isWords ? "" : "number";
  say(note, tile.note);
  scale.hidden = !tile.scale;
  if (!tile.scale) return;
  const [at, limit, most] = tile.scale;
  scale.style.setProperty("--at", `${Math.min(100, (100 * (at ?? 0)) / most)}%`);
  scale.style.setProperty("--limit", `${(100 * limit) / most}%`);
}
