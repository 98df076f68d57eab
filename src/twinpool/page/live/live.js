// Asks the gateway how it is, every two seconds while somebody looks, and shows it.

import { showCharts } from "./charts.js";
import { element, keep, say } from "./dom.js";
import { age } from "./figures.js";
import { showPools } from "./pools.js";
import { showTiles } from "./tiles.js";
import { showBalance, showDecisions, showMoves } from "./told.js";

const EVERY_MS = 2000;
const PATIENCE_MS = 5000;
const PATHS = ["admin/state", "admin/decisions?limit=10", "admin/history"];
const TOKEN = "twinpool-admin-token";

const at = (id) => document.getElementById(id);
let lostSince = null;
let timer = null;

class Unauthorized extends Error {}

async function ask(path) {
  const token = sessionStorage.getItem(TOKEN);
  if (token && !/^[!-~]+$/.test(token)) throw new Unauthorized(); // no header can have it, and fetch would fail as if nobody answered
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  const answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
  if (answer.status === 401) throw new Unauthorized();
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

/** One look. Those that fall due while the page is hidden are made up for when it is seen again. */
async function look() {
  clearTimeout(timer);
  if (document.hidden) return;
  let again = true;
  try {
    show(...(await Promise.all(PATHS.map(ask))));
  } catch (problem) {
    again = !(problem instanceof Unauthorized);
    if (again) showLost(problem);
    else showLocked();
  }
  if (again) timer = setTimeout(look, EVERY_MS);
}

function show(state, recent, history) {
  lostSince = null;
  at("told").hidden = false;
  at("told").classList.remove("stale");
  at("token").hidden = true;
  const { gateway, health, indicators } = state;
  document.title = `${health.tone === "good" ? "" : "⚠ "}Twinpool`;
  const models = gateway.models.join(", ") || "no model";
  say(at("service"), `${models} at ${gateway.url} · version ${state.version}, up ${age(state.uptime_s)}`);
  showHealth(health.tone, `${health.words}.`, "", health.findings);
  showTiles(at("tiles"), state, history);
  showPools(at("pools"), state);
  showCharts(at("charts"), history, indicators.limits);
  showBalance(at("balance"), state.balance);
  showMoves(at("moves"), recent.role_changes);
  showDecisions(at("decisions"), recent.decisions);
  document.documentElement.dataset.looks = Number(document.documentElement.dataset.looks ?? 0) + 1;
}

function showHealth(tone, sentence, since, findings) {
  at("health").dataset.tone = tone;
  say(at("sentence"), sentence);
  say(at("since"), since);
  const make = () => element("li", "", element("b"), element("span"));
  keep(at("findings"), findings, (finding) => finding.words, make, (node, { tone: its, words, do: remedy }) => {
    node.dataset.tone = its;
    say(node.children[0], words === findings[0].words ? "" : `${words}.`); // the sentence has said the first
    say(node.children[1], remedy ? `What to do: ${remedy}.` : "");
  });
}

function showLost(problem) {
  lostSince ??= new Date();
  const ago = age((Date.now() - lostSince) / 1000);
  document.title = "⚠ Twinpool";
  at("told").classList.add("stale");
  showHealth(
    "bad",
    "The gateway does not answer.",
    `Since ${lostSince.toLocaleTimeString("en-GB")}, ${ago} ago. What stands below is from before; this page asks again by itself.`,
    [],
  );
  console.info(String(problem));
}

function showLocked() {
  at("told").hidden = true;
  showHealth("unknown", "The gateway answers, to those who have its token.", "", []);
  at("token").hidden = false;
  at("token-text").focus();
}

at("token").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, at("token-text").value.trim());
  at("token-text").value = "";
  look();
});
document.addEventListener("visibilitychange", look);
look();
